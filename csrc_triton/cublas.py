"""Row chunks by cuBLAS products and Triton row kernels: fp32 logits of a chunk in memory, read once each way.

The products run at the library's speed and the row kernels at the memory's, which costs little where H is large.
cuBLAS chooses its kernels by shape, so a row's last bits may depend on the rows beside it. Formulas: `head.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_triton.head import Head, HeadGrads, Rows, RowStats, Upstream
from csrc_triton.launch import COLUMN_MULTIPLE, ROW_MULTIPLE, chunk_rows, round_up
from csrc_triton.products import addmm_fp32_, mm_fp32

ROW_LAUNCH: dict[str, Any] = {"BLOCK": 4096, "num_warps": 8, "enable_fp_fusion": True}  # of both row kernels


def row_bytes(hidden: Tensor, num_classes: int) -> int:
    """Of a row's logits (fp32) and their gradient (hidden's type)."""
    return (4 + hidden.element_size()) * round_up(num_classes, COLUMN_MULTIPLE)


def launch_row_stats(raw: Tensor, head: Head, rows: Rows, *, want_entropy: bool, want_sum_sq: bool) -> RowStats:
    """Statistics of each row of raw (C, V) fp32 = x W', any row stride; `top` and `log_s` in base 2."""
    from csrc_triton.row_kernels import row_stats_kernel

    num_rows, num_cols = raw.shape
    new = lambda: torch.empty(num_rows, dtype=torch.float32, device=raw.device)  # noqa: E731
    entropy, sum_sq = new() if want_entropy else None, new() if want_sum_sq else None
    stats = RowStats(new(), new(), entropy, sum_sq, new(), new())
    with torch.cuda.device_of(raw):
        row_stats_kernel[(num_rows,)](
            raw,
            head.bias,
            rows.temperature.contiguous(),
            rows.targets.contiguous(),
            *stats,
            num_cols,
            raw.stride(0),
            float(head.logit_scale),
            head.softcap,
            **ROW_LAUNCH,
        )
    return stats


def launch_row_dz(
    raw: Tensor, head: Head, rows: Rows, stats: RowStats, keep: Tensor | None, up: Upstream, dlin: Tensor
) -> Tensor:
    """Fill dlin (>= k, V), any row stride, with d(loss)/d(raw) of the kept rows, then rows of 0.

    Returns (k,) fp32, what rounding to dlin's type took from each row's target entry.
    """
    from csrc_triton.row_kernels import row_dz_kernel

    num_kept = rows.targets.shape[0] if keep is None else keep.shape[0]
    residual = torch.empty(num_kept, dtype=torch.float32, device=raw.device)
    with torch.cuda.device_of(raw):
        row_dz_kernel[(dlin.shape[0],)](
            raw,
            head.bias,
            rows.temperature.contiguous(),
            rows.targets.contiguous(),
            stats.logprobs,
            stats.entropy,
            stats.sum_sq,
            stats.top,
            stats.log_s,
            keep,
            *Upstream(*(value.contiguous() if value is not None else None for value in up)),
            dlin,
            residual,
            num_kept,
            raw.shape[1],
            raw.stride(0),
            dlin.stride(0),
            float(head.logit_scale),
            head.softcap,
            **ROW_LAUNCH,
        )
    return residual


class Chunk(NamedTuple):
    """What `forward` leaves for `backward`; the logits lie in the backend's buffer."""

    rows: Rows
    stats: RowStats


class CublasBackend:
    """A `head.ChunkBackend`. Its two (C, V) buffers are made when first needed and used again by every chunk."""

    def __init__(self, head: Head, hidden: Tensor, max_extra_bytes: int | None) -> None:
        self.head = head
        self.num_rows = chunk_rows(hidden, head.weight, row_bytes(hidden, head.weight.shape[0]), max_extra_bytes)
        self.raw: Tensor | None = None
        self.dlin: Tensor | None = None
        self.chunk: Chunk | None = None

    def new_buffer(self, dtype: torch.dtype) -> Tensor:
        """(C, V), each row starting on 128 bytes."""
        num_cols = self.head.weight.shape[0]
        width = round_up(num_cols, COLUMN_MULTIPLE)
        return torch.empty(self.num_rows, width, dtype=dtype, device=self.head.weight.device)[:, :num_cols]

    def forward(self, rows: Rows, *, want_entropy: bool, want_sum_sq: bool, want_grad: bool) -> RowStats:
        self.raw = self.raw if self.raw is not None else self.new_buffer(torch.float32)
        raw = mm_fp32(rows.hidden, self.head.weight.T, out=self.raw[: rows.hidden.shape[0]])
        stats = launch_row_stats(raw, self.head, rows, want_entropy=want_entropy, want_sum_sq=want_sum_sq)
        self.chunk = Chunk(rows, stats) if want_grad else None
        return stats

    def backward(self, keep: Tensor | None, up: Upstream, grads: HeadGrads) -> Tensor | None:
        assert self.chunk is not None and self.raw is not None, "forward(want_grad=True) comes first"
        rows, stats = self.chunk
        hidden, targets = (rows.hidden, rows.targets) if keep is None else (rows.hidden[keep], rows.targets[keep])
        num_kept = hidden.shape[0]
        if num_kept == 0:
            return hidden.new_zeros(hidden.shape, dtype=torch.float32) if grads.want_hidden else None
        self.dlin = self.dlin if self.dlin is not None else self.new_buffer(hidden.dtype)
        padded = round_up(num_kept, ROW_MULTIPLE) if hidden.device.type == "cuda" else num_kept
        dlin = self.dlin[:padded]
        residual = launch_row_dz(self.raw[: rows.targets.shape[0]], self.head, rows, stats, keep, up, dlin)
        if grads.weight is not None:
            addmm_fp32_(grads.weight, dlin.T, torch.nn.functional.pad(hidden, (0, 0, 0, padded - num_kept)))
        if grads.bias is not None:
            grads.bias.add_(dlin.sum(0, dtype=torch.float32))
        if not grads.want_hidden:
            return None
        out = torch.empty(padded, hidden.shape[1], dtype=torch.float32, device=hidden.device)
        dx = mm_fp32(dlin, self.head.weight, out=out)[:num_kept]
        own_row = self.head.weight[targets.clamp(0, self.head.weight.shape[0] - 1)]  # outside V dlin is nan already
        return dx.addcmul_(residual[:, None], own_row.float())
