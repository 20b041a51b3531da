"""Vectors for the clipped policy loss: ratios inside, outside and far outside every clip, both signs of advantage."""

import torch

from csrc_triton import reference
from tests.csrc_triton.inputs import draws

KNOBS = {
    "plain": {},
    "asymmetric clip": {"clip_low": 0.1, "clip_high": 0.4},
    "correction": {"correction": True},
    "delta above the clip": {"delta": 1.5},
    "delta inside the clip": {"delta": 1.05, "correction": True},
    "k1": {"kl": "k1", "beta": 0.1},
    "k2": {"kl": "k2", "beta": 0.1},
    "k3": {"kl": "k3", "beta": 0.1},
    "all": {"kl": "k3", "beta": 0.7, "correction": True, "delta": 2.0, "clip_low": 0.3},
}


def vectors(t, knobs, seed=0):
    """(logprobs, old, advantages, mask) of t tokens in fp64, exact in fp32, and the keyword arguments."""
    draw = draws(seed)
    number = lambda scale: (scale * draw(t)).float().double()  # noqa: E731
    logprobs = -number(2.0).abs()
    old = logprobs + number(0.4)
    far = torch.arange(t) % 5 == 3  # log-ratios up to +-100: clamped, without gradient
    old = torch.where(far, logprobs - number(40.0).clamp(-100, 100), old).float().double()
    advantages = number(1.0)
    advantages[torch.arange(t) % 7 == 2] = 0.0
    mask = torch.arange(t) % 4 != 1
    chosen = dict(knobs)
    if chosen.pop("correction", False):
        chosen["correction"] = number(1.0).abs()
    if "beta" in chosen:
        chosen["ref_logprobs"] = (
            torch.where(far.roll(1), logprobs + number(40.0), logprobs + number(0.5)).float().double()
        )
    return (logprobs, old, advantages, mask), chosen


def twin(rows, knobs, num_tokens):
    """Loss and gradient by autograd of the twin, in the type of the rows."""
    leaf = rows[0].clone().requires_grad_()
    loss, counters = reference.grpo_loss(leaf, *rows[1:], num_tokens=num_tokens, **knobs)
    (grad,) = torch.autograd.grad(loss, leaf) if loss.requires_grad else (torch.zeros_like(leaf),)
    return loss.detach(), grad, counters


def counted(rows, knobs):
    """Counters by their definitions, token by token."""
    (lp, old, adv, mask), delta = rows, knobs.get("delta")
    low, high = 1 - knobs.get("clip_low", 0.2), 1 + knobs.get("clip_high", 0.2)
    live = [t for t in range(len(lp)) if mask[t]]
    gaps = {t: float(lp[t] - old[t]) for t in live}
    ratio = {t: float(torch.tensor(min(20.0, max(-20.0, gaps[t])), dtype=torch.float64).exp()) for t in live}
    total, square = sum(ratio.values()), sum(r * r for r in ratio.values())
    kl = 0.0
    if "ref_logprobs" in knobs:
        d = (knobs["ref_logprobs"] - lp)[mask].clamp(-20, 20)
        kl = float({"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[knobs.get("kl", "k3")].sum())
    return {
        "tokens": len(live),
        "clipped_low": sum(adv[t] < 0 and ratio[t] < low for t in live),
        "clipped_high": sum(adv[t] > 0 and ratio[t] > high for t in live),
        "clipped_delta": sum(delta is not None and adv[t] < 0 and ratio[t] > delta for t in live),
        "ratio_sum": total,
        "ratio_sq_sum": square,
        "kl_ref": kl,
        "kl_old_k1": -sum(gaps.values()),
        "kl_old_k3": sum(ratio[t] - 1 - min(20.0, max(-20.0, gaps[t])) for t in live),
        "nonfinite": 0,
        "ratio_max": max(ratio.values(), default=0.0),
        "abs_log_ratio_max": max((abs(gap) for gap in gaps.values()), default=0.0),
        "ess": total**2 / max(len(live) * square, 1e-30),
    }


def edges(dtype):
    """Every kind of tie, exact in any float type: r = 1 on both clips and on delta, log-ratios of exactly +-20."""
    gap = torch.tensor([0.0, 0.0, 0.0, 20.0, -20.0, 20.0, -20.0, 20.001, -20.001, 100.0, -100.0], dtype=dtype)
    advantages = torch.tensor([1.0, -1.0, 0.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0, -2.0, 2.0], dtype=dtype)
    old = torch.zeros_like(gap)
    return (gap, old, advantages, torch.ones(len(gap), dtype=torch.bool))


EDGE_KNOBS = [
    {},
    {"clip_low": 0.0, "clip_high": 0.0},
    {"clip_high": 0.0},
    {"clip_low": 0.0},
    {"delta": 1.0},
    {"delta": 1.0, "clip_low": 0.0, "clip_high": 0.0},
    {"delta": 3.0, "clip_high": 2.0},
]
