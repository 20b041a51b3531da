"""What a short lease of one GPU should answer, in the order of what decides most; each step writes its rows at once.

    make device                 # on the machine with the GPU; python3 there has torch, triton, pytest, hypothesis, rich
    make device DRY=1           # here: the whole script on tiny shapes through Triton's interpreter

A step that runs into the end of the time is left out, and the summary says so. Times are of CUDA events, after three
warm-ups, each repeat on its own; the three products of the algorithm run between the contestants of a round, and
ratios are made inside the round. TFLOP/s count the algorithm's products (6THV, or 2THV of a forward), never work done
twice. The largest operand, W, is beyond the L2 cache in every case but the smallest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.registry import PROVIDERS, Case, Problem, e3fast, e3fast_logprobs, make_problem
from benchmarks.results import Row, save
from csrc_triton.cublas import CublasBackend, launch_row_dz, launch_row_stats
from csrc_triton.head import Head, HeadGrads, Rows, Upstream
from csrc_triton.launch import Config
from csrc_triton.products import addmm_fp32_, mm_fp32
from csrc_triton.stream import StreamBackend, choose_configs

ROOT = Path(__file__).parents[1]


class OutOfTime(Exception):
    pass


@dataclass
class Lease:
    """One run of the script: where it writes, how long it may take, and how it times."""

    out: Path
    dry: bool
    seconds: float
    start: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16  # the interpreter multiplies the bits of bf16

    def emit(self, *rows: Row) -> None:
        self.rows += rows
        save("kernels", rows, self.out)

    def note(self, text: str) -> None:
        print(text, flush=True)
        self.notes.append(text)
        with (self.out / "notes.txt").open("a") as file:
            file.write(text + "\n")

    def need(self, seconds: float) -> None:
        if time.monotonic() - self.start + seconds > self.seconds:
            raise OutOfTime

    def case(self, tokens: int, width: int, dropped: int = 0, vocab: int = 151936) -> Case:
        if self.dry:
            tokens, width, vocab = max(32, tokens // 1024), width // 64, 300
        return Case(tokens, width, vocab, tokens // 16, dropped, self.device, self.dtype)

    def times(self, work: Callable[[], Any], repeats: int = 10) -> list[float]:
        """Milliseconds of each repeat."""
        repeats, warm = (1, 0) if self.dry else (repeats, 3)
        return [self.once(work) for _ in range(warm + repeats)][warm:]

    def once(self, work: Callable[[], Any]) -> float:
        if self.dry:
            began = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - began)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last)

    def rounds(self, work: dict[str, Callable[[], Any]], repeats: int = 5) -> dict[str, list[float]]:
        """Each contestant once a round, so that all see the same clocks; the first rounds are warm-ups."""
        repeats, warm = (1, 0) if self.dry else (repeats, 2)
        found: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(warm + repeats):
            for name, run in work.items():
                found[name].append(self.once(run))
        return {name: values[warm:] for name, values in found.items()}

    def extra_gib(self, work: Callable[[], Any]) -> float:
        if self.dry:
            work()
            return 0.0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**30


def rate(work: float, ms: list[float], scale: float = 1e9) -> list[float]:
    """TFLOP/s of FLOP, or with 1e6 GB/s of bytes."""
    return [work / x / scale for x in ms]


def ratios(left: list[float], right: list[float], factor: float = 1.0) -> list[float]:
    return [factor * x / y for x, y in zip(left, right, strict=True)]


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
    hot = lease.times(lambda: a @ b)
    lease.emit(Row("machine", "cublas 8192^3", "hot", rate(2 * side**3, hot), "TFLOP/s"))
    held = lease.times(lambda: [a @ b for _ in range(1 if lease.dry else 1500)], repeats=1)
    lease.emit(
        Row("machine", "cublas 8192^3", "sustained", rate(2 * side**3 * (1 if lease.dry else 1500), held), "TFLOP/s")
    )


def correctness(lease: Lease) -> None:
    """Also compiles what the later steps run."""
    tests = "tests/interpreter/test_ops.py" if lease.dry else "tests/gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    lease.note(done.stdout[-3000:])
    lease.emit(Row("machine", "tests", "failed", [float(done.returncode)], "exit code"))
    if done.returncode:
        raise SystemExit("a kernel is wrong here: nothing is timed")


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
        backends: dict[str, Any] = {"cublas": CublasBackend(head, p.hidden, None)}
        for title, config in {"triton, table": table.stats, **variants}.items():
            small = Config(16, 16, 16, 4, 1) if lease.dry else config
            backends[title] = StreamBackend(head, p.hidden, None, table._replace(stats=small))
        work: dict[str, Callable[[], Any]] = {"bare product": lambda p=p: p.hidden @ p.weight.T}
        for title, backend in backends.items():
            run = lambda backend=backend, rows=rows: statistics_alone(backend, rows)  # noqa: E731
            if survives(lease, f"forward {title}", run):
                work[title] = run
        found = lease.rounds(work)
        for title, ms in found.items():
            lease.emit(Row(case.name, title, "forward", rate(2 * case.tokens * case.width * case.vocab, ms), "TFLOP/s"))
            lease.emit(Row(case.name, title, "forward_over_product", ratios(ms, found["bare product"]), "x"))


def statistics_alone(backend: Any, rows: Rows) -> None:
    backend.forward(rows, want_entropy=True, want_sum_sq=False, want_grad=False)


def survives(lease: Lease, title: str, run: Callable[[], Any]) -> bool:
    """A peer or a configuration that does not run is a line in the notes, not the end."""
    try:
        run()
        if not lease.dry:
            torch.cuda.synchronize()
    except Exception as error:
        lease.note(f"{title} does not run: {type(error).__name__}: {str(error)[:300]}")
        return False
    return True


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
            work: dict[str, Callable[[], Any]] = {"three products": three_products(p)}
            for backend in ("cublas", "triton"):
                run = lambda p=p, backend=backend: call(lambda q: e3fast(q, backend=backend), p)  # noqa: E731
                if survives(lease, f"fused loss on {backend}, {label}", run):
                    work[f"e3fast {backend}"] = run
            found = lease.rounds(work)
            share = 1 - 2 / 3 * dropped / 100  # of 6THV that the algorithm needs
            for title, ms in found.items():
                flop = 6 * case.tokens * case.width * case.vocab * (share if title.startswith("e3fast") else 1)
                lease.emit(Row(label, title, "ms", ms, "ms"), Row(label, title, "rate", rate(flop, ms), "TFLOP/s"))
                percent = ratios(found["three products"], ms, 100)
                lease.emit(Row(label, title, "pct_of_three_products", percent, "%"))


def peers(lease: Lease) -> None:
    for width in (1024, 4096):
        case = lease.case(8192, width)
        p = make_problem(case)
        work: dict[str, Callable[[], Any]] = {}
        ours = [(f"e3fast {b}", lambda q, b=b: e3fast(q, backend=b)) for b in ("cublas", "triton")]
        ours += [(f"e3fast logprobs {b}", lambda q, b=b: e3fast_logprobs(q, backend=b)) for b in ("cublas", "triton")]
        theirs = [(x.name, x.run) for x in PROVIDERS if x.available(lease.device) and not x.name.startswith("e3fast")]
        for title, provider in [*ours, *theirs]:
            lease.need(12)
            run = lambda p=p, provider=provider: call(provider, p)  # noqa: E731
            if survives(lease, f"{title}, {case.name}", run):
                work[title] = run
                lease.emit(Row(case.name, title, "extra_gib", [lease.extra_gib(run)], "GiB"))
        lease.need(15)
        found = lease.rounds(work, repeats=3)
        for title, ms in found.items():
            lease.emit(Row(case.name, title, "ms", ms, "ms"))
            lease.emit(Row(case.name, title, "time_over_e3fast_triton", ratios(ms, found["e3fast triton"]), "x"))


def memory(lease: Lease) -> None:
    """Peak beyond inputs and gradients in the parameters' type, at the largest case."""
    case = lease.case(65536, 4096)
    lease.need(15)
    p = make_problem(case)
    gradients = (p.hidden.numel() + p.weight.numel()) * lease.dtype.itemsize / 2**30
    for backend in ("cublas", "triton"):
        run = lambda backend=backend: call(lambda q: e3fast(q, backend=backend), p)  # noqa: E731
        if survives(lease, f"T = 65536 on {backend}", run):
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
            if not survives(lease, f"trace of {backend}", run):
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
        backend = backend_type(head, p.hidden, None)
        grads = HeadGrads(None, None, True)

        def run(backend: Any = backend, grads: HeadGrads = grads) -> None:
            backend.forward(rows, want_entropy=False, want_sum_sq=False, want_grad=True)
            backend.backward(None, Upstream(p.advantages, None, None), grads)

        if survives(lease, f"frozen head on {backend_type.__name__}", run):
            ms = lease.times(run)
            flop = 4 * case.tokens * case.width * case.vocab
            lease.emit(Row(case.name, backend_type.__name__, "frozen_head", rate(flop, ms), "TFLOP/s"))


STEPS: tuple[Callable[[Lease], None], ...] = (
    machine, correctness, micro, forward, fused, peers, memory, trace, frozen_head,
)  # fmt: skip


def summary(lease: Lease) -> None:
    """A page for profiles/."""
    import statistics

    lines = ["# Kernels on a GPU", "", *(f"    {line}" for note in lease.notes for line in note.splitlines()), ""]
    lines += ["| case | provider | metric | median | min | max | unit |", "|---|---|---|---|---|---|---|"]
    for row in lease.rows:
        figures = (f"{x:.4g}" for x in (statistics.median(row.values), min(row.values), max(row.values)))
        lines.append(f"| {row.case} | {row.provider} | {row.metric} | {' | '.join(figures)} | {row.unit} |")
    (lease.out / "summary.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder; kernels.csv, notes.txt, summary.md, traces")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU, kernels interpreted")
    parser.add_argument("--minutes", type=float, default=8.5)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lease = Lease(args.out, args.dry, 60 * args.minutes)
    failed = False
    for step in STEPS:
        began = time.monotonic()
        try:
            step(lease)
        except OutOfTime:
            lease.note(f"{step.__name__}: no time left")
        except Exception:
            failed = True
            lease.note(f"{step.__name__} failed:\n{traceback.format_exc()[-1500:]}")
        lease.note(f"{step.__name__}: {time.monotonic() - began:.0f} s")
        summary(lease)
        if not lease.dry:
            torch.cuda.empty_cache()
    sys.exit(failed)


if __name__ == "__main__":
    main()
