"""Kernels over kept sets: row statistics over gathered rows of W, and weighted sums of gathered rows.

Launched by `kept.py`. Letters: T rows, H hidden size, V vocabulary, N members of all sets together. Members stand row
by row; an id of V is one that was not in [0, V), and turns its row to nan.
"""

# ruff: noqa: ANN001, ANN201  (what a kernel takes has no Python type; comments say what it is)
from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # z of a banned id; finite, so that 0 * LOWEST is 0 and never nan


@triton.jit
def kept_stats_kernel(
    hidden_ptr,  # (T, hidden_stride)
    weight_ptr,  # (V, weight_stride)
    bias_ptr,  # (V,) or None
    temperature_ptr,  # (T,) fp32
    targets_ptr,  # (T,) int64
    indptr_ptr,  # (T + 1,) int64 members of row t: indptr[t] up to indptr[t + 1]
    ids_ptr,  # (N,) int64, each once in its row, the target among them
    z_ptr,  # (N,) fp32 out, the members' logits over temperature, in nats as all that follows
    logprobs_ptr,  # (T,) fp32 out, as the following
    lse_ptr,
    entropy_ptr,  # or None
    sum_sq_ptr,  # or None
    top_ptr,  # the largest z
    log_s_ptr,  # log of s = sum e^(z - top)
    num_cols,
    width,
    hidden_stride,
    weight_stride,
    logit_scale,
    softcap,  # or None
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Statistics of one row over its kept set, online over blocks of members.

    z comes out of a division, which no fused multiply-add can swallow: z - top of the likeliest member is 0 exactly, so
    a set of one has log-probability 0 and no gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    hidden_ptr += row * hidden_stride
    end = tl.load(indptr_ptr + row + 1)
    target = tl.load(targets_ptr + row)
    tau = tl.load(temperature_ptr + row)
    own = tl.zeros((BLOCK_K,), tl.float32)  # z at the target, 0 elsewhere
    top = float("-inf")
    s = 0.0
    t = 0.0
    q = 0.0
    for first in range(tl.load(indptr_ptr + row), end, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        listed = at < end
        ids = tl.load(ids_ptr + at, mask=listed, other=0)
        known = listed & (ids < num_cols)
        products = tl.zeros((BLOCK_K, BLOCK_H), tl.float32)
        for start in range(0, width, BLOCK_H):
            cols = start + tl.arange(0, BLOCK_H)
            x = tl.load(hidden_ptr + cols, mask=cols < width, other=0.0).to(tl.float32)
            inside = known[:, None] & (cols < width)[None, :]
            w = tl.load(weight_ptr + ids[:, None] * weight_stride + cols[None, :], mask=inside, other=0.0)
            products += w.to(tl.float32) * x[None, :]
        u = tl.sum(products, 1)
        if bias_ptr is not None:
            u += tl.load(bias_ptr + ids, mask=known, other=0.0).to(tl.float32)
        u *= logit_scale
        if softcap is not None:
            e = tl.exp(tl.abs(u) * (-2.0 / softcap))  # tanh by e^-2|x|: nothing overflows
            size = softcap * (1.0 - e) / (1.0 + e)
            u = tl.where(u < 0.0, -size, size)
        z = u / tau
        z = tl.where(z < LOWEST, LOWEST, z)
        z = tl.where(ids < num_cols, z, float("nan"))
        tl.store(z_ptr + at, z, mask=listed)

        new = tl.maximum(top, tl.max(tl.where(listed, z, float("-inf")), 0))
        fade = tl.exp(top - new)
        d = tl.where(listed, z - new, 0.0)
        e = tl.where(listed, tl.exp(d), 0.0)
        if entropy_ptr is not None:
            t = (t + s * tl.where(top == float("-inf"), 0.0, top - new)) * fade + tl.sum(e * d, 0)
        if sum_sq_ptr is not None:
            q = q * (fade * fade) + tl.sum(e * e, 0)
        s = s * fade + tl.sum(e, 0)
        top = new
        own += tl.where(listed & (ids == target), z, 0.0)
    log_s = tl.log(s)
    logprob = (tl.sum(own, 0) - top) - log_s  # pyright: ignore[reportOperatorIssue]
    tl.store(logprobs_ptr + row, tl.where(logprob > 0.0, 0.0, logprob))  # a minimum would hide nan
    tl.store(lse_ptr + row, top + log_s)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, log_s - t / s)
    if sum_sq_ptr is not None:
        tl.store(sum_sq_ptr + row, tl.div_rn(q, s * s))
    tl.store(top_ptr + row, top)
    tl.store(log_s_ptr + row, log_s)


@triton.jit
def weighted_sums_kernel(
    source_ptr,  # (num_sources, source_stride)
    index_ptr,  # (N,) int64 the row of source that an entry weighs
    weights_ptr,  # (N,) fp32; rows of weight 0 are not read
    indptr_ptr,  # (segments + 1,) int64 entries of a segment
    out_rows_ptr,  # (segments,) int64 rising: the row of out that a segment adds to; None: its own, written
    out_ptr,  # (num_outs, out_stride) fp32
    num_sources,
    num_outs,
    width,
    source_stride,
    out_stride,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One tile of columns of one segment's sum of weight x source row, entries in rising order."""
    tiles = tl.cdiv(width, BLOCK_H)
    segment = (tl.program_id(0) // tiles).to(tl.int64)
    cols = tl.program_id(0) % tiles * BLOCK_H + tl.arange(0, BLOCK_H)
    end = tl.load(indptr_ptr + segment + 1)
    products = tl.zeros((BLOCK_E, BLOCK_H), tl.float32)
    for first in range(tl.load(indptr_ptr + segment), end, BLOCK_E):
        at = first + tl.arange(0, BLOCK_E)
        index = tl.load(index_ptr + at, mask=at < end, other=0)
        weights = tl.load(weights_ptr + at, mask=at < end, other=0.0)
        inside = ((weights != 0.0) & (index < num_sources))[:, None] & (cols < width)[None, :]
        source = tl.load(source_ptr + index[:, None] * source_stride + cols[None, :], mask=inside, other=0.0)
        products += weights[:, None] * source.to(tl.float32)
    total = tl.sum(products, 0)
    if out_rows_ptr is not None:
        row = tl.load(out_rows_ptr + segment)
        inside = cols < tl.where(row < num_outs, width, 0)
        at = out_ptr + row * out_stride + cols
        tl.store(at, tl.load(at, mask=inside, other=0.0) + total, mask=inside)
    else:
        tl.store(out_ptr + segment * out_stride + cols, total, mask=cols < width)
