"""LossParams into a token loss and the weight of every loss token. Pure functions.

Weights are taken once per optimiser step over all ranks, before packing, so that loss and gradient do not depend on
it: a micro-batch returns the sum of weight times loss and nothing else.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

from csrc_triton.losses import TokenLoss, grpo
from e3fast.types import LossParams, Sample


def token_loss(loss: LossParams) -> TokenLoss:
    return functools.partial(grpo, clip_low=loss.clip_low, clip_high=loss.clip_high)


def loss_weights(samples: Sequence[Sample], loss: LossParams, max_new_tokens: int) -> list[float]:
    """Weight of one loss token of each sample; 0 for a sample without any."""
    tokens = [sample.num_loss_tokens for sample in samples]
    group_size = Counter(sample.group for sample, c in zip(samples, tokens, strict=True) if c)
    num_groups, num_sequences = len(group_size), group_size.total()
    if not num_sequences:
        return [0.0] * len(samples)
    mean_size = num_sequences / num_groups

    def weight(sample: Sample, c: int) -> float:
        """Share of the step's loss one token of this sample has, up to a common factor."""
        if loss.aggregation == "sequence":
            return 1 / (c * num_sequences)
        if loss.aggregation == "group":
            return 1 / (c * group_size[sample.group] * num_groups)
        if loss.aggregation == "constant":
            return 1 / (num_sequences * max_new_tokens)
        return 1.0 if loss.group_weight == "token" else mean_size / group_size[sample.group]

    raw = [weight(sample, c) if c else 0.0 for sample, c in zip(samples, tokens, strict=True)]
    if loss.aggregation != "token":
        return raw
    norm = sum(w * c for w, c in zip(raw, tokens, strict=True))
    return [w / norm for w in raw]
