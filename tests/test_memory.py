"""What memory is read and foretold: a line through trials, the container's room, and a real peak."""

import numpy as np
import pytest
import torch

from e3fast.memory import (
    MemoryPlan,
    OutOfMemory,
    PeakMeter,
    Trial,
    available_bytes,
    container_room,
    fit_line,
    is_out_of_memory,
    resident_bytes,
)

CPU = torch.device("cpu")


def test_a_line_through_trials():
    line = lambda *points: fit_line([Trial(x, 1.0, y) for x, y in points])  # noqa: E731
    assert line((100, 1_500), (200, 2_500), (400, 4_500)) == pytest.approx((500.0, 10.0))
    assert line((100, 1_000)) == (0.0, 10.0)
    assert line((100, 900), (200, 2_000)) == (0.0, 10.0)  # a negative rest would promise too much
    assert line((100, 2_000), (200, 1_000)) == (0.0, 20.0)  # noise: the dearest token counts


def test_a_plan_and_the_largest_cap_it_allows():
    plan = MemoryPlan(1, 2, 3, 4, fixed=500.0, per_token=10.0, available=4_505.0)
    assert plan.need(400) == 4_500.0 and plan.largest_cap == 400
    assert plan.need(plan.largest_cap) <= plan.available < plan.need(plan.largest_cap + 1)
    assert MemoryPlan(1, 2, 3, 4, fixed=500.0, per_token=10.0, available=100.0).largest_cap == 0
    assert "for 400 tokens" in plan.describe(400)


def test_a_container_leaves_what_its_limit_leaves(tmp_path):
    assert container_room(tmp_path) == []
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert container_room(tmp_path) == []
    (tmp_path / "memory.max").write_text("1000\n")
    assert container_room(tmp_path) == [700.0]
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 50\n")  # what the kernel would drop at once
    assert container_room(tmp_path) == [750.0]


def test_the_meter_sees_what_is_taken_and_given_back():
    meter = PeakMeter(CPU)
    meter.start()
    block = np.ones(40 * 2**20, dtype=np.uint8)
    del block
    peak = meter.read()
    if peak is None:
        pytest.skip("memory cannot be read here")
    assert 39 * 2**20 < peak < 60 * 2**20
    meter.start()
    assert (meter.read() or 0) < 20 * 2**20
    free = available_bytes(CPU)
    assert free and resident_bytes() > 2**20


def test_what_counts_as_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError())
    for text in ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling", "MPS backend out of memory"):
        assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(RuntimeError("shapes differ")) and not is_out_of_memory(
        ValueError("DefaultCPUAllocator")
    )
    assert issubclass(OutOfMemory, RuntimeError)
