"""Seconds of work on a device: by the clock on a CPU, by events on a GPU, whose work goes on after a call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """A point in a device's time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(marks: Sequence[Any], device: torch.device) -> tuple[float, ...]:
    if device.type != "cuda":
        return tuple(b - a for a, b in pairwise(marks))
    torch.cuda.synchronize(device)
    return tuple(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))
