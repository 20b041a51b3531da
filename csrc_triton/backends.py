"""Opens the backend that an op runs on; the Triton ones load Triton only here."""

from __future__ import annotations

from torch import Tensor

from csrc_triton.head import ChunkBackend, Head
from csrc_triton.launch import choose_backend
from csrc_triton.rows import TorchBackend
from csrc_triton.sparse import SparseBackend


def open_backend(
    name: str, head: Head, hidden: Tensor, max_extra_bytes: int | None, sparse_tolerance: float | None = None
) -> ChunkBackend:
    """ValueError where the backend asked for cannot run on `hidden`'s device, or has no sparse backward."""
    chosen = choose_backend(name, hidden)
    if sparse_tolerance is not None:
        if chosen != "torch":
            raise ValueError(f"sparse_tolerance needs backend = 'torch'; here it is {chosen!r}")
        return SparseBackend(head, hidden, max_extra_bytes, sparse_tolerance)
    if chosen == "cublas":
        from csrc_triton.cublas import CublasBackend

        return CublasBackend(head, hidden, max_extra_bytes)
    if chosen == "triton":
        from csrc_triton.stream import StreamBackend

        return StreamBackend(head, hidden, max_extra_bytes)
    return TorchBackend(head, hidden, max_extra_bytes)
