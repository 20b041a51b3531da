"""Opens the backend that an op runs on; the Triton ones load Triton only here."""

from __future__ import annotations

from torch import Tensor

from csrc_triton.head import ChunkBackend, Head
from csrc_triton.launch import choose_backend
from csrc_triton.rows import TorchBackend


def open_backend(name: str, head: Head, hidden: Tensor, max_extra_bytes: int | None) -> ChunkBackend:
    """ValueError where the backend asked for cannot run on `hidden`'s device."""
    chosen = choose_backend(name, hidden)
    if chosen == "cublas":
        from csrc_triton.cublas import CublasBackend

        return CublasBackend(head, hidden, max_extra_bytes)
    if chosen == "triton":
        from csrc_triton.stream import StreamBackend

        return StreamBackend(head, hidden, max_extra_bytes)
    return TorchBackend(head, hidden, max_extra_bytes)
