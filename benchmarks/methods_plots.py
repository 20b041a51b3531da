"""Pictures of benchmarks.methods, from its stored runs: docs/methods/<case>-*.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.arms import Case

FOLDER = Path(__file__).parents[1] / "docs" / "methods"
PANELS = (
    ("entropy", "entropy, nats a token"),
    ("clean_accuracy", "clean pass rate"),
    ("all_wrong_share", "all-wrong prompts"),
)
FAMILIES = {
    "E3": ("grpo", "e3-budgets", "e3-temperature", "e3", "e3-annealed", "fixed-temperature", "entropy-bonus"),
    "selection and KL": ("grpo", "dapo", "greso", "mopps", "leeps", "expo", "expo-control"),
    "noise in the weights": ("grpo", "b3po", "m3po", "c3po", "noise-control"),
    "retries": ("grpo", "lope", "lope-control", "lope-control-shaped"),
}
POINTS = 60  # of a curve


def draw(case: Case, runs: Sequence[dict[str, Any]]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    own = [run for run in runs if run["case"] == case.name]
    families = {title: [n for n in names if n in case.names] for title, names in FAMILIES.items()}
    draw_curves(case.name, own, {title: names for title, names in families.items() if len(names) > 1})
    draw_passes(case, own)
    draw_grades(case, own)


def on_tokens(run: dict[str, Any], name: str, grid: np.ndarray) -> np.ndarray:
    """A run's curve over generated tokens: means over windows of a fifteenth of the run."""
    values = np.array([np.nan if v is None else v for v in run["curves"][name]], dtype=float)
    tokens = np.array(run["curves"]["tokens"], dtype=float)
    width = grid[-1] / 30
    return np.array([np.nanmean(values[np.abs(tokens - t) <= max(width, np.abs(tokens - t).min())]) for t in grid])


def draw_curves(case: str, runs: Sequence[dict[str, Any]], families: dict[str, list[str]]) -> None:
    end = min(run["generated_tokens"] for run in runs)
    grid = np.linspace(0, end, POINTS)
    figure, axes = plt.subplots(
        len(families), len(PANELS), figsize=(13.5, 3.1 * len(families)), squeeze=False, sharex=True
    )
    for row, (title, names) in zip(axes, families.items(), strict=True):
        for axis, (metric, label) in zip(row, PANELS, strict=True):
            for name in names:
                curves = [on_tokens(run, metric, grid) for run in runs if run["provider"] == name]
                if not curves:
                    continue
                style = {"color": "black", "lw": 2} if name == "grpo" else {"lw": 1.3}
                (line,) = axis.plot(grid / 1e3, np.mean(curves, 0), label=name, **style)
                axis.fill_between(
                    grid / 1e3, np.min(curves, 0), np.max(curves, 0), color=line.get_color(), alpha=0.1, lw=0
                )
            axis.set_title(f"{title}: {label}", fontsize=9)
            axis.grid(alpha=0.3)
        row[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    for axis in axes[-1]:
        axis.set_xlabel("thousand generated tokens")
    finish(figure, f"{case}-curves.png")


def draw_passes(case: Case, runs: Sequence[dict[str, Any]]) -> None:
    """pass@1 and pass@16 after training: each seed a dot, the mean a bar; the start and GRPO's mean as lines."""
    figure, axes = plt.subplots(1, 2, figsize=(13.5, 0.32 * len(case.arms) + 1.2), sharey=True)
    names = [name for name in case.names if any(run["provider"] == name for run in runs)]
    for axis, metric in zip(axes, ("pass1", "pass16"), strict=True):
        for i, name in enumerate(names):
            values = [run[metric] for run in runs if run["provider"] == name]
            axis.barh(i, np.mean(values), color="tab:blue", alpha=0.35)
            axis.plot(values, [i] * len(values), "o", color="tab:blue", ms=4)
        grpo = [run[metric] for run in runs if run["provider"] == "grpo"]
        axis.axvline(np.mean(grpo), color="black", lw=1, label="grpo, mean")
        axis.axvline(np.mean([run[f"{metric}_before"] for run in runs]), color="gray", ls=":", label="before training")
        axis.set_title(f"held-out pass@{metric.removeprefix('pass')}, %", fontsize=10)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0].invert_yaxis()
    axes[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    finish(figure, f"{case.name}-passes.png")


def draw_grades(case: Case, runs: Sequence[dict[str, Any]]) -> None:
    """Difference to GRPO by grade of difficulty, points, mean over seeds."""
    names = [name for name in case.names if name != "grpo" and any(run["provider"] == name for run in runs)]
    grades = list(runs[0]["by_grade"])
    figure, axes = plt.subplots(1, 2, figsize=(12, 0.34 * len(names) + 1.4), sharey=True, layout="constrained")
    for k, (axis, label) in enumerate(zip(axes, ("pass@1", "pass@16"), strict=True)):
        gaps = np.array([grade_means(runs, name, k) - grade_means(runs, "grpo", k) for name in names])
        limit = max(np.abs(gaps).max(), 1.0)
        image = axis.imshow(gaps, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
        for i, row in enumerate(gaps):
            for j, value in enumerate(row):
                ink = "white" if abs(value) > 0.7 * limit else "black"
                axis.text(j, i, f"{value:+.0f}", ha="center", va="center", fontsize=7, color=ink)
        axis.set_xticks(range(len(grades)), [" ".join(grade.split()[1:]) for grade in grades], fontsize=8)
        axis.set_title(f"{label} less GRPO's, points", fontsize=10)
        figure.colorbar(image, ax=axis, shrink=0.8)
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    figure.savefig(FOLDER / f"{case.name}-grades.png", dpi=110)
    plt.close(figure)


def grade_means(runs: Sequence[dict[str, Any]], name: str, k: int) -> np.ndarray:
    """(grades,) pass@1 (k = 0) or pass@16 (k = 1), mean over an arm's seeds."""
    own = [run["by_grade"] for run in runs if run["provider"] == name]
    return np.mean([[grades[grade][k] for grade in grades] for grades in own], axis=0)


def finish(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(FOLDER / name, dpi=110)
    plt.close(figure)
