"""glibc's use of memory, for benchmarks that ask what a time owes to paging. Readings are in e3fast.memory."""

from __future__ import annotations

import ctypes


def keep_freed_memory() -> None:
    """glibc hands large blocks back to the system when they are freed, and each new one is paged in again; now not."""
    m_mmap_threshold, m_trim_threshold = -3, -1
    for option in (m_mmap_threshold, m_trim_threshold):
        ctypes.CDLL("libc.so.6").mallopt(option, 2**31 - 1)
