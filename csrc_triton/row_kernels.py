"""Kernels that go over rows of logits in memory: statistics forward, gradients backward. Launched by `cublas.py`.

Letters: C rows of a chunk, k of them that take a gradient, V vocabulary. One program takes a row, in blocks of columns
and in base 2: z = log2(e) softcap(scale (raw + bias)) / tau, where raw is the fp32 product x W'. An optional pointer
or scalar that is None takes its code away. A pointer named for a row vector holds fp32 numbers; offsets of rows are
int64, for C V passes 2^31. Formulas: `head.py`.
"""

# ruff: noqa: ANN001, ANN201  (what a kernel takes has no Python type; comments say what it is)
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)  # z of a column that must not count; finite, so that 0 * LOWEST is 0 and never nan


@triton.jit
def base2_logits(
    raw_ptr,
    bias_ptr,
    cols,
    num_cols,
    tau,
    logit_scale,
    softcap,
):
    """z at some columns of a row, LOWEST where they lie outside V or are banned, and the slope of the softcap.

    The cap comes before the padding: capped padding would count as e^-cap per column.
    """
    inside = (cols >= 0) & (cols < num_cols)
    u = tl.load(raw_ptr + cols, mask=inside, other=0.0)
    if bias_ptr is not None:
        u += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    slope = 1.0
    if softcap is not None:
        u = u * logit_scale
        e = tl.exp2(tl.abs(u) * (-2.0 * LOG2E / softcap))  # tanh by e^-2|x|: nothing overflows
        size = (1.0 - e) / (1.0 + e)
        slope = 4.0 * e / ((1.0 + e) * (1.0 + e))
        z = tl.where(u < 0.0, -size, size) * (softcap * LOG2E / tau)
    else:
        z = u * (logit_scale * LOG2E / tau)
    if bias_ptr is not None:
        z = tl.where(z < LOWEST, LOWEST, z)  # -inf bans an id; nan stays
    return tl.where(inside, z, LOWEST), slope


@triton.jit
def row_stats_kernel(
    raw_ptr,  # (C, raw_stride) fp32
    bias_ptr,  # (V,) or None
    temperature_ptr,
    targets_ptr,  # (C,) int64
    logprobs_ptr,  # out, nats, as the following
    lse_ptr,
    entropy_ptr,  # or None
    sum_sq_ptr,  # or None
    top_ptr,  # out, base 2: the largest z
    log_s_ptr,  # out, base 2: log of s = sum 2^(z - top)
    num_cols,
    raw_stride,
    logit_scale,
    softcap,  # or None
    BLOCK: tl.constexpr,
):
    """Statistics of one row, online over blocks; all nan if the target lies outside V."""
    row = tl.program_id(0).to(tl.int64)
    raw_ptr += row * raw_stride
    tau = tl.load(temperature_ptr + row)
    top = float("-inf")
    s = 0.0
    t = 0.0
    q = 0.0
    for start in range(0, num_cols, BLOCK):
        z, _ = base2_logits(raw_ptr, bias_ptr, start + tl.arange(0, BLOCK), num_cols, tau, logit_scale, softcap)
        new = tl.maximum(top, tl.max(z, 0))
        fade = tl.exp2(top - new)
        d = z - new
        e = tl.exp2(d)
        if entropy_ptr is not None:
            t = (t + s * tl.where(top == float("-inf"), 0.0, top - new)) * fade + tl.sum(e * d, 0)
        if sum_sq_ptr is not None:
            q = q * (fade * fade) + tl.sum(e * e, 0)
        s = s * fade + tl.sum(e, 0)
        top = new
    target = tl.load(targets_ptr + row)
    valid = (target >= 0) & (target < num_cols)
    z_y, _ = base2_logits(raw_ptr, bias_ptr, target, num_cols, tau, logit_scale, softcap)
    log_s = tl.where(valid, tl.log2(s), float("nan"))
    logprob = ((z_y - top) - log_s) * LN2
    tl.store(logprobs_ptr + row, tl.where(logprob > 0.0, 0.0, logprob))  # a minimum would hide nan
    tl.store(lse_ptr + row, (top + log_s) * LN2)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, (log_s - t / s) * LN2)
    if sum_sq_ptr is not None:
        tl.store(sum_sq_ptr + row, tl.where(valid, q / (s * s), float("nan")))
    tl.store(top_ptr + row, top)
    tl.store(log_s_ptr + row, log_s)


@triton.jit
def one_minus_exp(x):
    """1 - e^x for x <= 0 with all its digits: Taylor's series near 0, where the difference would lose them."""
    series = 1.0 + x / 2 * (1.0 + x / 3 * (1.0 + x / 4 * (1.0 + x / 5 * (1.0 + x / 6 * (1.0 + x / 7 * (1.0 + x / 8))))))
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp2(x * LOG2E))


@triton.jit
def row_dz_kernel(
    raw_ptr,  # (C, raw_stride) fp32, as the statistics saw it
    bias_ptr,  # (V,) or None
    temperature_ptr,  # this and the vectors up to log_s are (C,), as row_stats_kernel left them
    targets_ptr,
    logprobs_ptr,
    entropy_ptr,  # needed with b
    sum_sq_ptr,  # needed with g
    top_ptr,
    log_s_ptr,
    keep_ptr,  # (k,) int64 rows that take a gradient; None: all
    a_ptr,  # (k,) d(loss)/d(logprobs), or None
    b_ptr,  # (k,) d(loss)/d(entropy), or None
    g_ptr,  # (k,) d(loss)/d(sum_sq), or None
    dlin_ptr,  # (programs, dlin_stride) out, rounded to its type; rows from k on become 0
    residual_ptr,  # (k,) out: what the rounding took from the target's own entry
    num_kept,
    num_cols,
    raw_stride,
    dlin_stride,
    logit_scale,
    softcap,  # or None
    BLOCK: tl.constexpr,
):
    """d(loss)/d(raw) of one row.

    The target's entry holds nearly all rounding error of the matrix: it is worked out from the log-probability,
    without the cancellation in 1 - p, and its rounding is handed back for the product with W to make good.
    """
    slot = tl.program_id(0).to(tl.int64)
    dlin_ptr += slot * dlin_stride
    if slot < num_kept:
        row = slot
        if keep_ptr is not None:
            row = tl.load(keep_ptr + slot)
        raw_ptr += row * raw_stride
        tau = tl.load(temperature_ptr + row)
        top = tl.load(top_ptr + row)
        log_s = tl.load(log_s_ptr + row)
        target = tl.load(targets_ptr + row)
        logprob = tl.load(logprobs_ptr + row)
        a = 0.0
        if a_ptr is not None:
            a = tl.load(a_ptr + slot)
        if b_ptr is not None:
            b = tl.load(b_ptr + slot)
            entropy = tl.load(entropy_ptr + row)
        if g_ptr is not None:
            g = 2.0 * tl.load(g_ptr + slot)
            sum_sq = tl.load(sum_sq_ptr + row)

        p_y = tl.exp2(logprob * LOG2E)
        dz_y = a * one_minus_exp(logprob)
        if b_ptr is not None:
            dz_y -= b * p_y * (logprob + entropy)
        if g_ptr is not None:
            dz_y += g * p_y * (p_y - sum_sq)
        _, slope_y = base2_logits(raw_ptr, bias_ptr, target, num_cols, tau, logit_scale, softcap)
        dlin_y = dz_y * slope_y * (logit_scale / tau)
        tl.store(residual_ptr + slot, dlin_y - dlin_y.to(dlin_ptr.dtype.element_ty).to(tl.float32))

        for start in range(0, num_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            z, slope = base2_logits(raw_ptr, bias_ptr, cols, num_cols, tau, logit_scale, softcap)
            log_p = (z - top) - log_s  # base 2
            p = tl.exp2(log_p)
            inner = -a
            if b_ptr is not None:
                inner = inner - b * (log_p * LN2 + entropy)
            if g_ptr is not None:
                inner = inner + g * (p - sum_sq)
            dlin = tl.where(cols == target, dlin_y, p * inner * slope * (logit_scale / tau))
            tl.store(dlin_ptr + cols, dlin.to(dlin_ptr.dtype.element_ty), mask=cols < num_cols)
    else:
        for start in range(0, num_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            zero = tl.zeros((BLOCK,), dlin_ptr.dtype.element_ty)
            tl.store(dlin_ptr + cols, zero, mask=cols < num_cols)
