"""The loss kernels against their peers, in one run: time, memory, and error against fp64.

    python -m benchmarks.kernels [--save] [--keep-memory] [--only PROVIDER ...] [--synthetic TOKENS WIDTH VOCAB]

2,048 hidden states of the demo model at temperature 1 and its head (H = 576, V = 49,152), unless a synthetic shape is
asked for. The ops' tests run first; on a red one nothing is measured. Times: all providers in turn, round after round,
in one process, forward + backward, each behind an untimed call of its own; ratios are made inside a round. A good part
of any large tensor's time on a CPU goes into paging its memory in, since glibc returns freed blocks to the system;
`--keep-memory` tells it not to, for all providers, and measures times alone. Memory: a fresh process a provider, after
one warm-up call: the peak of resident memory over what stands before the call, less the gradients themselves (a weight
gradient added up in fp32 counts as the gradient). Error: relative Frobenius norms against fp64 over 512 tokens; the
old log-probabilities are fp32-exact and within 0.1 of the present ones, so it contains what a route's own rounding
does to the ratio. Exits 1 where the fused loss misses its targets against the naive form. It needs a quiet machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.memory import keep_freed_memory
from benchmarks.registry import PROVIDERS, Case, Problem, Provider, make_problem, naive, with_rewards
from benchmarks.results import Row, save, show
from benchmarks.sparse import real_states
from e3fast.memory import reset_resident_peak, resident_bytes

REPEATS, DROPPED = 5, 40
TARGETS = {"time_over_naive": 0.6, "time_over_naive_40pct_dropped": 0.45, "memory_over_naive": 1 / 8}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A case and, unless it is synthetic, the file of its hidden states: every process of a run sees the same."""

    case: Case
    states: Path | None

    def problem(self, tokens: int | None = None, dropped: int = 0) -> Problem:
        case = dataclasses.replace(self.case, tokens=tokens or self.case.tokens, dropped=dropped)
        if self.states is None:
            return make_problem(case)
        hidden, weight, targets = torch.load(self.states)
        return with_rewards(hidden[: case.tokens], weight, targets[: case.tokens], case)

    def arguments(self) -> list[str]:
        if self.states is not None:
            return ["--states", str(self.states)]
        return ["--synthetic", *map(str, (self.case.tokens, self.case.width, self.case.vocab))]


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


def errors(provider: Provider, inputs: Inputs) -> dict[str, float]:
    """Relative error of the two gradients against fp64 on the same bf16 values."""
    small = inputs.problem(tokens=min(512, inputs.case.tokens))
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


def extra_mib(provider: Provider, inputs: Inputs) -> float:
    """In this, a fresh process."""
    problem = inputs.problem()
    call(provider, problem)
    reset_resident_peak()
    before = resident_bytes()
    found = call(provider, problem)
    gradients = found.hidden.numel() * 2 + found.weight.numel() * (4 if provider.fp32_weight_grad else 2)
    return (resident_bytes("VmHWM") - before - gradients) / 2**20


def in_fresh_process(provider: Provider, inputs: Inputs) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.kernels", "--inside", provider.name, *inputs.arguments()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(providers: list[Provider], inputs: Inputs) -> list[Row]:
    case = inputs.case
    problems = {"": inputs.problem(), f"_{DROPPED}pct_dropped": inputs.problem(dropped=DROPPED)}
    times: dict[tuple[str, str], list[float]] = {}
    for round_ in range(REPEATS + 1):
        for provider in providers:
            call(provider, problems[""])  # each is timed behind itself: what another freed or left in memory shows
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


def memory_and_error(providers: list[Provider], inputs: Inputs) -> list[Row]:
    rows, case = [], inputs.case
    found = {provider.name: in_fresh_process(provider, inputs) for provider in providers}
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
    parser.add_argument("--keep-memory", action="store_true", help="freed memory stays with the process; times alone")
    parser.add_argument("--synthetic", type=int, nargs=3, metavar=("TOKENS", "WIDTH", "VOCAB"))
    parser.add_argument("--states", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    inputs = Inputs(Case(*(args.synthetic or (2048, 576, 49152)), length=64), args.states)
    if args.inside:
        provider = next(provider for provider in PROVIDERS if provider.name == args.inside)
        print(json.dumps({"extra_mib": extra_mib(provider, inputs), **errors(provider, inputs)}))
        return
    if not tests_pass():
        sys.exit("the ops' tests fail: nothing measured")
    chosen = [p for p in PROVIDERS if p.available("cpu") and (not args.only or p.run is naive or p.name in args.only)]
    with tempfile.TemporaryDirectory() as folder:
        if not args.synthetic:
            states, path = real_states(1.0), Path(folder) / "states.pt"
            torch.save((states.hidden, states.weight, states.targets), path)
            inputs = dataclasses.replace(inputs, states=path)
        if args.keep_memory:
            keep_freed_memory()
        rows = measure(chosen, inputs)
        if args.keep_memory:
            rows = [dataclasses.replace(row, case=f"{row.case}-memory-kept") for row in rows]
        else:
            rows += memory_and_error(chosen, inputs)
    show("loss kernels, forward + backward", rows)
    if args.save:
        save("kernels", rows)
    if args.keep_memory:
        return
    for line in missed(rows):
        Console(stderr=True).print(f"missed: {line}")
    sys.exit(bool(missed(rows)))


if __name__ == "__main__":
    main()
