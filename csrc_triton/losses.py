"""Token losses in plain PyTorch: `loss(logprobs, entropy, chunk) -> LossTerms`, run by `linear_grpo_loss`.

`logprobs` and `entropy` are (C,) leaves of autograd, `chunk` the same rows of everything else. Bind knobs with
functools.partial. A loss whose gradient at a row depends on other rows says so in an attribute `scope`: "token" (the
default), "sequence" (needs cu_seqlens; a chunk then holds whole sequences) or "batch" (all rows at once, at the price
of a second product).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class LossTerms(NamedTuple):
    loss: Tensor  # (C,) before the row's weight
    metrics: Mapping[str, Tensor] = {}  # name -> (C,); summed over rows, or their maximum where the name ends in _max


class Chunk(Mapping[str, Tensor]):
    """Read-only: `chunk[name]` are the chunk's rows of that entry of `token_data`, (C, ...)."""

    def __init__(self, data: Mapping[str, Tensor], weights: Tensor, seq_ids: Tensor | None, num_seqs: int) -> None:
        self.data = data
        self.weights = weights  # (C,)
        self.seq_ids = seq_ids  # (C,) 0 .. num_seqs - 1, rising; None without cu_seqlens
        self.num_seqs = num_seqs

    def __getitem__(self, name: str) -> Tensor:
        return self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


TokenLoss = Callable[[Tensor, Tensor | None, Chunk], LossTerms]
SCOPES = ("token", "sequence", "batch")


def scope_of(token_loss: TokenLoss) -> str:
    """Of the loss itself, under any functools.partial."""
    inner: Any = token_loss
    while isinstance(inner, functools.partial) and not hasattr(inner, "scope"):
        inner = inner.func
    scope = getattr(inner, "scope", "token")
    if scope not in SCOPES:
        raise ValueError(f"token_loss.scope must be one of {', '.join(SCOPES)}; got {scope!r}")
    return scope


def grpo(
    logprobs: Tensor,
    entropy: Tensor | None,
    chunk: Mapping[str, Tensor],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
) -> LossTerms:
    """Clipped policy loss -w min(r A, clip(r) A) (PPO, arXiv 1707.06347; clip-higher as in DAPO, arXiv 2503.14476).

    Reads `advantages`; `old_logprobs` (left out: on-policy, the ratio is exactly 1); `correction`, a weight w without
    gradient; and with `beta` `ref_logprobs`, for beta times the k3 estimate of KL(policy || reference). `delta` caps
    the ratio in the unclipped branch. Log-ratios are clamped to +-20.
    """
    old = chunk.get("old_logprobs", logprobs.detach())
    ratio, advantages = (logprobs - old).clamp(-20, 20).exp(), chunk["advantages"]
    first = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.min(first * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if "correction" in chunk:
        loss = loss * chunk["correction"]
    if beta:
        gap = (chunk["ref_logprobs"] - logprobs).clamp(-20, 20)
        loss = loss + beta * (gap.exp() - gap - 1)
    with torch.no_grad():
        clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return LossTerms(loss, {"clipped": clipped.float(), "ratio_max": ratio.detach()})
