"""What a step's micro-batches add up to, fp64: metrics travel as (sum, count), never as means of means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from csrc_triton.losses import Chunk
from e3fast.objective import (
    DRAW,
    MAX_LOG_RATIO,
    RESCUE,
    importance_ratio,
    in_band,
    keep_sequences,
    mask_metrics,
)
from e3fast.types import FloatArray, LossParams, MicroBatch, StepStats


@dataclass
class Totals:
    loss: float = 0.0
    entropy: float = 0.0
    entropy_tokens: int = 0
    gap: float = 0.0
    gap_max: float = 0.0
    gap_tokens: int = 0
    gap_kl: float = 0.0
    ratio: float = 0.0  # sum of policy / engine over the same tokens, and of its square
    ratio_square: float = 0.0
    capped: float = 0.0
    corrected_tokens: int = 0
    banded: bool = False
    loss_tokens: int = 0
    clipped: float = 0.0
    ratio_max: float = 0.0
    kl: float = 0.0
    kl_tokens: int = 0
    drawn: float = 0.0  # drawn sequences that the mask looked at
    drawn_kept: float = 0.0
    kept_weight: float = 0.0  # loss weight of the rows that the mask kept
    probe: tuple[float, float] = (math.nan, math.nan)
    tokens: dict[str, int] = field(default_factory=lambda: {"trained": 0, "scored": 0})
    seconds: dict[str, tuple[float, ...]] = field(default_factory=lambda: {"trained": (), "scored": ()})
    latents: dict[int, FloatArray] = field(default_factory=dict)  # sample -> (256,)

    def add(self, micro_batch: MicroBatch, rows: Tensor, logprobs: Tensor, entropy: Tensor, kind: str) -> None:
        counted, asked = micro_batch.entropy_mask[rows], micro_batch.loss_mask[rows]
        self.entropy += float(entropy[counted].double().sum())
        self.entropy_tokens += int(counted.sum())
        self.loss_tokens += int(asked.sum())
        gap = (logprobs - micro_batch.rollout_logprobs[rows])[asked & comparable(micro_batch)[rows]].double()
        self.add_gap(gap)
        self.tokens[kind] += micro_batch.num_tokens

    def add_gap(self, gap: Tensor) -> None:
        """policy - engine of tokens whose log-probs should be the same, (n,)."""
        if not len(gap):
            return
        cut = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = cut.exp()
        sums = [gap.abs().sum(), gap.abs().max(), (ratio - cut - 1).sum(), ratio.sum(), ratio.square().sum()]
        total, largest, kl, ratios, squares = torch.stack(sums).tolist()  # one wait for the device, not five
        self.gap += total
        self.gap_max = max(self.gap_max, largest)
        self.gap_tokens += len(gap)
        self.gap_kl += kl
        self.ratio += ratios
        self.ratio_square += squares

    def add_loss(self, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        self.loss += float(loss)
        self.clipped += float(metrics.get("clipped", 0.0))
        self.ratio_max = max(self.ratio_max, float(metrics.get("ratio_max", 0.0)))
        if "kl" in metrics:
            self.kl += float(metrics["kl"])
            self.kl_tokens += int(metrics["num_rows"])
        if "capped" in metrics:
            self.capped += float(metrics["capped"])
            self.corrected_tokens += int(metrics["num_rows"])
        self.add_mask(metrics)

    def add_mask(self, metrics: Mapping[str, Tensor]) -> None:
        self.drawn += float(metrics.get("drawn", 0.0))
        self.drawn_kept += float(metrics.get("drawn_kept", 0.0))
        self.kept_weight += float(metrics.get("kept_weight", 0.0))
        self.banded |= "kept_weight" in metrics and "drawn" not in metrics

    def mask_scored(self, micro_batch: MicroBatch, rows: Tensor, logprobs: Tensor, loss: LossParams) -> None:
        """The mask over rows without a backward pass: a sequence that leaves the loss leaves the normaliser too."""
        asked = torch.nonzero(micro_batch.loss_mask[rows])[:, 0]
        if not len(asked):
            return
        rows, logprobs = rows[asked], logprobs[asked]
        ids = torch.unique_consecutive(segment_of(micro_batch, rows), return_inverse=True)[1]
        routes, num, weights = micro_batch.routes[rows], int(ids[-1]) + 1, micro_batch.loss_weights[rows]
        recorded = micro_batch.rollout_logprobs[rows]
        if loss.seq_mask is not None:
            kept = keep_sequences(logprobs, recorded, routes, ids, num, loss.seq_mask)
            metrics = mask_metrics(kept, routes, weights, ids, num)
        else:
            chunk = Chunk({"rollout_logprobs": recorded, "routes": routes}, weights, ids, num)
            metrics = {"kept_weight": weights * in_band(importance_ratio(logprobs, chunk, loss), loss.importance_band)}
        self.add_mask({name: value.double().sum() for name, value in metrics.items()})

    def stats(
        self, grad_norm: float, stepped: bool, num_classes: int, latents: Mapping[str, FloatArray] | None = None
    ) -> StepStats:
        share = lambda total, count: total / count if count else math.nan  # noqa: E731
        return StepStats(
            loss=self.loss,
            entropy=share(self.entropy, self.entropy_tokens),
            entropy_tokens=self.entropy_tokens,
            num_classes=num_classes,
            entropy_at_one=self.probe[0],
            elasticity=self.probe[1],
            grad_norm=grad_norm,
            ratio_max=self.ratio_max,
            clip_share=share(self.clipped, self.loss_tokens),
            mismatch_mean=share(self.gap, self.gap_tokens),
            mismatch_max=self.gap_max,
            mismatch_kl=share(self.gap_kl, self.gap_tokens),
            effective_sample_share=share(self.ratio**2, self.gap_tokens * self.ratio_square),
            importance_capped=share(self.capped, self.corrected_tokens),
            importance_kept=self.kept_weight if self.banded else math.nan,
            kl=share(self.kl, self.kl_tokens),
            keep_rate=share(self.drawn_kept, self.drawn),
            trained_tokens=self.tokens["trained"],
            scored_tokens=self.tokens["scored"],
            trained_seconds=self.seconds["trained"],
            scored_seconds=self.seconds["scored"],
            stepped=stepped,
            latents=latents or {},
        )


def comparable(micro_batch: MicroBatch) -> Tensor:
    """Rows whose recorded log-probability should be the learner's: same weights, same text before them, (T,) bool."""
    routes = micro_batch.routes
    return (routes != RESCUE) & ((routes != DRAW) | (micro_batch.draw > 0))


def segment_of(micro_batch: MicroBatch, rows: Tensor) -> Tensor:
    """Segment that each row stands in."""
    return torch.searchsorted(micro_batch.cu_seqlens, rows, right=True) - 1


def row_ends(micro_batch: MicroBatch, rows: Tensor) -> Tensor:
    """Sequences among the rows, (N+1,) ends from 0: a sample's rows stand together in one segment."""
    lengths = torch.unique_consecutive(segment_of(micro_batch, rows), return_counts=True)[1]
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
