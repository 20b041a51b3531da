"""The report page: safe against hostile text, self-contained, and made of whatever can be read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from e3fast.report import write_report
from e3fast.report_parts import clip, pick_samples
from e3fast.report_plots import all_plots, smooth, visits_by_difficulty
from e3fast.runlog import ROLLOUT_SCHEMA, RunLog, read_metrics, read_rollouts
from e3fast.types import VERDICTS, Group, Prompt, Request, Rollout, Score, Verdict

HOSTILE = "<script>alert(1)</script></script><img src=http://evil.test/x.png onerror=alert(2)> & \x1b[31m \0 \ud800"


def make_group(row: int, verdicts: Sequence[Verdict], text: str = "4") -> Group:
    messages = ({"role": "user", "content": f"{text} question"},)
    request = Request(Prompt(f"p{row}", row, (1,), messages, text, f"source {text}"), len(verdicts), 1.0, 8, 0)
    rollouts = tuple(Rollout(request, (1, 2), text, (0.0, 0.0), "stop", 0) for _ in verdicts)
    return Group(row, request, rollouts, tuple(Score(float(v == "correct"), v) for v in verdicts))


def mixed(correct: int, size: int) -> list[Verdict]:
    return ["correct" if i < correct else "wrong" for i in range(size)]


def step_row(step: int) -> dict[str, Any]:
    verdicts = {f"verdict/{v}": n for v, n in zip(VERDICTS, (20, 3, 1, 8, 0), strict=True)}
    return verdicts | {
        "step": step,
        "rollouts": 32,
        "clean_accuracy": 0.4 + 0.01 * step,
        "entropy": 0.7,
        "entropy_target": 0.75,
        "temperature": 1.0,
        "all_wrong_share": 0.2,
        "all_correct_share": 0.1,
        "mean_completion_tokens": 9.0,
        "grad_norm": 0.5,
        "generated_tokens": 300,
        "total_generated_tokens": 300 * (step + 1),
        "tokens_per_second": 60,
        "peak_gib": 1.5,
        "seconds/generate": 4.0,
        "seconds/update": 1.0,
    }


def make_run(path: Path, num_steps: int = 12, text: str = "4") -> Path:
    log = RunLog(path)
    for step in range(num_steps):
        log.write_step(step_row(step))
        log.write_rollouts(step, [make_group(i, mixed(i, 6), text) for i in range(7)])
    for step, rate in ((0, 0.25), (num_steps, 0.5)):
        by_source = {name: {"num_prompts": 8, "pass@1": rate, "pass@4": rate} for name in (text, "gym:sum#1")}
        log.write_eval({"step": step, "pass@1": rate, "pass@4": rate + 0.2, "by_source": by_source})
    (path / "config.toml").write_text(f"seed = 3\n[model]\nname = {json.dumps(text.replace(chr(0xD800), ''))}\n")
    (path / "versions.json").write_text(json.dumps({"torch": "2.9.0", "machine": text}))
    return path


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, visible text, and the JSON of the figures."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.scripts: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data
        else:
            self.words += data

    @property
    def figures(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


def test_report_shows_the_run(tmp_path: Path) -> None:
    page = Page(write_report(make_run(tmp_path / "my-run")))
    for words in ("my-run", "25.0%", "50.0%", "+25.0 points", "gym:sum#1", "Configuration", "3,600", "1.50 GiB"):
        assert words in page.words
    assert "Not on this page" not in page.words
    assert len(page.figures) == sum(tag == "div" and attrs.get("class") == "figure" for tag, attrs in page.tags) == 11
    assert "http" not in json.dumps(page.figures)


def test_page_loads_nothing(tmp_path: Path) -> None:
    page = Page(write_report(make_run(tmp_path, text=HOSTILE)))
    assert not [attrs for _, attrs in page.tags if attrs.keys() & {"src", "href"}]
    assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "base")]
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith("default-src 'none'")


def test_hostile_text_is_shown_not_run(tmp_path: Path) -> None:
    hostile = Page(write_report(make_run(tmp_path / "hostile", text=HOSTILE)))
    tame = Page(write_report(make_run(tmp_path / "tame")))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in tame.tags]
    assert hostile.words.count("<script>alert(1)</script></script>") > 20
    raw = (tmp_path / "hostile/report.html").read_text()
    assert "<script>alert(1)" not in raw and "\x1b" not in raw.split("<script")[0] and "\0" not in raw


def test_figures_are_valid_plotly(tmp_path: Path) -> None:
    from plotly.graph_objects import Figure

    make_run(tmp_path)
    plots = all_plots(read_metrics(tmp_path), [{"step": 0, "pass@1": 0.5}], read_rollouts(tmp_path), 8, 16)
    for plot in plots:
        Figure(data=plot.data, layout=plot.layout)


@pytest.mark.parametrize("missing", ["eval.jsonl", "rollouts", "config.toml", "versions.json"])
def test_report_without_a_part(tmp_path: Path, missing: str) -> None:
    make_run(tmp_path)
    (tmp_path / missing).rename(tmp_path / "away")
    page = Page(write_report(tmp_path))
    assert len(page.figures) == (9 if missing == "rollouts" else 11)
    assert ("Not on this page" in page.words) == (missing in ("eval.jsonl", "rollouts"))


def test_damage_is_listed(tmp_path: Path) -> None:
    make_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "entr')
    (tmp_path / "config.toml").write_text("seed = = 3")
    (tmp_path / "versions.json").write_bytes(b"\xff{")
    (tmp_path / "rollouts/step_00011.parquet").write_bytes(b"PAR1 nothing")
    words = Page(write_report(tmp_path)).words
    for problem in ("metrics.jsonl: line 13 of 13", "config.toml: ", "versions.json: ", "rollouts/step_00011.parquet"):
        assert problem in words


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_short_runs(tmp_path: Path, num_steps: int) -> None:
    (tmp_path / "metrics.jsonl").touch()
    page = Page(write_report(make_run(tmp_path, num_steps)))
    assert ("metrics.jsonl: no step" in page.words) == (num_steps == 0)


def test_nulls_only(tmp_path: Path) -> None:
    RunLog(tmp_path).write_step({key: float("nan") for key in step_row(0)} | {"step": 0})
    assert Page(write_report(tmp_path)).figures == {}


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        write_report(tmp_path)


def test_budget_by_difficulty(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in range(2):
        sizes = (12, 10, 8, 6, 4)
        groups = [make_group(i, mixed(i, n)) for i, n in enumerate(sizes)]
        log.write_rollouts(step, [*groups, make_group(9, ["failed"])])
    step, fifth, size, labels = visits_by_difficulty(read_rollouts(tmp_path))
    assert [(s, f, n) for s, f, n in zip(step, fifth, size, strict=True)] == [
        (s, i, n) for s in range(2) for i, n in enumerate((12, 10, 8, 6, 4))
    ]
    assert labels == ["0%", "10%", "25%", "50%", "100%"]
    assert len(visits_by_difficulty(ROLLOUT_SCHEMA.empty_table())[0]) == 0


def test_samples_show_rare_verdicts_and_many_groups(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write_rollouts(0, [make_group(i, mixed(0, 8)) for i in range(10)] + [make_group(10, ["failed", "correct"])])
    picked = pick_samples(read_rollouts(tmp_path))
    assert len(picked) == 12 and {row["verdict"] for row in picked} == {"wrong", "failed", "correct"}
    assert len({row["group"] for row in picked}) == 11


def test_smoothing_and_clipping() -> None:
    assert smooth([0.0, None, 1.0]) == [0.0, 0.5, 1.0] and smooth([None]) == [None]
    assert clip("a" * 4001) == "a" * 4000 + " … 1 more characters" and clip(None) == ""
