"""Do exploration methods help? Each against plain GRPO and its own control, at equal generated tokens.

    python -m benchmarks.methods [--case nano|demo] [--arms a,b] [--seeds 3] [--quick] [--table]

One run is one arm and one seed, `e3fast train` in a fresh process; its record is one line of
benchmarks/results/methods_runs.jsonl, and runs that stand there are not done again: stop and start as you like.
`--table` appends to methods.csv and draws the plots, from that file alone. `--quick` tries a few arms on a fraction of
the tokens and keeps nothing. Metrics, one value a seed:

- pass1, pass16: held-out pass@k after training, unbiased, 16 samples a problem at temperature 1, percent.
- all_wrong_share, signal_share: prompts of a step all of whose clean rollouts were wrong, or mixed; mean over the steps
  after the first pass of the pool.
- entropy_drift_pct: 100 |mean entropy of the last tenth of the steps / target - 1|; the target is that of the
  temperature control where there is one, else the mean entropy of the first three steps.
- rescue_net: held-out problems with a correct sample where GRPO's run of that seed has none, less the reverse.
- generated_tokens: all of them, rescues, refills and dropped groups included. seconds: the whole process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arms import INIT_STEPS, QUICK, Arm, Case, find_case, make_config
from benchmarks.quickstart import last_tenth, mean, run
from benchmarks.results import FOLDER, Row, commit, save, show
from e3fast.machine import describe

RUNS = FOLDER / "methods_runs.jsonl"
UNITS = {
    "seeds": "",
    "pass1": "%",
    "pass16": "%",
    "all_wrong_share": "",
    "signal_share": "",
    "entropy_drift_pct": "%",
    "rescue_net": "problems",
    "generated_tokens": "",
    "seconds": "s",
}
CURVES = ("entropy", "entropy_target", "clean_accuracy", "all_wrong_share", "signal_share", "temperature", "keep_rate")


def record(case: Case, arm: Arm, seed: int, done: dict[str, Any]) -> dict[str, Any]:
    """What a run leaves behind."""
    rows, after = done["metrics"], done["evals"][-1]
    later = rows[case.first_pass :] or rows
    start = mean([row["entropy"] for row in rows[:INIT_STEPS]])
    aimed = rows[-1]["entropy_target"] is not None
    target = last_tenth(rows, "entropy_target") if aimed else start
    return {
        "date": datetime.date.today().isoformat(),
        "sha": commit(),
        "machine": describe(),
        "case": case.name,
        "provider": arm.name,
        "seed": seed,
        "steps": len(rows),
        "generated_tokens": rows[-1]["total_generated_tokens"],
        "seconds": done["seconds"],
        "pass1": 100 * after["pass@1"],
        "pass16": 100 * after["pass@16"],
        "pass1_before": 100 * done["evals"][0]["pass@1"],
        "pass16_before": 100 * done["evals"][0]["pass@16"],
        "by_grade": {k: [100 * v["pass@1"], 100 * v["pass@16"]] for k, v in after["by_source"].items()},
        "all_wrong_share": mean([row["all_wrong_share"] for row in later]),
        "signal_share": mean([row["signal_share"] for row in later]),
        "entropy_drift_pct": 100 * abs(last_tenth(rows, "entropy") / target - 1),
        "mean_temperature": mean([row["temperature"] for row in rows]),
        "counts": after["counts"],
        "curves": {"tokens": [row["total_generated_tokens"] for row in rows]}
        | {name: [None if row[name] is None else round(row[name], 4) for row in rows] for name in CURVES},
    }


def read_runs(path: Path = RUNS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def find_run(runs: list[dict[str, Any]], case: str, provider: str, seed: int) -> dict[str, Any] | None:
    return next((r for r in runs if (r["case"], r["provider"], r["seed"]) == (case, provider, seed)), None)


def run_missing(case: Case, arms: list[Arm], num_seeds: int, path: Path) -> None:
    """Seed after seed, so that a table of one seed is there early; an arm's forerunner comes before it."""
    for seed in range(num_seeds):
        for arm in arms:
            runs = read_runs(path)
            if find_run(runs, case.name, arm.name, seed):
                continue
            earlier = find_run(runs, case.name, arm.needs, seed) if arm.needs else None
            if arm.needs and earlier is None:
                print(f"{arm.name} needs a run of {arm.needs} with seed {seed}: left out")
                continue
            with tempfile.TemporaryDirectory() as scratch:
                done = run(make_config(case, arm, seed, earlier), Path(scratch) / "run")
            line = record(case, arm, seed, done)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            figures = {name: round(line[name], 3) for name in ("pass1", "pass16", "entropy_drift_pct", "seconds")}
            print(case.name, arm.name, seed, figures, flush=True)


def solved(one: dict[str, Any]) -> set[str]:
    return {name for name, (_, correct) in one["counts"].items() if correct}


def rescue_net(one: dict[str, Any], control: dict[str, Any]) -> int:
    mine, theirs = solved(one), solved(control)
    return len(mine - theirs) - len(theirs - mine)


def table(case: Case, runs: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for arm in case.arms:
        own = [one for one in runs if one["case"] == case.name and one["provider"] == arm.name]
        values = {name: [one[name] for one in own] for name in UNITS if name not in ("seeds", "rescue_net")}
        pairs = [(one, find_run(runs, case.name, "grpo", one["seed"])) for one in own]
        values["rescue_net"] = [rescue_net(one, control) for one, control in pairs if control]
        values["seeds"] = [len(own)]
        rows += [
            Row(case.name, arm.name, name, values[name], unit) for name, unit in UNITS.items() if values[name] and own
        ]
    return rows


def pass1_gain(
    runs: list[dict[str, Any]], case: str, provider: str, control: str, draws: int = 4000
) -> tuple[float, ...]:
    """Mean difference of pass@1, points, and its 95 % interval: paired bootstrap over problems and seeds."""
    pairs = [(one, find_run(runs, case, control, one["seed"])) for one in runs if one["case"] == case]
    pairs = [(one, other) for one, other in pairs if one["provider"] == provider and other]
    if not pairs:
        return (float("nan"),) * 3
    rate = lambda one: np.array([c / n for _, (n, c) in sorted(one["counts"].items())])  # noqa: E731
    gaps = np.stack([rate(one) - rate(other) for one, other in pairs])  # (seeds, problems)
    rng = np.random.default_rng(0)
    means = [
        gaps[rng.integers(0, len(gaps), len(gaps))][:, rng.integers(0, gaps.shape[1], gaps.shape[1])].mean()
        for _ in range(draws)
    ]
    return (100 * gaps.mean(), *(100 * np.quantile(means, (0.025, 0.975))))


def print_gains(case: Case, runs: list[dict[str, Any]]) -> None:
    for arm in case.arms:
        for control in dict.fromkeys(("grpo", *case.controls.get(arm.name, ()))):
            gain, low, high = pass1_gain(runs, case.name, arm.name, control)
            if control != arm.name and gain == gain:
                interval = f"pass@1 {gain:+.1f} points, 95 % in {low:+.1f} .. {high:+.1f}"
                print(f"{case.name}: {arm.name} less {control}: {interval}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", default="nano", choices=("nano", "demo"))
    parser.add_argument("--arms", default="", help="comma-separated; all by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a few arms, one seed, few tokens; nothing is kept")
    parser.add_argument("--table", action="store_true", help="no runs: table and plots from what there is")
    args = parser.parse_args()
    case = find_case(args.case, quick=args.quick)
    names = [name for name in args.arms.split(",") if name] or list(QUICK[case.name] if args.quick else case.names)
    if unknown := set(names) - set(case.names):
        parser.error(f"unknown arms {', '.join(sorted(unknown))}; known: {', '.join(case.names)}")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "runs.jsonl" if args.quick else RUNS
        if not args.table:
            run_missing(case, [arm for arm in case.arms if arm.name in names], 1 if args.quick else args.seeds, path)
        runs = read_runs(path)
    rows = table(case, runs)
    show("methods", rows)
    print_gains(case, runs)
    if args.table:
        from benchmarks.methods_plots import draw

        save("methods", rows)
        draw(case, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
