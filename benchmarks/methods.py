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

from benchmarks.arms import INIT_STEPS, QUICK, Arm, Case, find_case, make_config
from benchmarks.methods_runs import RUNS, find_run, read_runs, rescues
from benchmarks.quickstart import last_tenth, mean, run
from benchmarks.results import Row, commit, save, show
from e3fast.machine import describe

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


def table(case: Case, runs: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for arm in case.arms:
        own = [one for one in runs if one["case"] == case.name and one["provider"] == arm.name]
        values = {name: [one[name] for one in own] for name in UNITS if name not in ("seeds", "rescue_net")}
        values["rescue_net"] = [won - lost for won, lost in rescues(runs, case.name, arm.name)]
        values["seeds"] = [len(own)]
        rows += [
            Row(case.name, arm.name, name, values[name], unit) for name, unit in UNITS.items() if values[name] and own
        ]
    return rows


def report_misses(runs: list[dict[str, Any]]) -> int:
    """1 where the nano case misses its bar: what E3's two halves are for, mean over seeds."""
    own = lambda provider, name: [r[name] for r in runs if (r["case"], r["provider"]) == ("nano", provider)]  # noqa: E731
    names = ("grpo", "e3-temperature", "e3-budgets")
    if not all(own(name, "seed") for name in names):
        print("the bar needs runs of " + ", ".join(names))
        return 1
    drift = {name: mean(own(name, "entropy_drift_pct")) for name in names}
    wrong = {name: mean(own(name, "all_wrong_share")) for name in names}
    bars = {
        f"plain GRPO's entropy moves by 15 % or more: {drift['grpo']:.1f} %": drift["grpo"] >= 15,
        f"temperature control holds it within 10 %: {drift['e3-temperature']:.1f} %": drift["e3-temperature"] <= 10,
        f"budgets lower the all-wrong share, {wrong['grpo']:.3f} to {wrong['e3-budgets']:.3f}": wrong["e3-budgets"]
        < wrong["grpo"],
    }
    for text, held in bars.items():
        print(("held: " if held else "missed: ") + text)
    return 0 if all(bars.values()) else 1


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
    if args.quick:
        return 0
    if args.table:
        publish(case, rows, runs)
    return report_misses(runs) if case.name == "nano" else 0


def publish(case: Case, rows: list[Row], runs: list[dict[str, Any]]) -> None:
    """The rows into methods.csv, the plots and the page of results."""
    from benchmarks.methods_page import write_page
    from benchmarks.methods_plots import draw

    save("methods", rows)
    draw(case, runs)
    write_page([find_case(name, quick=False) for name in ("nano", "demo")], runs)


if __name__ == "__main__":
    sys.exit(main())
