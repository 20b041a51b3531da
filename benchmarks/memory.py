"""Resident memory of this process, from the kernel's own books (Linux, glibc)."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def resident_mib(field: str) -> float:
    """VmRSS or VmHWM of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def reset_peak() -> None:
    """Forget the peak so far. Freed memory goes back first: what stands before a step is then only what it keeps."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def keep_freed_memory() -> None:
    """glibc hands large blocks back to the system when they are freed, and each new one is paged in again; now not."""
    m_mmap_threshold, m_trim_threshold = -3, -1
    for option in (m_mmap_threshold, m_trim_threshold):
        ctypes.CDLL("libc.so.6").mallopt(option, 2**31 - 1)
