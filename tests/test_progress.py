"""Progress bar and summary table: plain text off a terminal, live on one, dashes for what is missing."""

from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console

from e3fast.progress import ProgressBar, clock_text, status_text, summary_table

STEP = {
    "clean_accuracy": 0.42,
    "entropy": 0.71,
    "entropy_target": 0.76,
    "temperature": 1.03,
    "tokens_per_second": 1234.5,
    "verdict/failed": 0,
    "all_wrong_share": 0.3,
    "generated_tokens": 1000,
    "peak_gib": 2.5,
    "stepped": True,
    "seconds/generate": 6.0,
    "seconds/update": 4.0,
}
BEFORE = {
    "step": 0,
    "pass@1": 0.21,
    "pass@4": 0.33,
    "by_source": {"gym:chain_sum#0": {"pass@1": 0.1, "pass@4": 0.2}, "[red]x": {"pass@1": 0.3, "pass@4": 0.4}},
}
AFTER = BEFORE | {"step": 100, "pass@1": 0.33}


def step(index: int, **changes: Any) -> dict[str, Any]:
    return STEP | {"step": index} | changes


def rendered(before: dict[str, Any] | None, after: dict[str, Any] | None, metrics: list[dict[str, Any]]) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(summary_table(before, after, metrics))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_plain_output_has_a_line_a_step_and_no_control_characters() -> None:
    out = io.StringIO()
    bar = ProgressBar(3, console=Console(file=out, width=40), plain_every=0)
    for index in range(3):
        bar.update(step(index))
    bar.note("saved \x1b[31mcheckpoint\x07")
    bar.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 4 and all(line.isprintable() for line in lines)
    assert lines[0] == "step 1/3  pass 42.0%  entropy 0.710/0.760  T 1.03  1,234 tok/s  0:20 left"
    assert lines[3] == "saved ?[31mcheckpoint?"


def test_plain_output_is_thinned_but_shows_both_ends() -> None:
    out = io.StringIO()
    bar = ProgressBar(50, console=Console(file=out), plain_every=3600)
    for index in range(50):
        bar.update(step(index))
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["step 1/50", "step 50/50"]


def test_live_bar_fits_a_terminal_of_80_columns() -> None:
    out = io.StringIO()
    bar = ProgressBar(100, done=10, console=Console(file=out, width=80, force_terminal=True))
    bar.update(step(10))
    bar.note("[bold]kept as it is[/bold]")
    bar.close()
    bar.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "step 11/100" in text and "1,234 tok/s" in text and "14:50 left" in text and "…" not in text
    assert "[bold]kept as it is[/bold]" in text


def test_status_leaves_out_what_is_missing_and_warns() -> None:
    assert status_text({"step": 0, "entropy": float("nan"), "clean_accuracy": None}, 0) == ""
    assert status_text({"verdict/failed": 3, "stepped": False}, 0) == "3 failed  no signal"
    assert [clock_text(s) for s in (5, 65, 3600.4)] == ["0:05", "1:05", "1:00:00"]


def test_summary_shows_gain_entropy_and_costs() -> None:
    metrics = [step(i, all_wrong_share=0.5 - 0.02 * i, entropy=0.7 + 0.001 * i) for i in range(20)]
    text = re.sub(r" +", " ", rendered(BEFORE, AFTER, metrics))
    for words in (
        "held-out pass@1 │ 21.0% │ 33.0% │ +12.0 points",
        "gym:chain_sum#0 pass@1 │ 10.0% │ 10.0% │ +0.0 points",
        "[red]x pass@4 │ 40.0% │ 40.0%",
        "all-wrong groups │ 49.0% │ 13.0% │ -36.0 points",
        "│ 0.700 │ 0.718 │ -5.5% of target 0.760",
        "generated tokens │ │ 20,000",
        "generated tokens / s │ │ 100 ",
        "minutes of training │ │ 3.3",
        "peak memory (GiB) │ │ 2.50",
        "failed rollouts │ │ 0",
    ):
        assert words in text


def test_summary_of_nothing_is_dashes() -> None:
    text = rendered(None, None, [])
    assert "pass@1" not in text and "steps" in text
    assert "pass@1" in rendered(BEFORE, None, [{"step": 0}])
