"""The loss kernels against their peers, in one run: time, memory, and error against fp64.

    python -m benchmarks.kernels [--save] [--only PROVIDER ...] [--tokens 2048 --width 576 --vocab 49152]

The ops' tests run first; on a red one nothing is measured. Times: all providers in turn, round after round, in one
process, forward + backward, after a warm-up; ratios are made inside a round. Memory: a fresh process a provider, after
one warm-up call: the peak of resident memory over what stands before the call, less the gradients themselves (a weight
gradient added up in fp32 counts as the gradient). Error: relative Frobenius norms against fp64 at T = 512. Exits 1
where the fused loss misses its targets against the naive form. It needs a quiet machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time

import torch
from rich.console import Console

from benchmarks.memory import reset_peak, resident_mib
from benchmarks.registry import PROVIDERS, Case, Problem, Provider, make_problem, naive
from benchmarks.results import Row, save, show

REPEATS, DROPPED = 7, 40
TARGETS = {"time_over_naive": 0.6, "time_over_naive_40pct_dropped": 0.45, "memory_over_naive": 1 / 8}


def call(provider: Provider, problem: Problem) -> Problem:
    """Forward and backward on new leaves, whose gradients it leaves on them."""
    leaves = [x.detach().requires_grad_() for x in (problem.hidden, problem.weight)]
    fresh = problem._replace(hidden=leaves[0], weight=leaves[1])
    provider.run(fresh).backward()
    return fresh


def seconds(provider: Provider, problem: Problem) -> float:
    start = time.perf_counter()
    call(provider, problem)
    return time.perf_counter() - start


def errors(provider: Provider, case: Case) -> dict[str, float]:
    """Relative error of the two gradients against fp64 on the same bf16 values."""
    small = make_problem(dataclasses.replace(case, tokens=min(512, case.tokens)))
    wide = small._replace(hidden=small.hidden.double().requires_grad_(), weight=small.weight.double().requires_grad_())
    logits = wide.hidden @ wide.weight.T
    logprobs = torch.log_softmax(logits, -1).gather(1, wide.targets[:, None])[:, 0]
    ratio = (logprobs - small.old_logprobs).exp()
    a = small.advantages
    (-torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a) * small.weights).sum().backward()
    found = call(provider, small)
    off = lambda got, want: float((got.double() - want).norm() / want.norm())  # noqa: E731
    return {
        "dx_error": off(found.hidden.grad, wide.hidden.grad),
        "dw_error": off(found.weight.grad, wide.weight.grad),
    }


def extra_mib(provider: Provider, case: Case) -> float:
    """In this, a fresh process."""
    problem = make_problem(case)
    call(provider, problem)
    reset_peak()
    before = resident_mib("VmRSS")
    found = call(provider, problem)
    gradients = found.hidden.numel() * 2 + found.weight.numel() * (4 if provider.fp32_weight_grad else 2)
    return resident_mib("VmHWM") - before - gradients / 2**20


def in_fresh_process(provider: Provider, case: Case) -> dict[str, float]:
    shape = ["--tokens", str(case.tokens), "--width", str(case.width), "--vocab", str(case.vocab)]
    command = [sys.executable, "-m", "benchmarks.kernels", "--inside", provider.name, *shape]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(providers: list[Provider], case: Case) -> list[Row]:
    dropped = dataclasses.replace(case, dropped=DROPPED)
    problems = {"": make_problem(case), f"_{DROPPED}pct_dropped": make_problem(dropped)}
    times: dict[tuple[str, str], list[float]] = {}
    for round_ in range(REPEATS + 1):
        for provider in providers:
            for suffix, problem in problems.items():
                took = seconds(provider, problem)
                if round_:  # the first is a warm-up
                    times.setdefault((provider.name, suffix), []).append(took)
    rows = []
    for provider in providers:
        for suffix in problems:
            mine, base = times[provider.name, suffix], times["naive", suffix]
            rows.append(Row(case.name, provider.name, f"ms{suffix}", [1e3 * x for x in mine], "ms"))
            ratios = [x / y for x, y in zip(mine, base, strict=True)]
            rows.append(Row(case.name, provider.name, f"time_over_naive{suffix}", ratios, "x"))
    return rows + three_products(problems[""], case)


def three_products(problem: Problem, case: Case) -> list[Row]:
    """What the products alone cost in bf16, without a single pass over the logits."""
    x, w = problem.hidden, problem.weight
    p = torch.rand(case.tokens, case.vocab).to(case.dtype)
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        _ = x @ w.T, p @ w, p.T @ x
        found.append(1e3 * (time.perf_counter() - start))
    return [Row(case.name, "three bare products", "ms", found, "ms")]


def memory_and_error(providers: list[Provider], case: Case) -> list[Row]:
    rows = []
    found = {provider.name: in_fresh_process(provider, case) for provider in providers}
    for name, figures in found.items():
        rows.append(Row(case.name, name, "extra_mib", [figures["extra_mib"]], "MiB"))
        ratio = figures["extra_mib"] / found["naive"]["extra_mib"]
        rows.append(Row(case.name, name, "memory_over_naive", [ratio], "x"))
        rows += [Row(case.name, name, key, [figures[key]], "rel") for key in ("dx_error", "dw_error")]
    return rows


def missed(rows: list[Row]) -> list[str]:
    found = {row.metric: statistics.median(row.values) for row in rows if row.provider == "e3fast"}
    return [
        f"{name} is {found[name]:.3g}, target at most {most:.3g}"
        for name, most in TARGETS.items()
        if found[name] > most
    ]


def tests_pass() -> bool:
    return (
        subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/csrc_triton"], stdout=sys.stderr).returncode == 0
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/kernels.csv")
    parser.add_argument("--only", nargs="*", default=[], help="providers beside naive")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    case = Case(args.tokens, args.width, args.vocab, length=64)
    if args.inside:
        provider = next(provider for provider in PROVIDERS if provider.name == args.inside)
        print(json.dumps({"extra_mib": extra_mib(provider, case), **errors(provider, case)}))
        return
    if not tests_pass():
        sys.exit("the ops' tests fail: nothing measured")
    chosen = [p for p in PROVIDERS if p.available("cpu") and (not args.only or p.run is naive or p.name in args.only)]
    rows = measure(chosen, case) + memory_and_error(chosen, case)
    show("loss kernels, forward + backward", rows)
    if args.save:
        save("kernels", rows)
    for line in missed(rows):
        Console(stderr=True).print(f"missed: {line}")
    sys.exit(bool(missed(rows)))


if __name__ == "__main__":
    main()
