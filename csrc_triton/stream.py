"""The streaming backend: a persistent kernel makes the row statistics, the logits never reach memory.

With a gradient asked for it leaves E = 2^(z - top of the tile) in the type of hidden, from which one pass makes dz; or,
where the rows' coefficients come later, `slab_backward` works dz out again slab by slab. Its forward is
batch-invariant: V is cut and summed in an order that depends on (V, H, dtype, configuration) alone, so
f(x[:n]) == f(x)[:n] bit for bit. Formulas: `head.py`. Kernels: `stream_kernels.py`.
"""

from __future__ import annotations

import contextlib
import contextvars
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from csrc_triton.head import Head, HeadGrads, Rows, RowStats, Upstream, make_head, target_gradient
from csrc_triton.launch import (
    COLUMN_MULTIPLE,
    CONFIGS,
    FP32_CONFIG,
    POINTER_CONFIG,
    ROW_MULTIPLE,
    Config,
    arch,
    chunk_rows,
    interpreting,
    round_up,
)
from csrc_triton.products import addmm_fp32_, mm_fp32

SLAB = 8192  # ids whose gradient `linear_logprobs` holds at a time


class Configs(NamedTuple):
    stats: Config
    stats_store: Config
    slab_dz: Config
    dz: Config
    combine: Config


class Pending(NamedTuple):
    """What a backward needs of the chunk last seen."""

    rows: Rows
    stats: RowStats
    part_top: Tensor  # (tiles of V, C)
    exp: Tensor  # (C rounded up, V rounded up)


def choose_configs(head: Head, device: torch.device) -> Configs:
    """The lines of the table for this head; a softcap takes registers, and some kernels have a line for that."""
    major = arch(device)

    def line(kernel: str) -> Config:
        if head.weight.dtype == torch.float32:
            return FP32_CONFIG
        if not takes_descriptors(head.weight) or head.weight.shape[1] * head.weight.element_size() % 16:
            return POINTER_CONFIG
        special = CONFIGS.get((f"{kernel}_softcap", major)) if head.softcap is not None else None
        return special or CONFIGS[kernel, major]

    return Configs(line("stats"), line("stats_store"), line("slab_dz"), CONFIGS["dz", major], CONFIGS["combine", major])


def row_bytes(hidden: Tensor, num_classes: int, tile_n: int) -> int:
    """Of a row's E (hidden's type) and its partials."""
    return hidden.element_size() * num_classes + 12 * -(-num_classes // tile_n)


def run(kernel: str, grid: int, device: torch.device, **arguments: Any) -> None:
    """Launch a kernel of stream_kernels.py; Triton is imported only here.

    Triton's allocator is a context variable that a worker thread does not inherit: it is set at each launch, in a
    context of its own, so that the caller's stays.
    """
    import triton

    from csrc_triton import stream_kernels

    def allocate(size: int, alignment: int, stream: int | None) -> Any:
        return torch.empty(size, dtype=torch.int8, device=device)

    def launch() -> None:
        triton.set_allocator(allocate)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            getattr(stream_kernels, kernel)[(grid,)](enable_fp_fusion=True, **arguments)

    contextvars.copy_context().run(launch)


def tiles(config: Config) -> dict[str, Any]:
    """Constant arguments and compile options of a matrix kernel."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "WARP_SPECIALIZE": config.warp_specialize,
        "FLATTEN": config.flatten,
        "INTERPRET": interpreting(),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def num_programs(config: Config, num_rows: int, num_cols: int, device: torch.device) -> int:
    """One program per multiprocessor, or fewer where there are fewer tiles; the interpreter plays two."""
    num_tiles = -(-num_rows // config.block_m) * -(-num_cols // config.block_n)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return min(processors, num_tiles)


def takes_descriptors(*matrices: Tensor) -> bool:
    """TMA wants contiguous rows, and a 16-byte aligned base and row stride."""
    fits = lambda m: m.stride(1) == 1 and m.data_ptr() % 16 == 0 and m.stride(0) * m.element_size() % 16 == 0  # noqa: E731
    return all(fits(m) for m in matrices)


def aligned(matrix: Tensor) -> Tensor:
    """The matrix as TMA takes it, where its width lets it."""
    return matrix if takes_descriptors(matrix) else matrix.clone(memory_format=torch.contiguous_format)


def row_vectors(rows: Rows) -> dict[str, Tensor]:
    return {"temperature_ptr": rows.temperature.contiguous(), "targets_ptr": rows.targets.contiguous()}


def stream_stats(
    head: Head, rows: Rows, configs: Configs, exp: Tensor | None, *, want_entropy: bool, want_sum_sq: bool
) -> tuple[RowStats, Tensor]:
    """Statistics of the rows and the (tiles of V, C) tops of their tiles; `exp` takes E where it is given."""
    config = configs.stats if exp is None else configs.stats_store
    hidden, weight = aligned(rows.hidden), head.weight
    num_rows, num_cols = hidden.shape[0], weight.shape[0]
    num_tiles = -(-num_cols // config.block_n)
    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=hidden.device)  # noqa: E731
    part_top = new(num_tiles, num_rows)
    partials = {
        "part_top_ptr": part_top,
        "part_s_ptr": new(num_tiles, num_rows),
        "part_t_ptr": new(num_tiles, num_rows) if want_entropy else None,
        "part_q_ptr": new(num_tiles, num_rows) if want_sum_sq else None,
        "target_z_ptr": new(num_rows),
    }
    run(
        "stats_kernel",
        num_programs(config, num_rows, num_cols, hidden.device),
        hidden.device,
        hidden_ptr=hidden,
        weight_ptr=weight,
        bias_ptr=head.bias,
        exp_ptr=exp,
        num_rows=num_rows,
        num_cols=num_cols,
        width=hidden.shape[1],
        hidden_stride=hidden.stride(0),
        weight_stride=weight.stride(0),
        exp_stride=exp.stride(0) if exp is not None else None,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        USE_DESC=takes_descriptors(hidden, weight),
        **row_vectors(rows),
        **partials,
        **tiles(config),
    )
    logprobs, lse, top, log_s = (new(num_rows) for _ in range(4))
    entropy, sum_sq = new(num_rows) if want_entropy else None, new(num_rows) if want_sum_sq else None
    combine = configs.combine
    run(
        "combine_kernel",
        -(-num_rows // combine.block_m),
        hidden.device,
        targets_ptr=rows.targets.contiguous(),
        top_ptr=top,
        log_s_ptr=log_s,
        logprobs_ptr=logprobs,
        lse_ptr=lse,
        entropy_ptr=entropy,
        sum_sq_ptr=sum_sq,
        num_rows=num_rows,
        num_cols=num_cols,
        num_tiles=num_tiles,
        BLOCK_M=combine.block_m,
        BLOCK_T=combine.block_k,
        num_warps=combine.num_warps,
        num_stages=combine.num_stages,
        **partials,
    )
    return RowStats(logprobs, lse, entropy, sum_sq, top, log_s), part_top


def coefficients(head: Head, rows: Rows, stats: RowStats, up: Upstream) -> dict[str, Any]:
    """Arguments that both dz kernels share, (k,) each."""
    vector = lambda x: x.float().contiguous() if x is not None else None  # noqa: E731
    a, b, g = (vector(x) for x in up)
    return row_vectors(rows) | {
        "target_dlin_ptr": target_gradient(head, stats, up, rows.temperature),
        "top_ptr": stats.top,
        "log_s_ptr": stats.log_s,
        "a_ptr": a if a is not None else torch.zeros_like(stats.top),
        "b_ptr": b,
        "entropy_ptr": stats.entropy if b is not None else None,
        "g_ptr": g,
        "sum_sq_ptr": stats.sum_sq if g is not None else None,
        "logit_scale": head.logit_scale,
        "softcap": head.softcap,
    }


def add_target_residual(dx: Tensor, head: Head, rows: Rows, target_dlin: Tensor) -> None:
    """dX += (t - rounded t) W_y: the target's entry is most of a row's gradient, and of its rounding error."""
    if rows.hidden.dtype == torch.float32:
        return
    residual = target_dlin - target_dlin.to(rows.hidden.dtype).float()
    inside = rows.targets.clamp(0, head.weight.shape[0] - 1)  # a target outside V has nan in its residual
    dx.addcmul_(residual[:, None], head.weight[inside])


def slab_backward(
    head: Head,
    rows: Rows,
    stats: RowStats,
    up: Upstream,
    grads: HeadGrads,
    slab: int,
    config: Config | None = None,
) -> Tensor | None:
    """dX (k, H) fp32 of rows that all take a gradient; dW and dbias are added slab by slab into `grads`.

    `slab` ids at a time, a multiple of 128: (k, slab) is all that is held. Their logits are worked out again.
    """
    head = make_head(*head)
    hidden, weight = aligned(rows.hidden), head.weight
    (num_rows, width), num_cols = hidden.shape, weight.shape[0]
    dx = hidden.new_empty(num_rows, width, dtype=torch.float32) if grads.want_hidden else None
    if num_rows == 0:
        return dx
    config = config or choose_configs(head, hidden.device).slab_dz
    shared = coefficients(head, rows, stats, up)
    buffer = hidden.new_empty(num_rows, round_up(min(slab, num_cols), COLUMN_MULTIPLE))
    for first in range(0, num_cols, slab):
        part = weight[first : first + slab]
        dz = buffer[:, : part.shape[0]]
        run(
            "slab_dz_kernel",
            num_programs(config, num_rows, part.shape[0], hidden.device),
            hidden.device,
            hidden_ptr=hidden,
            weight_ptr=part,
            bias_ptr=head.bias[first : first + slab] if head.bias is not None else None,
            out_ptr=dz,
            num_rows=num_rows,
            num_cols=part.shape[0],
            first_col=first,
            width=width,
            hidden_stride=hidden.stride(0),
            weight_stride=weight.stride(0),
            out_stride=dz.stride(0),
            USE_DESC=takes_descriptors(hidden, part, dz),
            **shared,
            **tiles(config),
        )
        if dx is not None:
            _ = mm_fp32(dz, part, out=dx) if first == 0 else addmm_fp32_(dx, dz, part)
        if grads.weight is not None:
            addmm_fp32_(grads.weight[first : first + slab], dz.T, hidden)
        if grads.bias is not None:
            grads.bias[first : first + slab] += dz.sum(0, dtype=torch.float32)
    if dx is not None:
        add_target_residual(dx, head, rows, shared["target_dlin_ptr"])
    return dx


class StreamBackend:
    """`head.ChunkBackend` on the streaming kernels; `configs` replaces the table's lines, in tests."""

    def __init__(
        self, head: Head, hidden: Tensor, max_extra_bytes: int | None = None, configs: Configs | None = None
    ) -> None:
        self.head = make_head(*head)
        self.configs = configs or choose_configs(self.head, hidden.device)
        needed = row_bytes(hidden, head.weight.shape[0], self.configs.stats.block_n)
        self.num_rows = chunk_rows(hidden, head.weight, needed, max_extra_bytes)
        self._exp: Tensor | None = None  # one buffer for all chunks
        self._pending: Pending | None = None

    def forward(self, rows: Rows, *, want_entropy: bool, want_sum_sq: bool, want_grad: bool) -> RowStats:
        """Statistics of a chunk (C > 0); with `want_grad` the chunk then waits for its `backward`."""
        self._pending = None
        exp = self._exp_buffer(rows) if want_grad else None
        wanted = {"want_entropy": want_entropy, "want_sum_sq": want_sum_sq}
        stats, part_top = stream_stats(self.head, rows, self.configs, exp, **wanted)
        self._pending = Pending(rows, stats, part_top, exp) if exp is not None else None
        return stats

    def backward(self, keep: Tensor | None, up: Upstream, grads: HeadGrads) -> Tensor | None:
        """Add dW and dbias of the rows `keep` (k,), return dX (k, H) fp32; once after `forward(want_grad=True)`.

        dW and dbias carry the rounding of dz to the type of hidden; dX does not carry that of the target's entry.
        """
        pending = self._pending
        if pending is None:
            raise RuntimeError("backward needs a forward(want_grad=True) before it, and runs once after each")
        self._pending = None
        rows, stats = pending.rows, pending.stats
        if keep is not None:
            rows, stats = rows.pick(keep), stats.pick(keep)
        num_kept, width = rows.hidden.shape
        if num_kept == 0:
            return rows.hidden.new_zeros(0, width, dtype=torch.float32) if grads.want_hidden else None
        shared = coefficients(self.head, rows, stats, up)
        num_padded = round_up(num_kept, ROW_MULTIPLE)
        dz = self._exp_to_dz(pending, keep, num_kept, num_padded, shared)
        dx = None
        if grads.want_hidden:
            dx = mm_fp32(dz, self.head.weight, out=dz.new_empty(num_padded, width, dtype=torch.float32))[:num_kept]
            add_target_residual(dx, self.head, rows, shared["target_dlin_ptr"])
        if grads.weight is not None:
            addmm_fp32_(grads.weight, dz.T, F.pad(rows.hidden, (0, 0, 0, num_padded - num_kept)))
        if grads.bias is not None:
            grads.bias.add_(dz.sum(0, dtype=torch.float32))
        return dx

    def _exp_buffer(self, rows: Rows) -> Tensor:
        num_rows = round_up(rows.hidden.shape[0], ROW_MULTIPLE)
        if self._exp is None or self._exp.shape[0] < num_rows:
            self._exp = None  # the old one goes before the new one comes
            self._exp = rows.hidden.new_empty(num_rows, round_up(self.head.weight.shape[0], COLUMN_MULTIPLE))
        return self._exp

    def _exp_to_dz(
        self, pending: Pending, keep: Tensor | None, num_kept: int, num_padded: int, shared: dict[str, Any]
    ) -> Tensor:
        """The (num_padded, V) gradient by x W', where E was."""
        exp, config, num_cols = pending.exp, self.configs.dz, self.head.weight.shape[0]
        store = self.configs.stats_store
        block_n = min(config.block_n, store.block_n)  # within one tile of the statistics
        run(
            "dz_kernel",
            -(-num_cols // block_n),
            exp.device,
            exp_ptr=exp,
            part_top_ptr=pending.part_top,
            keep_ptr=keep.contiguous() if keep is not None else None,
            num_rows=pending.rows.hidden.shape[0],
            num_kept=num_kept,
            num_padded=num_padded,
            exp_stride=exp.stride(0),
            TILE_N=store.block_n,
            BLOCK_M=config.block_m,
            BLOCK_N=block_n,
            INTERPRET=interpreting(),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **shared,
        )
        return exp[:num_padded, :num_cols]
