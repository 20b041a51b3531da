"""A short lease of one GPU: how a step times and writes, and the supervisor that kills a step which hangs.

A kernel that hangs takes its process with it. So the steps run in a child process, which says when each begins and
ends; the supervisor kills a child whose step exceeds its limit, and starts another from the step that follows. Rows
and notes are in the files as soon as they are known; the summary is made from the files.
"""

from __future__ import annotations

import contextlib
import csv
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from benchmarks.registry import Case
from benchmarks.results import Row, save

ROOT = Path(__file__).parents[1]
BEGIN, END = "@begin ", "@end "  # lines of the child's output
STARTUP = 120  # seconds until a child's first step begins
SLOW = 3  # times as long limits for the interpreter, on a machine that has other work


class OutOfTime(Exception):
    pass


@dataclass
class Lease:
    """One process's part of a run: where it writes, how long it may take, and how it times."""

    out: Path
    dry: bool
    seconds: float
    start: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16  # the interpreter multiplies the bits of bf16

    def emit(self, *rows: Row) -> None:
        save("kernels", rows, self.out)

    def note(self, text: str) -> None:
        print(text, flush=True)
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

    def survives(self, title: str, run: Callable[[], Any]) -> bool:
        """What does not run is a line in the notes; what breaks the CUDA context ends its step."""
        try:
            run()
            if not self.dry:
                torch.cuda.synchronize()
        except Exception as error:
            self.note(f"{title} does not run: {type(error).__name__}: {str(error)[:300]}")
        else:
            return True
        if not self.dry:
            torch.cuda.synchronize()  # raises where every later launch would fail too
            torch.cuda.empty_cache()
        return False


class Step(NamedTuple):
    run: Callable[[Lease], None]
    limit: float  # seconds
    must_pass: bool = False  # else nothing that follows may run

    @property
    def name(self) -> str:
        return self.run.__name__


def run_steps(steps: Sequence[Step], lease: Lease) -> int:
    """The child: the steps in order, up to the first that fails, for it may have broken the CUDA context."""
    for step in steps:
        print(BEGIN + step.name, flush=True)
        began = time.monotonic()
        failed = False
        try:
            step.run(lease)
        except OutOfTime:
            lease.note(f"{step.name}: no time left")
        except Exception:
            failed = True
            lease.note(f"{step.name} failed:\n{traceback.format_exc()[-1500:]}")
        lease.note(f"{step.name}: {time.monotonic() - began:.0f} s")
        if failed:
            return 1
        print(END + step.name, flush=True)
        if not lease.dry:
            torch.cuda.empty_cache()
    return 0


def supervise(steps: Sequence[Step], out: Path, dry: bool, seconds: float) -> bool:
    """Run all steps in child processes, within `seconds`; True if every one passed. summary.md is always written."""
    lease = Lease(out, dry, seconds)
    for name in ("kernels.csv", "notes.txt"):  # of an earlier run
        if (out / name).exists():
            (out / name).replace(out / f"previous-{name}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the child ends and the summary is written
    names, at, passed = [step.name for step in steps], 0, True
    while at < len(steps):
        left = seconds - (time.monotonic() - lease.start)
        if left <= 0:
            lease.note(f"no time left for {', '.join(names[at:])}")
            break
        try:
            done, stuck = watch(steps[at:], lease, left)
        finally:
            summary(out)
        at += done
        if at == len(steps):
            break
        passed = False
        lease.note(f"{names[at]} {stuck or 'ended its process'}")
        if steps[at].must_pass:
            lease.note("a kernel is wrong or hangs here: nothing is timed")
            break
        at += 1
    summary(out)
    return passed


def watch(steps: Sequence[Step], lease: Lease, left: float) -> tuple[int, str]:
    """Start a child on the steps: how many it has ended, and why it was killed, if it was."""
    warnings = [f"-W{option}" for option in sys.warnoptions]
    command = [sys.executable, "-u", *warnings, "-m", "benchmarks.device", "--child", "--from", steps[0].name]
    command += ["--out", str(lease.out), "--minutes", str(left / 60), *(["--dry"] if lease.dry else [])]
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert child.stdout is not None
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=read, args=(child.stdout, lines), daemon=True).start()
    slow = SLOW if lease.dry else 1
    end = time.monotonic() + left
    limits = {step.name: slow * step.limit for step in steps}
    done, limit, since = 0, slow * STARTUP, time.monotonic()
    try:
        while True:
            ended = child.poll() is not None  # before the queue is looked at: what it still wrote is then read
            try:
                line = lines.get(timeout=0.5)
            except queue.Empty:
                if ended:
                    return done, ""
                line = ""
            if line.startswith(BEGIN):
                limit, since = limits[line.removeprefix(BEGIN).strip()], time.monotonic()
            elif line.startswith(END):
                done += 1
                limit, since = slow * STARTUP, time.monotonic()
            elif line:
                print(line, end="", flush=True)
            if time.monotonic() - since > limit:
                return done, f"took more than {limit:.0f} s and was killed"
            if time.monotonic() > end:
                return done, "was killed, for the whole time is over"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and what it started
        try:
            child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            lease.note("a killed process is still there")


def read(stream: TextIO, lines: queue.Queue[str]) -> None:
    for line in stream:
        lines.put(line)


def summary(out: Path) -> None:
    """A page for profiles/, from the files."""
    notes, rows = out / "notes.txt", out / "kernels.csv"
    lines = ["# Kernels on a GPU", ""]
    lines += [f"    {line}" for line in notes.read_text().splitlines()] if notes.exists() else []
    fields = ("case", "provider", "metric", "median", "min", "max", "unit")
    lines += ["", f"| {' | '.join(fields)} |", "|" + "---|" * len(fields)]
    if rows.exists():
        with rows.open(newline="") as file:
            for row in csv.DictReader(file):
                figures = {name: f"{float(row[name]):.4g}" for name in ("median", "min", "max")}
                lines.append(f"| {' | '.join((row | figures)[name] for name in fields)} |")
    (out / "summary.md").write_text("\n".join(lines) + "\n")


def rate(work: float, ms: list[float], scale: float = 1e9) -> list[float]:
    """TFLOP/s of FLOP, or with 1e6 GB/s of bytes."""
    return [work / x / scale for x in ms]


def ratios(left: list[float], right: list[float], factor: float = 1.0) -> list[float]:
    return [factor * x / y for x, y in zip(left, right, strict=True)]
