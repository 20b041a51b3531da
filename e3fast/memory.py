"""Memory: what is free, what a piece of work takes at its peak, and the plan that a run's token cap is checked by.

On a CPU resident memory counts, as the kernel reports it (Linux); on a GPU the caching allocator's statistics do.
Elsewhere there is nothing to read, and nothing is claimed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

RESERVE = 0.05  # share of the free memory that a plan leaves alone
GIB = 2**30
NO_ROOM = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")  # host; CUDA, MPS; cuBLAS, cuDNN
CGROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


class OutOfMemory(RuntimeError):
    """A micro-batch did not fit; the step's partial gradients are dropped."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch failed for want of memory, on a GPU or on the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_ROOM)


class Trial(NamedTuple):
    """What one micro-batch took."""

    tokens: int
    seconds: float
    peak_bytes: int | None  # above what stood before it; None where nothing can be read


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank: what always stands, and what grows with the tokens of a micro-batch."""

    weights: int
    masters: int
    gradients: int
    optimizer: int
    fixed: float  # beside them, whatever the tokens: a chunk of logits, buffers
    per_token: float
    available: float  # free while weights to optimizer stand, reserve taken off

    def need(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens

    @property
    def largest_cap(self) -> int:
        """Tokens of a micro-batch that fit; 0 where none do."""
        return max(0, int((self.available - self.fixed) // self.per_token))

    def describe(self, cap: int) -> str:
        standing = sum((self.weights, self.masters, self.gradients, self.optimizer))
        return (
            f"memory: {standing / GIB:.1f} GiB for weights, gradients and optimizer, {self.need(cap) / GIB:.1f} GiB "
            f"for {cap} tokens ({self.per_token / 2**20:.2f} MiB a token); {self.available / GIB:.1f} GiB are free"
        )


def fit_line(trials: Sequence[Trial]) -> tuple[float, float]:
    """(fixed, per token) by least squares, neither below 0; of one trial, all of it per token."""
    points = [(trial.tokens, float(trial.peak_bytes or 0)) for trial in trials]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    fixed = mean_y - slope * mean_x
    return (fixed, slope) if fixed >= 0 < slope else (0.0, max(y / x for x, y in points))


def available_bytes(device: torch.device) -> float | None:
    """Free memory on a device that this process could take; on a CPU the smaller of the machine's and the container's.

    None where there is nothing to read.
    """
    if device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    if sys.platform != "linux":
        return None
    trim_heap()
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = [1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    return min([*free, *container_room()], default=None)


def container_room(root: Path = Path("/sys/fs/cgroup")) -> list[float]:
    """What a memory limit of the control group leaves; empty where there is none."""
    for limit_name, used_name in CGROUP_FILES:
        try:
            limit, used = int((root / limit_name).read_text()), int((root / used_name).read_text())
            return [float(limit - used + file_cache(root / Path(limit_name).parent / "memory.stat"))]
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return []


def file_cache(path: Path) -> int:
    """Bytes of a control group's file cache that the kernel would give back first: they count as used, but are not."""
    try:
        stat = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def resident_bytes(field: str = "VmRSS") -> int:
    """VmRSS (now) or VmHWM (peak since the last reset) of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def reset_resident_peak() -> None:
    """Forget the peak so far. Freed memory goes back first: what stands before a step is then only what it keeps."""
    trim_heap()
    Path("/proc/self/clear_refs").write_text("5")


def trim_heap() -> None:
    """Give back to the system what was freed; musl has no such call, and no such hoard."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class PeakMeter:
    """Peak memory between `start` and `read`, above what stood at the start."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.readable = device.type == "cuda" or sys.platform == "linux"
        self.before = 0

    def start(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        elif self.readable:
            try:
                reset_resident_peak()
                self.before = resident_bytes()
            except OSError:  # a sandbox that hides /proc
                self.readable = False

    def read(self) -> int | None:
        if not self.readable:
            return None
        if self.device.type == "cuda":
            import torch

            return torch.cuda.max_memory_allocated(self.device) - self.before
        return resident_bytes("VmHWM") - self.before
