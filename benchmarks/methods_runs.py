"""The stored runs of benchmarks.methods, and what pairs of them say. One line of methods_runs.jsonl is one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import FOLDER
from e3fast.evaluate import pass_at_k

RUNS = FOLDER / "methods_runs.jsonl"


def read_runs(path: Path = RUNS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def find_run(runs: list[dict[str, Any]], case: str, provider: str, seed: int) -> dict[str, Any] | None:
    return next((r for r in runs if (r["case"], r["provider"], r["seed"]) == (case, provider, seed)), None)


def solved(one: dict[str, Any]) -> set[str]:
    return {name for name, (_, correct) in one["counts"].items() if correct}


def rescues(runs: list[dict[str, Any]], case: str, provider: str) -> list[tuple[int, int]]:
    """Of each seed that GRPO has a run of: problems with a correct sample where GRPO has none, and the reverse."""
    own = [one for one in runs if (one["case"], one["provider"]) == (case, provider)]
    pairs = [(solved(one), solved(other)) for one in own if (other := find_run(runs, case, "grpo", one["seed"]))]
    return [(len(mine - theirs), len(theirs - mine)) for mine, theirs in pairs]


def paired_gain(
    runs: list[dict[str, Any]], case: str, provider: str, control: str, k: int, draws: int = 4000
) -> tuple[float, float, float] | None:
    """Mean difference of pass@k, points, and its 95 % interval: paired bootstrap over problems and seeds.

    None without a pair of runs of one seed.
    """
    own = [one for one in runs if (one["case"], one["provider"]) == (case, provider)]
    pairs = [(one, other) for one in own if (other := find_run(runs, case, control, one["seed"]))]
    if not pairs:
        return None
    rate = lambda one: np.array([pass_at_k(n, c, k) for _, (n, c) in sorted(one["counts"].items())])  # noqa: E731
    gaps = 100 * np.stack([rate(one) - rate(other) for one, other in pairs])  # (seeds, problems)
    rng = np.random.default_rng(0)
    means = [
        gaps[rng.integers(0, len(gaps), len(gaps))][:, rng.integers(0, gaps.shape[1], gaps.shape[1])].mean()
        for _ in range(draws)
    ]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(gaps.mean()), float(low), float(high)
