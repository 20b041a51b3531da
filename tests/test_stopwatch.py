"""Seconds between marks are those of the clock, in pairs, on a device that works as it is called."""

import torch

from e3fast import stopwatch
from e3fast.stopwatch import mark, seconds_between

CPU = torch.device("cpu")


def test_seconds_are_the_clocks(monkeypatch):
    ticks = iter([1.0, 1.5, 4.0, 4.25])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(ticks))
    marks = [mark(CPU) for _ in range(4)]
    assert seconds_between(marks, CPU) == (0.5, 2.5, 0.25)
    assert seconds_between(marks[:1], CPU) == seconds_between([], CPU) == ()


def test_a_gpu_is_asked_for_events_and_waited_for(monkeypatch):
    """Its work goes on after a call returns, so the host's clock would say next to nothing."""
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("record")
            self.at = 250.0 * len(calls)

        def elapsed_time(self, other):  # milliseconds
            assert calls[-1] == "wait"
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    gpu = torch.device("cuda")
    assert seconds_between([mark(gpu), mark(gpu), mark(gpu)], gpu) == (0.25, 0.25)
    assert calls == ["record"] * 3 + ["wait"]
