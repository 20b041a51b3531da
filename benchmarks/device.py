"""What a short lease of one GPU should answer, in the order of what decides most; each step writes its rows at once.

    make device                 # on the machine with the GPU; python3 there has torch, triton, pytest, hypothesis, rich
    make device DRY=1           # here: the whole script on tiny shapes through Triton's interpreter

A step that runs into the end of the time is left out, one that hangs is killed (benchmarks/lease.py), and the summary
says so. Times are of CUDA events, after warm-ups, each repeat on its own; what a contestant is compared with runs
between its repeats, and ratios are made inside a round. TFLOP/s count the algorithm's products (6THV, or 2THV of a
forward), never work done twice. The largest operand, W, is beyond the L2 cache in every case but the smallest.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.lease import ROOT, Lease, Step, rate, ratios, run_steps, supervise
from benchmarks.registry import PROVIDERS, Problem, e3fast, e3fast_logprobs, make_problem
from benchmarks.results import Row
from csrc_triton.cublas import CublasBackend, launch_row_dz, launch_row_stats
from csrc_triton.head import Head, HeadGrads, Rows, Upstream
from csrc_triton.launch import Config
from csrc_triton.products import addmm_fp32_, mm_fp32
from csrc_triton.stream import StreamBackend, choose_configs

BUDGET = 24 << 30  # bytes for a backend: its chunk is then all 8192 rows
TESTS_SECONDS = 170


def machine(lease: Lease) -> None:
    lease.note(f"torch {torch.__version__}, triton {triton.__version__}, python {sys.version.split()[0]}")
    if not lease.dry:
        query = "name,driver_version,clocks.sm,clocks.mem,power.draw,power.limit"
        found = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True)
        lease.note(f"{query}: {found.stdout.decode().strip()}")
    side = 64 if lease.dry else 8192
    a, b = (torch.randn(side, side, device=lease.device).to(lease.dtype) for _ in range(2))
    source = torch.empty(side * side * (1 if lease.dry else 16), device=lease.device)
    target = torch.empty_like(source)
    copied = lease.times(lambda: target.copy_(source))
    lease.emit(Row("machine", "copy", "bandwidth", rate(8 * source.numel(), copied, 1e6), "GB/s"))
    c, count = torch.empty_like(a), 1 if lease.dry else 1500

    def product() -> Tensor:
        return torch.mm(a, b, out=c)

    def many() -> None:
        for _ in range(count):
            product()

    lease.emit(Row("machine", "cublas 8192^3", "hot", rate(2 * side**3, lease.times(product)), "TFLOP/s"))
    held = [lease.once(many)]  # of hundreds of products, with no warm-up but those before
    lease.emit(Row("machine", "cublas 8192^3", "sustained", rate(2 * side**3 * count, held), "TFLOP/s"))


def correctness(lease: Lease) -> None:
    """Also compiles what the later steps run. Where it is red or takes too long nothing is timed."""
    tests = "tests/interpreter/test_ops.py" if lease.dry else "tests/gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    log = lease.out / "tests.txt"
    code: int | str = "over its time"
    try:
        with log.open("w") as file:
            done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=TESTS_SECONDS)
        code = done.returncode
        lease.emit(Row("machine", "tests", "failed", [float(code)], "exit code"))
    except subprocess.TimeoutExpired:
        pass
    lease.note(log.read_text()[-3000:])
    if code != 0:
        raise RuntimeError(f"pytest {tests}: {code}")


def micro(lease: Lease) -> None:
    """The products and row passes that decide between the two backends."""
    case = lease.case(8192, 4096)
    p = make_problem(case)
    name, flop, logits = case.name, 2 * case.tokens * case.width * case.vocab, case.tokens * case.vocab
    z = torch.empty(case.tokens, case.vocab, device=lease.device)
    dz = torch.randn(case.tokens, case.vocab, device=lease.device).to(lease.dtype)
    dw = torch.zeros(case.vocab, case.width, device=lease.device)
    products = {
        "x W' to bf16": lambda: p.hidden @ p.weight.T,
        "x W' to fp32": lambda: mm_fp32(p.hidden, p.weight.T, out=z),
        "dz W": lambda: dz @ p.weight,
        "dz' x to bf16": lambda: dz.T @ p.hidden,
        "dW += dz' x in fp32": lambda: addmm_fp32_(dw, dz.T, p.hidden),
    }
    for title, ms in lease.rounds(products).items():
        lease.emit(Row(name, title, "products", rate(flop, ms), "TFLOP/s"))
    head, rows = Head(p.weight, None, 1.0, None), whole(p)
    stats = launch_row_stats(z, head, rows, want_entropy=True, want_sum_sq=False)
    up = Upstream(p.advantages, None, None)
    size = lease.dtype.itemsize
    passes = {
        "row_stats": (4, lambda: launch_row_stats(z, head, rows, want_entropy=True, want_sum_sq=False)),
        "row_dz": (4 + size, lambda: launch_row_dz(z, head, rows, stats, None, up, dz)),
    }
    for title, (width, run) in passes.items():
        lease.emit(Row(name, title, "passes", rate(width * logits, lease.times(run), 1e6), "GB/s"))


def whole(p: Problem) -> Rows:
    return Rows(p.hidden, torch.ones_like(p.advantages), p.targets)


def forward(lease: Lease) -> None:
    """The streaming kernel under several configurations against cuBLAS and row kernels, forward alone."""
    variants = {
        "triton, specialised warps": Config(128, 256, 64, 4, 3, warp_specialize=True),
        "triton, 8 warps": Config(128, 256, 64, 8, 3),
        "triton, 8 warps, flattened": Config(128, 256, 64, 8, 3, flatten=True),
        "triton, 128x128": Config(128, 128, 64, 8, 4),
    }
    for width in (1024, 4096):
        lease.need(20)
        case = lease.case(8192, width)
        p = make_problem(case)
        head, rows = Head(p.weight, None, 1.0, None), whole(p)
        table = choose_configs(head, p.hidden.device)
        backends: dict[str, Any] = {"cublas": CublasBackend(head, p.hidden, BUDGET)}
        for title, config in {"triton, table": table.stats, **variants}.items():
            small = Config(16, 16, 16, 4, 1) if lease.dry else config
            backends[title] = StreamBackend(head, p.hidden, BUDGET, table._replace(stats=small))
        flop = 2 * case.tokens * case.width * case.vocab
        product = lambda p=p: p.hidden @ p.weight.T  # noqa: E731
        lease.emit(Row(case.name, "bare product", "forward", rate(flop, lease.times(product)), "TFLOP/s"))
        for title, backend in backends.items():
            run = lambda backend=backend, rows=rows: statistics_alone(backend, rows)  # noqa: E731
            if not lease.survives(f"forward {title}, {case.name}", run):
                continue
            found = lease.rounds({"bare product": product, title: run})
            over = ratios(found[title], found["bare product"])
            lease.emit(Row(case.name, title, "forward", rate(flop, found[title]), "TFLOP/s"))
            lease.emit(Row(case.name, title, "forward_over_product", over, "x"))


def statistics_alone(backend: Any, rows: Rows) -> None:
    whole_chunk(backend, rows)
    backend.forward(rows, want_entropy=True, want_sum_sq=False, want_grad=False)


def whole_chunk(backend: Any, rows: Rows) -> None:
    if rows.targets.shape[0] > backend.num_rows:
        raise ValueError(f"{rows.targets.shape[0]} rows for a chunk of {backend.num_rows}")


def call(run: Callable[[Problem], Tensor], p: Problem) -> None:
    leaves = [x.detach().requires_grad_() for x in (p.hidden, p.weight)]
    run(p._replace(hidden=leaves[0], weight=leaves[1])).backward()


def three_products(p: Problem) -> Callable[[], None]:
    """The products of the algorithm by cuBLAS on bf16, in row chunks as the ops take them."""
    rows = min(8192, p.hidden.shape[0])
    dz = torch.randn(rows, p.weight.shape[0], device=p.hidden.device).to(p.hidden.dtype)
    z, dx, dw = torch.empty_like(dz), torch.empty_like(p.hidden[:rows]), torch.empty_like(p.weight)

    def run() -> None:
        for x in p.hidden.split(rows):
            part = dz[: x.shape[0]]
            torch.mm(x, p.weight.T, out=z[: x.shape[0]])
            torch.mm(part, p.weight, out=dx[: x.shape[0]])
            torch.mm(part.T, x, out=dw)

    return run


def fused(lease: Lease) -> None:
    """The one-pass loss on both backends against its three products."""
    for tokens, width in ((8192, 1024), (8192, 4096), (32768, 1024), (32768, 4096)):
        for dropped in (0, 40):
            lease.need(15)
            case = lease.case(tokens, width, dropped)
            p = make_problem(case)
            label = f"{case.name}{f'-{dropped}pct-dropped' if dropped else ''}"
            products = three_products(p)
            flop = 6 * case.tokens * case.width * case.vocab
            share = 1 - 2 / 3 * dropped / 100  # of 6THV that the algorithm needs
            for backend in ("cublas", "triton"):
                title = f"e3fast {backend}"
                run = lambda p=p, backend=backend: call(lambda q: e3fast(q, backend=backend), p)  # noqa: E731
                if not lease.survives(f"fused loss on {backend}, {label}", run):
                    continue
                found = lease.rounds({"three products": products, title: run})
                ms, bare = found[title], found["three products"]
                lease.emit(Row(label, f"three products beside {backend}", "rate", rate(flop, bare), "TFLOP/s"))
                lease.emit(Row(label, title, "ms", ms, "ms"))
                lease.emit(Row(label, title, "rate", rate(share * flop, ms), "TFLOP/s"))
                lease.emit(Row(label, title, "pct_of_three_products", ratios(bare, ms, 100), "%"))


def peers(lease: Lease) -> None:
    """Each contestant alone against the fused loss on the streaming backend, where that runs."""
    ours = [(f"e3fast {b}", lambda q, b=b: e3fast(q, backend=b)) for b in ("triton", "cublas")]
    ours += [(f"e3fast logprobs {b}", lambda q, b=b: e3fast_logprobs(q, backend=b)) for b in ("triton", "cublas")]
    theirs = [(x.name, x.run) for x in PROVIDERS if x.available(lease.device) and not x.name.startswith("e3fast")]
    for width in (1024, 4096):
        lease.need(12)
        case = lease.case(8192, width)
        p = make_problem(case)
        reference: dict[str, Callable[[], Any]] = {}
        for title, provider in [*ours, *theirs]:
            lease.need(12)
            run = lambda p=p, provider=provider: call(provider, p)  # noqa: E731
            if not lease.survives(f"{title}, {case.name}", run):
                continue
            lease.emit(Row(case.name, title, "extra_gib", [lease.extra_gib(run)], "GiB"))
            found = lease.rounds({**reference, title: run}, repeats=3)
            lease.emit(Row(case.name, title, "ms", found[title], "ms"))
            for ms in (found[name] for name in reference):
                lease.emit(Row(case.name, title, "time_over_e3fast_triton", ratios(found[title], ms), "x"))
            if title == "e3fast triton":
                reference[title] = run


def memory(lease: Lease) -> None:
    """Peak beyond inputs and gradients in the parameters' type, at the largest case."""
    case = lease.case(65536, 4096)
    lease.need(15)
    p = make_problem(case)
    gradients = (p.hidden.numel() + p.weight.numel()) * lease.dtype.itemsize / 2**30
    for backend in ("cublas", "triton"):
        run = lambda backend=backend: call(lambda q: e3fast(q, backend=backend), p)  # noqa: E731
        if lease.survives(f"T = 65536 on {backend}", run):
            lease.emit(Row(case.name, f"e3fast {backend}", "extra_gib", [lease.extra_gib(run) - gradients], "GiB"))
            lease.emit(Row(case.name, f"e3fast {backend}", "ms", lease.times(run, repeats=3), "ms"))


def trace(lease: Lease) -> None:
    """Where the time of one fused call goes, kernel by kernel."""
    activity = torch.profiler.ProfilerActivity.CPU if lease.dry else torch.profiler.ProfilerActivity.CUDA
    order = "self_cpu_time_total" if lease.dry else "self_cuda_time_total"
    for width in (1024, 4096):
        lease.need(10)
        p = make_problem(lease.case(8192, width))
        for backend in ("cublas", "triton"):
            run = lambda p=p, backend=backend: call(lambda q: e3fast(q, backend=backend), p)  # noqa: E731
            if not lease.survives(f"trace of {backend}", run):
                continue
            with torch.profiler.profile(activities=[activity]) as profile:
                run()
            table = profile.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=60)
            (lease.out / f"trace-{backend}-H{width}.txt").write_text(table)


def frozen_head(lease: Lease) -> None:
    """A chunk whose W takes no gradient: two products, 4THV."""
    lease.need(15)
    case = lease.case(8192, 4096)
    p = make_problem(case)
    head, rows = Head(p.weight, None, 1.0, None), whole(p)
    for backend_type in (CublasBackend, StreamBackend):
        backend = backend_type(head, p.hidden, BUDGET)
        grads = HeadGrads(None, None, True)

        def run(backend: Any = backend, grads: HeadGrads = grads) -> None:
            whole_chunk(backend, rows)
            backend.forward(rows, want_entropy=False, want_sum_sq=False, want_grad=True)
            backend.backward(None, Upstream(p.advantages, None, None), grads)

        if lease.survives(f"frozen head on {backend_type.__name__}", run):
            ms = lease.times(run)
            flop = 4 * case.tokens * case.width * case.vocab
            lease.emit(Row(case.name, backend_type.__name__, "frozen_head", rate(flop, ms), "TFLOP/s"))


STEPS = (
    Step(machine, 45),
    Step(correctness, TESTS_SECONDS + 15, must_pass=True),
    Step(micro, 45),
    Step(forward, 90),
    Step(fused, 120),
    Step(peers, 150),
    Step(memory, 60),
    Step(trace, 60),
    Step(frozen_head, 45),
)


def main() -> None:
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder; kernels.csv, notes.txt, summary.md, traces")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU, kernels interpreted")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--from", dest="first", choices=names, default=names[0], help="the step to begin with")
    parser.add_argument("--child", action="store_true", help="run the steps in this process, as the supervisor asks")
    args = parser.parse_args()
    out, steps = args.out.resolve(), STEPS[names.index(args.first) :]
    out.mkdir(parents=True, exist_ok=True)
    if args.child:
        sys.exit(run_steps(steps, Lease(out, args.dry, 60 * args.minutes)))
    sys.exit(not supervise(steps, out, args.dry, 60 * args.minutes))


if __name__ == "__main__":
    main()
