"""Clipped policy loss and its counters over (T,) vectors: one kernel on CUDA, one pass of vectors elsewhere.

With r = e^(logprob - old), A the advantage, w a correction and d = ref - logprob, the loss of a token is

    -w min(min(r, delta) A, clip(r, 1 - low, 1 + high) A) + beta KL,    KL = -d | d^2 / 2 | e^d - d - 1

(PPO, arXiv 1707.06347; two-sided clip as in INTELLECT-2, arXiv 2505.07291; KL after J. Schulman's note
"Approximating KL divergence", 2020). The forward also leaves each token's gradient, so the backward is one multiply.
Log-ratios and d are clamped to +-20, with gradient 0 outside. At a tie the gradient is the one autograd gives min and
clamp. Twin: `reference.grpo_loss`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_triton.launch import has_triton

KL_KINDS = ("k1", "k2", "k3")
LIMIT = 20.0  # e^20 is far beyond every clip and far from overflow
BLOCK = 1024  # tokens of a program
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}  # of both kernels
COUNTERS = (
    "tokens",
    "clipped_low",  # A < 0 and r < 1 - low
    "clipped_high",  # A > 0 and r > 1 + high
    "clipped_delta",  # A < 0 and r > delta
    "ratio_sum",
    "ratio_sq_sum",
    "kl_ref",  # sum of the estimates to the reference
    "kl_old_k1",  # sum of old - logprob
    "kl_old_k3",  # sum of r - 1 - log r
    "nonfinite",  # tokens whose loss is nan or infinite
    "ratio_max",
    "abs_log_ratio_max",  # before the clamp
    "ess",  # (sum r)^2 / (tokens sum r^2), between 0 and 1
)


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    correction: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    kl: str = "k3",
    num_tokens: float | Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of token losses over masked rows divided by `num_tokens`, and counters; differentiable in `logprobs`.

    All vectors are (T,); `correction` multiplies the policy term (importance weight, no gradient); `delta` caps the
    ratio in the unclipped branch; `beta` weighs the KL estimate to `ref_logprobs` (k1, k2 or k3). Masked rows are
    selected away before any exp. Counters are 0-d fp32 on the device of `logprobs`, see `COUNTERS`. No tokens: loss 0.
    ValueError names argument, value and what is allowed.
    """
    vectors = {"old_logprobs": old_logprobs, "advantages": advantages, "loss_mask": loss_mask}
    vectors |= {"ref_logprobs": ref_logprobs, "correction": correction}
    for name, value in vectors.items():
        if value is not None and value.shape != logprobs.shape:
            raise ValueError(f"{name} must be {tuple(logprobs.shape)} like logprobs, got {tuple(value.shape)}")
    if kl not in KL_KINDS:
        raise ValueError(f"kl must be one of {', '.join(KL_KINDS)}; got {kl!r}")
    if beta and ref_logprobs is None:
        raise ValueError(f"beta = {beta} needs ref_logprobs")
    if not isinstance(num_tokens, Tensor) and not 0 <= num_tokens < math.inf:
        raise ValueError(f"num_tokens must be >= 0 and finite, got {num_tokens}")
    total, _, counters = torch.ops.e3fast.grpo_loss(
        logprobs, old_logprobs, advantages, loss_mask, ref_logprobs, correction, clip_low, clip_high, delta, beta, kl
    )
    # 0 tokens must give 0, not 0 / 0; tokens that were not counted still show up, as infinity
    smallest = torch.finfo(total.dtype).tiny
    if isinstance(num_tokens, Tensor):
        num_tokens = num_tokens.detach().to(total.dtype).clamp(min=smallest)
    else:
        num_tokens = max(num_tokens, smallest)
    return total / num_tokens, dict(zip(COUNTERS, counters.detach().unbind(), strict=True))


class Tokens(NamedTuple):
    """Vectors of one shape."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    ref: Tensor | None
    correction: Tensor | None


class Knobs(NamedTuple):
    low: float  # bounds of the ratio
    high: float
    delta: float | None
    beta: float
    kl: str


def compute_dtype(logprobs: Tensor) -> torch.dtype:
    return torch.float64 if logprobs.dtype == torch.float64 else torch.float32


@torch.library.custom_op(
    "e3fast::grpo_loss",
    mutates_args=(),
    schema="(Tensor logprobs, Tensor old, Tensor advantages, Tensor mask, Tensor? ref, Tensor? correction, "
    "float clip_low, float clip_high, float? delta, float beta, str kl) -> (Tensor, Tensor, Tensor)",
)
def grpo_loss_op(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref: Tensor | None,
    correction: Tensor | None,
    clip_low: float,
    clip_high: float,
    delta: float | None,
    beta: float,
    kl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of token losses (), each token's gradient (T,), counters (13,) fp32."""
    tokens = Tokens(logprobs, old, advantages, mask, ref, correction)
    knobs = Knobs(1 - clip_low, 1 + clip_high, delta, beta, kl)
    on_kernel = logprobs.device.type == "cuda" and logprobs.dtype != torch.float64 and has_triton()
    return launch_forward(tokens, knobs) if on_kernel else torch_forward(tokens, knobs)


@grpo_loss_op.register_fake
def _(logprobs: Tensor, *_rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(logprobs)
    counters = logprobs.new_empty(len(COUNTERS), dtype=torch.float32)
    return logprobs.new_empty((), dtype=dtype), logprobs.new_empty(logprobs.shape, dtype=dtype), counters


@torch.library.custom_op("e3fast::grpo_loss_backward", mutates_args=(), schema="(Tensor grad, Tensor slopes) -> Tensor")
def grpo_loss_backward_op(grad: Tensor, slopes: Tensor) -> Tensor:
    """An op of its own, without a formula for autograd: a second derivative raises."""
    return slopes * grad


@grpo_loss_backward_op.register_fake
def _(grad: Tensor, slopes: Tensor) -> Tensor:
    return torch.empty_like(slopes)


def keep_slopes(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)


def multiply_slopes(ctx: Any, grad: Tensor | None, *_unused: Tensor | None) -> tuple[Tensor | None, ...]:
    (slopes,) = ctx.saved_tensors
    grad = torch.ops.e3fast.grpo_loss_backward(grad, slopes).to(ctx.dtype) if grad is not None else None
    return (grad, *(None,) * 10)


grpo_loss_op.register_autograd(multiply_slopes, setup_context=keep_slopes)


def launch_forward(tokens: Tokens, knobs: Knobs) -> tuple[Tensor, Tensor, Tensor]:
    """The op by two kernels, without a device sync."""
    from csrc_triton.grpo_kernels import NUM_PARTIALS, sum_blocks_kernel, token_loss_kernel

    num_tokens = tokens.logprobs.numel()
    num_blocks = (num_tokens + BLOCK - 1) // BLOCK
    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=tokens.logprobs.device)  # noqa: E731
    slopes, partials = new(*tokens.logprobs.shape), new(NUM_PARTIALS.value, num_blocks)
    loss, counters = new(), new(len(COUNTERS))
    mask = tokens.mask.view(torch.uint8) if tokens.mask.dtype == torch.bool else tokens.mask
    vectors = Tokens(*(x.contiguous() if x is not None else None for x in tokens._replace(mask=mask)))  # pyright: ignore[reportArgumentType]
    with torch.cuda.device_of(slopes):
        if num_blocks:
            token_loss_kernel[(num_blocks,)](
                *vectors,
                slopes,
                partials,
                num_tokens,
                num_blocks,
                knobs.low,
                knobs.high,
                knobs.delta,
                knobs.beta if knobs.beta else None,
                **{"KL": KL_KINDS.index(knobs.kl) + 1, "LIMIT": LIMIT, "BLOCK": BLOCK, **OPTIONS},
            )
        sum_blocks_kernel[(1,)](partials, loss, counters, num_blocks, **{"BLOCK": 256, **OPTIONS})
    return loss, slopes, counters


def torch_forward(tokens: Tokens, knobs: Knobs) -> tuple[Tensor, Tensor, Tensor]:
    """The op on vectors of the live tokens alone."""
    low, high, delta, beta, kl = knobs
    live, dtype = torch.nonzero(tokens.mask.flatten())[:, 0], compute_dtype(tokens.logprobs)
    lp, old, adv = (x.flatten()[live].to(dtype) for x in (tokens.logprobs, tokens.old, tokens.advantages))
    weight = -tokens.correction.flatten()[live].to(dtype) if tokens.correction is not None else -1.0
    log_ratio = lp - old
    far = log_ratio.abs()
    clamped = log_ratio.clamp(-LIMIT, LIMIT)
    ratio = clamped.exp()
    first, second = ratio if delta is None else ratio.clamp(max=delta), ratio.clamp(low, high)
    first_term, second_term = first * adv, second * adv
    loss = torch.minimum(first_term, second_term).mul_(weight)
    # autograd of min: the smaller branch takes the gradient, halves where they tie, both where one is nan
    share = (first_term == second_term).to(dtype).mul_(-0.5).add_(1.0)
    no_first, no_second = first_term > second_term, (first_term < second_term) | (second != ratio)
    if delta is not None:
        no_first |= first != ratio
    slope = share.masked_fill(no_first, 0.0).add_(share.masked_fill_(no_second, 0.0))
    slope.masked_fill_(far > LIMIT, 0.0).mul_(ratio).mul_(weight * adv)
    kl_ref = torch.zeros_like(lp)
    if tokens.ref is not None:
        kl_ref, kl_slope = kl_estimate(tokens.ref.flatten()[live].to(dtype) - lp, kl)
        if beta:
            loss, slope = loss + beta * kl_ref, slope + beta * kl_slope
    capped = (adv < 0) & (ratio > delta) if delta is not None else adv.new_zeros(())
    largest = lambda x: x.max() if x.numel() else x.new_zeros(())  # noqa: E731
    num, total, square = loss.new_tensor(float(lp.numel())), ratio.sum(), ratio.square().sum()
    counters = (
        num,
        ((adv < 0) & (ratio < low)).sum(),
        ((adv > 0) & (ratio > high)).sum(),
        capped.sum(),
        total,
        square,
        kl_ref.sum(),
        -log_ratio.sum(),
        (ratio - 1 - clamped).sum(),
        (~loss.isfinite()).sum(),
        largest(ratio),
        largest(far),
        total.square() / (num * square).clamp(min=1e-30),
    )
    slopes = torch.zeros(tokens.mask.shape, dtype=dtype, device=live.device)
    slopes.view(-1)[live] = slope
    return loss.sum(), slopes, torch.stack([x.to(torch.float32) for x in counters])


def kl_estimate(gap: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Estimate of KL(policy || reference) from gap = ref - logprob, and its derivative by the logprob."""
    bounded = gap.clamp(-LIMIT, LIMIT)
    if kind == "k1":
        value, slope = -bounded, 1.0 + 0.0 * bounded  # nan where the gap is
    elif kind == "k2":
        value, slope = bounded.square() / 2, -bounded
    else:
        value, slope = torch.expm1(bounded) - bounded, -torch.expm1(bounded)
    return value, slope.masked_fill(gap.abs() > LIMIT, 0.0)
