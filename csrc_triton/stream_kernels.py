"""Kernels of the streaming backend: the head's product, tile by tile, with the row maths in its epilogue.

Letters: C rows, k of them that take a gradient, H hidden size, V vocabulary; a tile is BLOCK_M rows x BLOCK_N ids.
Logits never leave the registers. Everything is fp32 in base 2, z = log2(e) softcap(scale (x W' + bias)) / tau, and the
tile loops hold no run-time branch: Triton specialises warps on Hopper only then. An optional pointer that is None
takes its code away. No atomics; the split of V and the order of every sum are those of the tiles, whatever C is.
"""

# ruff: noqa: ANN001, ANN201  (what a kernel takes has no Python type; comments say what it is)
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)  # a column that must not count; finite, so that 0 * LOWEST is 0 and never nan


@triton.jit
def tile_origin(tile, num_rows, num_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr = 8):
    """First row and first column of a tile; GROUP_M row blocks share the ids they read while the L2 cache has them."""
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n = tl.cdiv(num_cols, BLOCK_N)
    first = tile // (GROUP_M * tiles_n) * GROUP_M
    size = tl.minimum(tiles_m - first, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return (first + within % size) * BLOCK_M, within // size * BLOCK_N


@triton.jit
def operand(ptr, num_rows, width, stride, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, USE_DESC: tl.constexpr):
    """A (num_rows, width) matrix to read blocks of: a descriptor, or the pointer where TMA cannot take it."""
    if USE_DESC:
        return tl.make_tensor_descriptor(ptr, [num_rows, width], [stride, 1], [BLOCK_R, BLOCK_K])
    else:
        return ptr


@triton.jit
def load_block(
    source, row, k, num_rows, width, stride, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, USE_DESC: tl.constexpr
):
    if USE_DESC:
        return source.load([row, k])
    else:
        rows = row + tl.arange(0, BLOCK_R)
        cols = k + tl.arange(0, BLOCK_K)
        inside = (rows < num_rows)[:, None] & (cols < width)[None, :]
        return tl.load(source + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=inside, other=0.0)


@triton.jit
def tile_product(
    x,
    w,
    row,
    col,
    num_rows,
    num_cols,
    width,
    x_stride,
    w_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_DESC: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """(BLOCK_M, BLOCK_N) of x W' in fp32; rows and columns outside are 0."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, width, BLOCK_K):
        left = load_block(x, row, k, num_rows, width, x_stride, BLOCK_M, BLOCK_K, USE_DESC)
        right = load_block(w, col, k, num_cols, width, w_stride, BLOCK_N, BLOCK_K, USE_DESC)
        if INTERPRET:  # the interpreter multiplies the bits of bf16
            left, right = left.to(tl.float32), right.to(tl.float32)
        acc = tl.dot(left, right.T, acc, input_precision="ieee")
    return acc


@triton.jit
def base2_logits(acc, bias_ptr, cols, num_cols, tau, logit_scale, softcap):
    """z of a tile, LOWEST in columns outside V.

    The cap comes before the padding: capped padding would count as e^-cap per column.
    """
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
        acc += tl.where(bias < LOWEST, LOWEST, bias)[None, :]
    pad = tl.where(cols < num_cols, 0.0, LOWEST)[None, :]
    if softcap is not None:
        squashed = 1.0 - 2.0 / (1.0 + tl.exp2(acc * (2.0 * LOG2E * logit_scale / softcap)))
        return squashed * (softcap / tau * LOG2E)[:, None] + pad
    else:
        return acc * (logit_scale / tau * LOG2E)[:, None] + pad


@triton.jit(do_not_specialize=["num_rows", "num_cols"])
def stats_kernel(
    hidden_ptr,  # (C, H)
    weight_ptr,  # (V, H)
    bias_ptr,  # (V,) or None
    temperature_ptr,  # (C,)
    targets_ptr,  # (C,) int64
    part_top_ptr,  # (tiles of V, C) largest z of the row in the tile
    part_s_ptr,  # (tiles of V, C) sum of e = 2^(z - top)
    part_t_ptr,  # (tiles of V, C) sum of e (z - top), or None
    part_q_ptr,  # (tiles of V, C) sum of e^2, or None
    target_z_ptr,  # (C,) z of the target, written by the tile that owns it
    exp_ptr,  # (C, exp_stride) e in the type of hidden, or None
    num_rows,
    num_cols,
    width,
    hidden_stride,
    weight_stride,
    exp_stride,
    logit_scale,
    softcap,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    FLATTEN: tl.constexpr,
    USE_DESC: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Partial statistics of every (row, tile of V), by one program per multiprocessor."""
    x = operand(hidden_ptr, num_rows, width, hidden_stride, BLOCK_M, BLOCK_K, USE_DESC)
    w = operand(weight_ptr, num_cols, width, weight_stride, BLOCK_N, BLOCK_K, USE_DESC)
    if exp_ptr is not None:
        out = operand(exp_ptr, num_rows, num_cols, exp_stride, BLOCK_M, BLOCK_N, USE_DESC)
    num_tiles = tl.cdiv(num_rows, BLOCK_M) * tl.cdiv(num_cols, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE
    ):
        row, col = tile_origin(tile, num_rows, num_cols, BLOCK_M, BLOCK_N)
        rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        live = rows < num_rows
        acc = tile_product(
            x, w, row, col, num_rows, num_cols, width, hidden_stride, weight_stride,
            BLOCK_M, BLOCK_N, BLOCK_K, USE_DESC, INTERPRET,
        )  # fmt: skip
        tau = tl.load(temperature_ptr + rows, mask=live, other=1.0)
        z = base2_logits(acc, bias_ptr, cols, num_cols, tau, logit_scale, softcap)
        target = tl.load(targets_ptr + rows, mask=live, other=-1).to(tl.int32)
        target_z = tl.sum(tl.where(cols[None, :] == target[:, None], z, 0.0), 1)
        tl.store(target_z_ptr + rows, target_z, mask=(target >= col) & (target < col + BLOCK_N))
        top = tl.max(z, 1)
        d = z - top[:, None]
        e = tl.exp2(d)
        part = (col // BLOCK_N).to(tl.int64) * num_rows
        tl.store(part_top_ptr + part + rows, top, mask=live)
        tl.store(part_s_ptr + part + rows, tl.sum(e, 1), mask=live)
        if part_t_ptr is not None:
            tl.store(part_t_ptr + part + rows, tl.sum(e * d, 1), mask=live)
        if part_q_ptr is not None:
            tl.store(part_q_ptr + part + rows, tl.sum(e * e, 1), mask=live)
        if exp_ptr is not None:
            store_block(out, e, row, col, num_rows, num_cols, exp_stride, BLOCK_M, BLOCK_N, USE_DESC)


@triton.jit
def store_block(
    out,
    value,
    row,
    col,
    num_rows,
    num_cols,
    stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_DESC: tl.constexpr,
):
    if USE_DESC:
        out.store([row, col], value.to(out.dtype))
    else:
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        inside = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        at = out + rows.to(tl.int64)[:, None] * stride + cols[None, :]
        tl.store(at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_cols", "num_tiles"])
def combine_kernel(
    part_top_ptr,  # as written by stats_kernel
    part_s_ptr,
    part_t_ptr,
    part_q_ptr,
    target_z_ptr,
    targets_ptr,
    top_ptr,  # (C,) largest z, base 2
    log_s_ptr,  # (C,) log2 of sum 2^(z - top)
    logprobs_ptr,  # (C,) nats, as the following
    lse_ptr,
    entropy_ptr,  # or None
    sum_sq_ptr,  # or None
    num_rows,
    num_cols,
    num_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Partials of a row into its statistics, BLOCK_T tiles at a time in rising order; nan for a target outside V."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = rows < num_rows
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    s = tl.zeros((BLOCK_M,), tl.float32)
    t = tl.zeros((BLOCK_M,), tl.float32)
    q = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, num_tiles, BLOCK_T):
        tiles = first + tl.arange(0, BLOCK_T)
        part = tiles.to(tl.int64)[:, None] * num_rows + rows[None, :]
        inside = (tiles < num_tiles)[:, None] & live[None, :]
        part_top = tl.load(part_top_ptr + part, mask=inside, other=LOWEST)
        part_s = tl.load(part_s_ptr + part, mask=inside, other=0.0)
        new = tl.maximum(top, tl.max(part_top, 0))
        old_gap = tl.where(top == float("-inf"), 0.0, top - new)
        old, gap = tl.exp2(top - new), part_top - new[None, :]
        factor = tl.exp2(gap)
        if part_t_ptr is not None:
            part_t = tl.load(part_t_ptr + part, mask=inside, other=0.0)
            t = (t + s * old_gap) * old + tl.sum((part_t + part_s * gap) * factor, 0)
        if part_q_ptr is not None:
            part_q = tl.load(part_q_ptr + part, mask=inside, other=0.0)
            q = q * old * old + tl.sum(part_q * factor * factor, 0)
        s = s * old + tl.sum(part_s * factor, 0)
        top = new
    target = tl.load(targets_ptr + rows, mask=live, other=0)
    valid = (target >= 0) & (target < num_cols)
    top = tl.where(valid, top, float("nan"))
    log_s = tl.log2(s)
    logprob = (tl.load(target_z_ptr + rows, mask=live & valid, other=0.0) - top - log_s) * LN2
    tl.store(top_ptr + rows, top, mask=live)
    tl.store(log_s_ptr + rows, tl.where(valid, log_s, float("nan")), mask=live)
    tl.store(logprobs_ptr + rows, tl.where(logprob > 0.0, 0.0, logprob), mask=live)  # a minimum would hide nan
    tl.store(lse_ptr + rows, (top + log_s) * LN2, mask=live)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + rows, tl.where(valid, (log_s - t / s) * LN2, float("nan")), mask=live)
    if sum_sq_ptr is not None:
        tl.store(sum_sq_ptr + rows, tl.where(valid, q / (s * s), float("nan")), mask=live)


@triton.jit
def load_rows(ptr, rows, live):
    """(BLOCK_M, 1) of a row vector."""
    return tl.load(ptr + rows, mask=live, other=0.0)[:, None]


@triton.jit
def dlin_of(p, l2, factor, rows, live, a_ptr, b_ptr, entropy_ptr, g_ptr, sum_sq_ptr):
    """d(loss)/d(x W') but for the target's own entry; l2 = log2 p, finite also where p is 0."""
    inner = load_rows(a_ptr, rows, live)
    if b_ptr is not None:
        inner += load_rows(b_ptr, rows, live) * (l2 * LN2 + load_rows(entropy_ptr, rows, live))
    if g_ptr is not None:
        inner -= 2.0 * load_rows(g_ptr, rows, live) * (p - load_rows(sum_sq_ptr, rows, live))
    return -p * (inner * factor)


@triton.jit
def log2_of_rounded(x, INTERPRET: tl.constexpr):
    """log2 by one instruction, error 2^-22: e has 8 or 11 bits, and tl.log2 would spend 35 instructions on more."""
    if INTERPRET:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


@triton.jit(do_not_specialize=["num_rows", "num_kept", "num_padded"])
def dz_kernel(
    exp_ptr,  # (padded C, exp_stride) e of stats_kernel; dlin of the kept rows takes its place, row i from row keep[i]
    part_top_ptr,  # (tiles of V, C)
    keep_ptr,  # (k,) int64, rising; None: all rows. Vectors below are of the kept rows
    temperature_ptr,
    targets_ptr,
    target_dlin_ptr,  # (k,) the target's own entry
    top_ptr,
    log_s_ptr,
    a_ptr,
    b_ptr,  # or None
    entropy_ptr,
    g_ptr,  # or None
    sum_sq_ptr,
    num_rows,
    num_kept,
    num_padded,
    exp_stride,
    logit_scale,
    softcap,
    TILE_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """E into d(loss)/d(x W') in place, closing the gaps that dropped rows leave; rows from k to the padding are 0.

    A program owns BLOCK_N columns and goes down the rows. keep[i] >= i, so a row is read before anything is written to
    it; within a block the barrier sees to that. Columns that pad a row are worked like others, for a mask at V would
    cut 16-byte accesses to 2; nobody reads them.
    """
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tops = part_top_ptr + (tl.program_id(0) * BLOCK_N // TILE_N).to(tl.int64) * num_rows
    for first in range(0, num_padded, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        live = rows < num_kept
        source = tl.load(keep_ptr + rows, mask=live, other=0) if keep_ptr is not None else rows.to(tl.int64)
        inside = live[:, None] & (cols < exp_stride)[None, :]
        e = tl.load(exp_ptr + source[:, None] * exp_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        offset = tl.load(tops + source, mask=live, other=0.0)[:, None]
        shift = (offset - load_rows(top_ptr, rows, live)) - load_rows(log_s_ptr, rows, live)
        p = e * tl.exp2(shift)
        tau = tl.load(temperature_ptr + rows, mask=live, other=1.0)[:, None]
        factor = logit_scale / tau
        log_e = e
        if (b_ptr is not None) or (softcap is not None):
            log_e = tl.where(e > 0.0, log2_of_rounded(e, INTERPRET), 0.0)
        if softcap is not None:
            squashed = (log_e + offset) * (tau * LN2 / softcap)
            factor = factor * (1.0 - squashed * squashed)
        dlin = dlin_of(p, log_e + shift, factor, rows, live, a_ptr, b_ptr, entropy_ptr, g_ptr, sum_sq_ptr)
        target = tl.load(targets_ptr + rows, mask=live, other=-1).to(tl.int32)[:, None]
        dlin = tl.where(cols[None, :] == target, load_rows(target_dlin_ptr, rows, live), dlin)
        tl.debug_barrier()
        written = (rows < num_padded)[:, None] & (cols < exp_stride)[None, :]
        at = exp_ptr + rows.to(tl.int64)[:, None] * exp_stride + cols[None, :]
        tl.store(at, dlin.to(exp_ptr.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["num_rows", "num_cols", "first_col"])
def slab_dz_kernel(
    hidden_ptr,  # (k, H)
    weight_ptr,  # (S, H) the slab's rows
    bias_ptr,  # (S,) or None
    temperature_ptr,
    targets_ptr,  # (k,) int64, ids of the whole vocabulary
    target_dlin_ptr,
    top_ptr,
    log_s_ptr,
    a_ptr,
    b_ptr,  # or None
    entropy_ptr,
    g_ptr,  # or None
    sum_sq_ptr,
    out_ptr,  # (k, out_stride)
    num_rows,
    num_cols,
    first_col,  # of the slab in the vocabulary
    width,
    hidden_stride,
    weight_stride,
    out_stride,
    logit_scale,
    softcap,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    FLATTEN: tl.constexpr,
    USE_DESC: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """d(loss)/d(x W') of a slab of ids from logits worked out again; the row statistics are known."""
    x = operand(hidden_ptr, num_rows, width, hidden_stride, BLOCK_M, BLOCK_K, USE_DESC)
    w = operand(weight_ptr, num_cols, width, weight_stride, BLOCK_N, BLOCK_K, USE_DESC)
    out = operand(out_ptr, num_rows, num_cols, out_stride, BLOCK_M, BLOCK_N, USE_DESC)
    num_tiles = tl.cdiv(num_rows, BLOCK_M) * tl.cdiv(num_cols, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE
    ):
        row, col = tile_origin(tile, num_rows, num_cols, BLOCK_M, BLOCK_N)
        rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        live = rows < num_rows
        acc = tile_product(
            x, w, row, col, num_rows, num_cols, width, hidden_stride, weight_stride,
            BLOCK_M, BLOCK_N, BLOCK_K, USE_DESC, INTERPRET,
        )  # fmt: skip
        tau = tl.load(temperature_ptr + rows, mask=live, other=1.0)
        z = base2_logits(acc, bias_ptr, cols, num_cols, tau, logit_scale, softcap)
        l2 = (z - load_rows(top_ptr, rows, live)) - load_rows(log_s_ptr, rows, live)
        factor = (logit_scale / tau)[:, None]
        if softcap is not None:
            squashed = z * (tau * LN2 / softcap)[:, None]
            factor = factor * (1.0 - squashed * squashed)
        dlin = dlin_of(tl.exp2(l2), l2, factor, rows, live, a_ptr, b_ptr, entropy_ptr, g_ptr, sum_sq_ptr)
        target = (tl.load(targets_ptr + rows, mask=live, other=-1) - first_col).to(tl.int32)[:, None]
        dlin = tl.where(cols[None, :] == target, load_rows(target_dlin_ptr, rows, live), dlin)
        store_block(out, dlin, row, col, num_rows, num_cols, out_stride, BLOCK_M, BLOCK_N, USE_DESC)
