"""docs/methods/results.md from the stored runs of benchmarks.methods: no figure on that page is written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arms import Case
from benchmarks.methods_runs import paired_gain, rescues

PAGE = Path(__file__).parents[1] / "docs" / "methods" / "results.md"
INTRODUCTION = """# Do the methods help?

Made by `python -m benchmarks.methods --table` from `benchmarks/results/methods_runs.jsonl`; the columns are explained
in `benchmarks/methods.py`. Mean over seeds, smallest and largest in brackets. Rescued: problems with a correct sample
where GRPO's run of that seed has none; lost: the reverse. Small models and short runs: what helps or fails here need
not do so at 7 billion parameters and ten thousand steps."""
TEXTS = {
    "nano": """
A model of 1.3 million parameters that adds as a careless pupil does (`benchmarks/nano.py`): sums of 2, 3, 4, 6 and 8
numbers, 240 held-out problems, 16 samples each at temperature 1; 16 prompts x 8 rollouts a step, learning rate
1e-4.""",
    "demo": """
SmolLM2-135M on the quickstart's sums, 64 held-out problems, 16 samples each; retries are 2 prefixes x 4 rollouts, of
20 to 60 words where they have any.""",
}
COLUMNS = {
    "pass1": ("pass@1, %", 1),
    "pass16": ("pass@16, %", 1),
    "all_wrong_share": ("all-wrong", 3),
    "signal_share": ("mixed", 3),
    "entropy_drift_pct": ("entropy off, %", 1),
    "rescued": ("rescued", 1),
    "lost": ("lost", 1),
    "steps": ("steps", 0),
    "seconds": ("seconds", 0),
}


def write_page(cases: Sequence[Case], runs: list[dict[str, Any]]) -> None:
    parts = [INTRODUCTION]
    for case in cases:
        own = [run for run in runs if run["case"] == case.name]
        if own:
            parts += section(case, own)
    PAGE.write_text("\n\n".join(parts) + "\n")


def section(case: Case, runs: list[dict[str, Any]]) -> list[str]:
    tokens = [run["generated_tokens"] for run in runs]
    before = [np.mean([run[name] for run in runs]) for name in ("pass1_before", "pass16_before")]
    start = f"Every run starts from the same weights (pass@1 {before[0]:.1f} %, pass@16 {before[1]:.1f} %)"
    end = f"ends at equal generated tokens ({min(tokens):,} to {max(tokens):,})"
    commits = ", ".join(sorted({run["sha"] for run in runs}))
    pictures = [f"![{case.name}: {kind}]({case.name}-{kind}.png)" for kind in ("passes", "curves", "grades")]
    return [
        f"## {case.name}",
        f"{TEXTS[case.name].strip()}\n{start} and {end}.\n{runs[0]['machine']}; commits {commits}.",
        figures_table(case, runs),
        gains_table(case, runs),
        *pictures,
    ]


def figures_table(case: Case, runs: list[dict[str, Any]]) -> str:
    lines = ["| arm | seeds | " + " | ".join(title for title, _ in COLUMNS.values()) + " |"]
    lines.append("|---|" + "---|" * (len(COLUMNS) + 1))
    for name in case.names:
        own = [run for run in runs if run["provider"] == name]
        if own:
            values = {key: [run[key] for run in own] for key in COLUMNS if key in own[0]}
            pairs = rescues(runs, case.name, name)
            values |= {"rescued": [won for won, _ in pairs], "lost": [lost for _, lost in pairs]}
            cells = [spread(values[key], digits) for key, (_, digits) in COLUMNS.items()]
            lines.append(f"| {name} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return ""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return f"{np.mean(values):.{digits}f} ({low} to {high})"


def gains_table(case: Case, runs: list[dict[str, Any]]) -> str:
    """Differences to GRPO and to each arm's own controls."""
    lines = [
        "Differences, points: mean and 95 % interval of a paired bootstrap over problems and seeds.\n",
        "| arm | less | pass@1 | pass@16 |",
        "|---|---|---|---|",
    ]
    for name in case.names:
        for control in dict.fromkeys(("grpo", *case.controls.get(name, ()))):
            gains = [paired_gain(runs, case.name, name, control, k) for k in (1, 16)]
            if control != name and gains[0] is not None:
                lines.append(f"| {name} | {control} | " + " | ".join(interval(gain) for gain in gains) + " |")
    return "\n".join(lines)


def interval(gain: tuple[float, float, float] | None) -> str:
    if gain is None:
        return ""
    middle, low, high = gain
    bold = "**" if low > 0 or high < 0 else ""
    return f"{bold}{middle:+.1f}{bold} ({low:+.1f} to {high:+.1f})"
