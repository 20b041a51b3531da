"""The quickstart with E3 and without methods, at equal generated tokens.

    python -m benchmarks.quickstart [--seeds 3] [--save]

Each run is `e3fast train` in a fresh process, one after the other; the plain GRPO run of a seed stops at the tokens
its E3 twin generated. Metrics, one value a seed:

- pass_gain_points: held-out pass@1 after less before, points; pass_after_pct, pass4_after_pct beside it.
- seconds: the whole process, evaluations and report included. peak_gib: its peak resident memory.
- entropy_drift_pct: 100 |mean entropy of the last tenth of the steps / E3's target there - 1|, the same target for
both.
- all_wrong_share: share of groups without a correct rollout, mean over the steps after the first pass of the pool,
which
  E3 rolls out uniformly.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import Row, save, show
from e3fast.config import RunConfig, load_config
from e3fast.config_text import config_text
from e3fast.runlog import read_evals, read_metrics

RUN_FILE = Path(__file__).parents[1] / "runs" / "quickstart.toml"
UNITS = {
    "pass_gain_points": "points",
    "pass_before_pct": "%",
    "pass_after_pct": "%",
    "pass4_after_pct": "%",
    "seconds": "s",
    "peak_gib": "GiB",
    "entropy_drift_pct": "%",
    "all_wrong_share": "",
    "generated_tokens": "",
    "steps": "",
}


def run(config: RunConfig, folder: Path) -> dict[str, Any]:
    """One training; what it logged, its seconds and its peak memory."""
    file = folder.with_suffix(".toml")
    file.write_text(config_text(dataclasses.replace(config, output_dir=str(folder))))
    start = time.perf_counter()
    with (folder.with_suffix(".log")).open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "e3fast.cli", "train", str(file)], stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{file} failed:\n{folder.with_suffix('.log').read_text()[-3000:]}")
    seconds = time.perf_counter() - start
    return {
        "metrics": read_metrics(folder),
        "evals": read_evals(folder),
        "seconds": seconds,
        "peak_gib": usage.ru_maxrss / 2**20,
    }


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def last_tenth(rows: list[dict[str, Any]], key: str) -> float:
    return mean([row[key] for row in rows[-max(1, len(rows) // 10) :]])


def figures(done: dict[str, Any], target: float, first_pass: int) -> dict[str, float]:
    rows, (before, after) = done["metrics"], (done["evals"][0], done["evals"][-1])
    return {
        "pass_gain_points": 100 * (after["pass@1"] - before["pass@1"]),
        "pass_before_pct": 100 * before["pass@1"],
        "pass_after_pct": 100 * after["pass@1"],
        "pass4_after_pct": 100 * after["pass@4"],
        "seconds": done["seconds"],
        "peak_gib": done["peak_gib"],
        "entropy_drift_pct": 100 * abs(last_tenth(rows, "entropy") / target - 1),
        "all_wrong_share": mean([row["all_wrong_share"] for row in rows[first_pass:]]),
        "generated_tokens": rows[-1]["total_generated_tokens"],
        "steps": len(rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/quickstart.csv")
    args = parser.parse_args()
    base, found = load_config(RUN_FILE), {"e3": [], "grpo": []}
    pool = sum(source.count for source in base.data.train)
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(args.seeds):
            e3 = run(dataclasses.replace(base, seed=seed), Path(scratch) / f"e3-{seed}")
            target, tokens = last_tenth(e3["metrics"], "entropy_target"), e3["metrics"][-1]["total_generated_tokens"]
            # As many steps as the tokens allow: without annealing a run does not depend on its planned length.
            limit = dataclasses.replace(base.train, max_generated_tokens=tokens, steps=10 * base.train.steps)
            plain = dataclasses.replace(base, seed=seed, methods=(), train=limit)
            grpo = run(plain, Path(scratch) / f"grpo-{seed}")
            for provider, done in (("e3", e3), ("grpo", grpo)):
                found[provider].append(figures(done, target, pool // base.train.prompts_per_step))
                print(provider, seed, {k: round(v, 3) for k, v in found[provider][-1].items()}, flush=True)
    rows = [
        Row("quickstart", provider, metric, [one[metric] for one in runs], unit)
        for provider, runs in found.items()
        for metric, unit in UNITS.items()
    ]
    show("quickstart", rows)
    if args.save:
        save("quickstart", rows)
    return report_misses(found["e3"])


def report_misses(runs: list[dict[str, float]]) -> int:
    """1 where E3's run misses the bar: 20 points, 10 minutes, 8 GiB, entropy within 10 % of target."""
    limits = (
        ("pass_gain_points", min(one["pass_gain_points"] for one in runs) >= 20),
        ("seconds", max(one["seconds"] for one in runs) <= 600),
        ("peak_gib", max(one["peak_gib"] for one in runs) <= 8),
        ("entropy_drift_pct", mean([one["entropy_drift_pct"] for one in runs]) <= 10),
    )
    missed = [name for name, ok in limits if not ok]
    for name in missed:
        print(f"missed: {name}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
