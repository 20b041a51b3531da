"""LossParams into a token loss and the weight of every loss token. Pure functions.

Weights are taken once per optimiser step over all ranks, before packing, so that loss and gradient do not depend on
it: a micro-batch returns the sum of weight times loss and nothing else.

A row's route says what the ratio is taken to: a plain row is on-policy, its ratio is exactly 1. A rescued row was
sampled behind a prefix, and a drawn one with perturbed weights: their ratio is to the recorded log-probability (a drawn
row that is trained at its own draw is on-policy there).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from csrc_triton.losses import Chunk, LossTerms, TokenLoss, grpo
from e3fast.types import ROUTES, LossParams, Sample

DRAW, RESCUE = ROUTES.index("draw"), ROUTES.index("rescue")
MAX_LOG_RATIO = 20.0


def token_loss(loss: LossParams) -> TokenLoss:
    """Reads advantages; where they are in the chunk, routes; rollout_logprobs; with beta, ref_logprobs."""
    if loss.seq_mask is not None:
        return functools.partial(masked_loss, loss=loss)
    if loss.importance_sampling == "sequence":
        return functools.partial(sequence_corrected_loss, loss=loss)
    if loss.corrected:
        return functools.partial(corrected_loss, loss=loss)
    return functools.partial(policy_loss, loss=loss)


def policy_loss(
    logprobs: Tensor, entropy: Tensor | None, chunk: Mapping[str, Tensor], *, loss: LossParams
) -> LossTerms:
    data = dict(chunk)
    routes = data.get("routes")
    if routes is not None:
        data["old_logprobs"] = torch.where(
            off_policy(routes, loss), data["rollout_logprobs"].to(logprobs), logprobs.detach()
        )
    values, metrics = grpo(logprobs, entropy, data, clip_low=loss.clip_low, clip_high=loss.clip_high, beta=loss.beta)
    metrics = dict(metrics)
    if loss.rescue_shape and routes is not None:
        ratio = (logprobs - data["old_logprobs"]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        shaped = -data["advantages"] * ratio / (ratio + loss.rescue_shape)
        if loss.beta:
            shaped = shaped + loss.beta * k3(logprobs, data["ref_logprobs"])
        rescued = routes == RESCUE
        values = torch.where(rescued, shaped, values)
        metrics["clipped"] = metrics["clipped"].masked_fill(rescued, 0.0)
    if loss.beta:
        metrics["kl"] = k3(logprobs.detach(), data["ref_logprobs"])
    if loss.entropy_bonus:
        assert entropy is not None
        values = values - loss.entropy_bonus * entropy
    return LossTerms(values, metrics)


def corrected_loss(logprobs: Tensor, entropy: Tensor | None, chunk: Chunk, *, loss: LossParams) -> LossTerms:
    """`policy_loss` with each row's policy term weighted by learner / engine, and rows outside the band left out.

    Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"); the band is that of IcePop over tokens, of masked importance sampling over sequences. Rows
    whose ratio is to the engine's log-prob already (rescues; drawn rows trained at the mean) keep weight 1.
    """
    ratio = importance_ratio(logprobs.detach(), chunk, loss)
    data = {**chunk, "correction": ratio.clamp(max=loss.importance_cap)}
    terms = policy_loss(logprobs, entropy, data, loss=loss)
    metrics = {**terms.metrics, "capped": (ratio > loss.importance_cap).float()}
    if not loss.importance_band:
        return LossTerms(terms.loss, metrics)
    kept = in_band(ratio, loss.importance_band)
    return LossTerms(terms.loss * kept, metrics | {"kept_weight": chunk.weights * kept})


def sequence_corrected_loss(logprobs: Tensor, entropy: Tensor | None, chunk: Chunk, *, loss: LossParams) -> LossTerms:
    return corrected_loss(logprobs, entropy, chunk, loss=loss)


sequence_corrected_loss.scope = "sequence"


def importance_ratio(logprobs: Tensor, chunk: Chunk, loss: LossParams) -> Tensor:
    """learner / engine of each row, or of its whole sequence, (C,); 1 where it is corrected for already."""
    gaps = (logprobs - chunk["rollout_logprobs"].to(logprobs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if loss.importance_sampling == "sequence":
        assert chunk.seq_ids is not None
        totals = torch.zeros(chunk.num_seqs, dtype=gaps.dtype, device=gaps.device).index_add(0, chunk.seq_ids, gaps)
        gaps = totals.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[chunk.seq_ids]
    ratio = gaps.exp()
    return torch.where(off_policy(chunk["routes"], loss), 1.0, ratio) if "routes" in chunk else ratio


def off_policy(routes: Tensor, loss: LossParams) -> Tensor:
    """Rows whose ratio is to the recorded log-probability, (C,) bool."""
    return routes == RESCUE if loss.gradient_at == "draw" else routes != 0


def in_band(ratio: Tensor, band: float) -> Tensor:
    return (ratio >= 1 / band) & (ratio <= band)


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q - ln q - 1 with q = reference / policy (Schulman): an estimate of KL(policy || reference), never negative."""
    gap = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return gap.exp() - gap - 1


def masked_loss(logprobs: Tensor, entropy: Tensor | None, chunk: Chunk, *, loss: LossParams) -> LossTerms:
    """`policy_loss` without the drawn sequences whose ratio is out of the band; their weight is reported as missing."""
    terms = policy_loss(logprobs, entropy, chunk, loss=loss)
    if "routes" not in chunk:
        return LossTerms(terms.loss, {**terms.metrics, "kept_weight": chunk.weights})
    assert chunk.seq_ids is not None and loss.seq_mask is not None
    kept = keep_sequences(
        logprobs.detach(), chunk["rollout_logprobs"], chunk["routes"], chunk.seq_ids, chunk.num_seqs, loss.seq_mask
    )
    metrics = {**terms.metrics, **mask_metrics(kept, chunk["routes"], chunk.weights, chunk.seq_ids, chunk.num_seqs)}
    return LossTerms(terms.loss * kept, metrics)


masked_loss.scope = "sequence"


def keep_sequences(
    logprobs: Tensor, behaviour: Tensor, routes: Tensor, seq_ids: Tensor, num_seqs: int, band: float
) -> Tensor:
    """Whether each row's sequence stays, (C,) bool: drawn ones iff |sum of log-ratios| <= ln band, others always."""
    gaps = (logprobs - behaviour.to(logprobs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    totals = torch.zeros(num_seqs, dtype=gaps.dtype, device=gaps.device).index_add(0, seq_ids, gaps)
    return (totals.abs() <= math.log(band))[seq_ids] | (routes != DRAW)


def mask_metrics(kept: Tensor, routes: Tensor, weights: Tensor, seq_ids: Tensor, num_seqs: int) -> dict[str, Tensor]:
    """Rows that sum to: drawn sequences, those of them kept, and the loss weight of all rows kept."""
    lengths = torch.bincount(seq_ids, minlength=num_seqs)
    share = (routes == DRAW) / lengths[seq_ids]
    return {"drawn": share, "drawn_kept": share * kept, "kept_weight": weights * kept}


def loss_weights(samples: Sequence[Sample], loss: LossParams, max_new_tokens: int) -> list[float]:
    """Weight of one loss token of each sample; 0 for a sample without any.

    With the gradient at the draws, each draw has a loss of its own and the step takes their mean.
    """
    if loss.gradient_at == "mean":
        return weights_of_one_loss(samples, loss, max_new_tokens)
    draws = sorted({sample.draw for sample in samples if sample.num_loss_tokens})
    weights = [0.0] * len(samples)
    for draw in draws:
        own = [i for i, sample in enumerate(samples) if sample.draw == draw]
        found = weights_of_one_loss([samples[i] for i in own], loss, max_new_tokens)
        for i, weight in zip(own, found, strict=True):
            weights[i] = weight / len(draws)
    return weights


def weights_of_one_loss(samples: Sequence[Sample], loss: LossParams, max_new_tokens: int) -> list[float]:
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
