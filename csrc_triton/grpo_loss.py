"""Clipped policy loss and its counters over (T,) vectors. Twin: `reference.grpo_loss`."""

from __future__ import annotations

import torch
from torch import Tensor

KL_KINDS = ("k1", "k2", "k3")


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
    selected away before any exp. ValueError names argument, value and what is allowed.
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
    mask = loss_mask.bool()
    lp, old, adv = logprobs[mask], old_logprobs[mask], advantages[mask]
    weight = correction[mask] if correction is not None else 1.0
    log_ratio = lp - old
    ratio = log_ratio.clamp(-20, 20).exp()
    first = ratio if delta is None else ratio.clamp(max=delta)
    loss = -weight * torch.min(first * adv, ratio.clamp(1 - clip_low, 1 + clip_high) * adv)
    kl_ref = torch.zeros_like(lp)
    if beta and ref_logprobs is not None:
        kl_ref = kl_estimate(lp, ref_logprobs[mask], kl)
        loss = loss + beta * kl_ref
    with torch.no_grad():
        counters = count(ratio, log_ratio, adv, loss, kl_ref, clip_low, clip_high, delta)
    return loss.sum() / num_tokens, counters


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference), after J. Schulman's note "Approximating KL divergence" (2020)."""
    gap = (ref_logprobs - logprobs).clamp(-20, 20)
    return {"k1": lambda: -gap, "k2": lambda: gap.square() / 2, "k3": lambda: gap.exp() - gap - 1}[kind]()


def count(
    ratio: Tensor,
    log_ratio: Tensor,
    adv: Tensor,
    loss: Tensor,
    kl_ref: Tensor,
    low: float,
    high: float,
    delta: float | None,
) -> dict[str, Tensor]:
    num = torch.tensor(float(ratio.numel()), device=ratio.device)
    total, square = ratio.sum(), ratio.square().sum()
    capped = (adv < 0) & (ratio > delta) if delta is not None else torch.zeros_like(adv, dtype=torch.bool)
    largest = lambda x: x.max() if x.numel() else x.new_zeros(())  # noqa: E731
    return {
        "tokens": num,
        "clipped_low": ((adv < 0) & (ratio < 1 - low)).sum().float(),
        "clipped_high": ((adv > 0) & (ratio > 1 + high)).sum().float(),
        "clipped_delta": capped.sum().float(),
        "ratio_sum": total,
        "ratio_sq_sum": square,
        "ratio_max": largest(ratio),
        "abs_log_ratio_max": largest(log_ratio.abs()),
        "kl_ref": kl_ref.sum(),
        "kl_old_k1": -log_ratio.sum(),
        "kl_old_k3": (ratio - 1 - log_ratio.clamp(-20, 20)).sum(),
        "ess": total.square() / (num * square).clamp(min=1e-30),
        "nonfinite": (~loss.isfinite()).sum().float(),
    }
