"""The clipped policy loss over (T,) vectors: loss, gradient and counters in one pass. Launched by `grpo_loss.py`.

Sums come in two stages of fixed order: a program adds up its block of tokens, then one program the blocks. No atomics.
"""

# ruff: noqa: ANN001, ANN201  (what a kernel takes has no Python type; comments say what it is)
from __future__ import annotations

import triton
import triton.language as tl

NUM_SUMS = tl.constexpr(11)  # of a block: the loss and ten counters; two maxima follow
NUM_PARTIALS = tl.constexpr(13)
RATIO_SUM = tl.constexpr(5)  # places among the partials
RATIO_SQ_SUM = tl.constexpr(6)


@triton.jit
def clamp(x, low, high):
    """nan stays nan, which a minimum or maximum would swallow."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def token_loss_kernel(
    logprobs_ptr,  # (T,), as the following; any float type
    old_ptr,
    advantages_ptr,
    mask_ptr,  # (T,) 0: nothing of the token is read
    ref_ptr,  # or None
    correction_ptr,  # or None
    coefficients_ptr,  # (T,) out: d(sum of losses)/d(logprobs), 0 where masked
    partials_ptr,  # (13, blocks) fp32 out
    num_tokens,
    num_blocks,
    low,  # 1 - clip_low
    high,  # 1 + clip_high
    delta,  # cap of the ratio in the unclipped branch, or None
    beta,  # or None: the KL estimate is counted but not in the loss
    KL: tl.constexpr,  # 1, 2 or 3
    LIMIT: tl.constexpr,  # a log-ratio beyond it is clamped and has no gradient
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = tl.load(mask_ptr + at, mask=at < num_tokens, other=0) != 0
    log_ratio = tl.load(logprobs_ptr + at, mask=live, other=0.0).to(tl.float32)
    if ref_ptr is not None:
        gap = tl.load(ref_ptr + at, mask=live, other=0.0).to(tl.float32) - log_ratio
    log_ratio -= tl.load(old_ptr + at, mask=live, other=0.0).to(tl.float32)
    advantage = tl.load(advantages_ptr + at, mask=live, other=0.0).to(tl.float32)
    clamped = clamp(log_ratio, -LIMIT, LIMIT)
    ratio = tl.exp(clamped)

    first = ratio
    first_slope = 1.0
    if delta is not None:
        first = tl.where(ratio > delta, delta, ratio)
        first_slope = tl.where(ratio > delta, 0.0, 1.0)
    second_slope = tl.where((ratio < low) | (ratio > high), 0.0, 1.0)
    first_term = first * advantage
    second_term = clamp(ratio, low, high) * advantage
    # autograd of min: the smaller branch takes the gradient, halves where they tie, both where one is nan
    share = tl.where(first_term == second_term, 0.5, 1.0)
    slope = tl.where(first_term > second_term, 0.0, share * first_slope)
    slope += tl.where(first_term < second_term, 0.0, share * second_slope)
    slope = tl.where(tl.abs(log_ratio) > LIMIT, 0.0, slope)
    weight = -1.0
    if correction_ptr is not None:
        weight = -tl.load(correction_ptr + at, mask=live, other=0.0).to(tl.float32)
    loss = weight * tl.where(first_term < second_term, first_term, second_term)
    coefficient = weight * advantage * (slope * ratio)

    kl = tl.zeros((BLOCK,), tl.float32)
    if ref_ptr is not None:
        bounded = clamp(gap, -LIMIT, LIMIT)
        if KL == 1:
            kl = -bounded
            kl_slope = 1.0 + 0.0 * bounded  # nan where the gap is
        elif KL == 2:
            kl = 0.5 * bounded * bounded
            kl_slope = -bounded
        else:
            grown = tl.exp(bounded)
            kl = grown - bounded - 1.0
            kl_slope = 1.0 - grown
        if beta is not None:
            loss += beta * kl
            coefficient += beta * tl.where(tl.abs(gap) > LIMIT, 0.0, kl_slope)
    tl.store(coefficients_ptr + at, tl.where(live, coefficient, 0.0), mask=at < num_tokens)

    out = partials_ptr + block
    clipped_delta = tl.zeros((BLOCK,), tl.float32)
    if delta is not None:
        clipped_delta = tl.where((advantage < 0) & (ratio > delta), 1.0, 0.0)
    counted = tl.where(live, ratio, 0.0)  # of a masked token the ratio is 1, everything else 0
    tl.store(out, tl.sum(loss, 0))
    tl.store(out + num_blocks, tl.sum(tl.where(live, 1.0, 0.0), 0))
    tl.store(out + 2 * num_blocks, tl.sum(tl.where((advantage < 0) & (ratio < low), 1.0, 0.0), 0))
    tl.store(out + 3 * num_blocks, tl.sum(tl.where((advantage > 0) & (ratio > high), 1.0, 0.0), 0))
    tl.store(out + 4 * num_blocks, tl.sum(clipped_delta, 0))
    tl.store(out + 5 * num_blocks, tl.sum(counted, 0))
    tl.store(out + 6 * num_blocks, tl.sum(counted * counted, 0))
    tl.store(out + 7 * num_blocks, tl.sum(kl, 0))
    tl.store(out + 8 * num_blocks, tl.sum(-log_ratio, 0))
    tl.store(out + 9 * num_blocks, tl.sum(ratio - 1.0 - clamped, 0))
    tl.store(out + 10 * num_blocks, tl.sum(tl.where(tl.abs(loss) < float("inf"), 0.0, 1.0), 0))
    tl.store(out + 11 * num_blocks, tl.max(counted, 0))
    tl.store(out + 12 * num_blocks, tl.max(tl.abs(log_ratio), 0))


@triton.jit
def sum_blocks_kernel(
    partials_ptr,  # (13, blocks) fp32, as token_loss_kernel left them
    loss_ptr,  # () out
    counters_ptr,  # (13,) out: the other partials added up, then the effective sample size
    num_blocks,
    BLOCK: tl.constexpr,
):
    """The blocks' partials in rising order, by one program."""
    which = tl.arange(0, 16)
    tile_sums = tl.zeros((16, BLOCK), tl.float32)
    tile_maxima = tl.zeros((16, BLOCK), tl.float32)
    for start in range(0, num_blocks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (which < NUM_PARTIALS)[:, None] & (at < num_blocks)[None, :]
        part = tl.load(partials_ptr + which[:, None] * num_blocks + at[None, :], mask=inside, other=0.0)
        tile_sums += part
        tile_maxima = tl.maximum(tile_maxima, part)
    sums = tl.sum(tile_sums, 1)
    maxima = tl.max(tile_maxima, 1)
    ratio_sum = tl.sum(tl.where(which == RATIO_SUM, sums, 0.0), 0)
    ratio_sq_sum = tl.sum(tl.where(which == RATIO_SQ_SUM, sums, 0.0), 0)
    tokens = tl.sum(tl.where(which == 1, sums, 0.0), 0)
    maxima = tl.where(ratio_sum == ratio_sum, maxima, float("nan"))  # a maximum would hide nan
    found = tl.where(which < NUM_SUMS, sums, maxima)
    tl.store(loss_ptr + which, found, mask=which == 0)
    tl.store(counters_ptr + which - 1, found, mask=(which > 0) & (which < NUM_PARTIALS))
    tl.store(counters_ptr + NUM_PARTIALS - 1, ratio_sum * ratio_sum / tl.maximum(tokens * ratio_sq_sum, 1e-30))
