"""The streaming backend's launches as Triton's own launcher takes them, compiled for Hopper without a GPU.

The interpreter drops arguments it does not know and looks at no type; the launcher does neither.
"""

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from csrc_triton import stream
from csrc_triton.head import Head, HeadGrads, Rows, Upstream
from csrc_triton.launch import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="the interpreter compiles nothing")


class Hopper:
    """As much of a driver as a launch asks for before it runs."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiled(monkeypatch):
    """Kernels that would have run, by name."""
    from csrc_triton import stream_kernels

    found = {}

    def warm_up(kernel, grid, device, **arguments):
        function = getattr(stream_kernels, kernel)
        assert set(arguments) - {"num_warps", "num_stages"} == set(function.arg_names)
        found.setdefault(kernel, []).append(function.warmup(grid=(grid,), enable_fp_fusion=True, **arguments))

    monkeypatch.setattr(stream, "run", warm_up)
    monkeypatch.setattr(driver, "_active", Hopper())
    return found


def test_launches_compile_and_chunks_of_other_sizes_compile_nothing_new(compiled):
    head = Head(torch.randn(1000, 64).bfloat16(), None, 1.0, None)
    backend = stream.StreamBackend(head, torch.randn(33, 64).bfloat16())
    for num_rows in (33, 1, 16):
        hidden, targets = torch.randn(num_rows, 64).bfloat16(), torch.arange(num_rows)
        rows = Rows(hidden, torch.ones(num_rows), targets)
        stats = backend.forward(rows, want_entropy=True, want_sum_sq=False, want_grad=True)
        up, grads = Upstream(torch.ones(num_rows), torch.ones(num_rows), None), HeadGrads(None, None, True)
        backend.backward(targets, up, grads)
        stream.slab_backward(head, rows, stats, up, grads, 512)
    assert set(compiled) == {"stats_kernel", "combine_kernel", "dz_kernel", "slab_dz_kernel"}
    for kernel, versions in compiled.items():
        assert len({id(version) for version in versions}) == 1, kernel
    for kernel in ("stats_kernel", "slab_dz_kernel"):
        assert "ttg.warp_specialize" in compiled[kernel][0].asm["ttgir"]
