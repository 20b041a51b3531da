"""Token losses in plain PyTorch.

`loss(logprobs, entropy, chunk) -> LossTerms`, run by `linear_grpo_loss` on (C,) vectors.

`chunk` maps a name to the chunk's rows of that entry of `token_data`. Bind knobs with functools.partial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class LossTerms(NamedTuple):
    loss: Tensor  # (C,) before the row's weight
    metrics: Mapping[str, Tensor] = {}  # name -> (C,); summed over rows, or their maximum where the name ends in _max


TokenLoss = Callable[[Tensor, Tensor | None, Mapping[str, Tensor]], LossTerms]


def grpo(
    logprobs: Tensor,
    entropy: Tensor | None,
    chunk: Mapping[str, Tensor],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> LossTerms:
    """Clipped policy loss -min(r A, clip(r) A) (PPO, arXiv 1707.06347; clip-higher as in DAPO, arXiv 2503.14476).

    Reads `advantages`, and `old_logprobs` (left out: on-policy, the ratio is exactly 1). The log-ratio is clamped to
    +-20.
    """
    old = chunk.get("old_logprobs", logprobs.detach())
    ratio, advantages = (logprobs - old).clamp(-20, 20).exp(), chunk["advantages"]
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    with torch.no_grad():
        clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return LossTerms(loss, {"clipped": clipped.float(), "ratio_max": ratio.detach()})
