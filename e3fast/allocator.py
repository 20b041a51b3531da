"""A run's allocator: the token caps, what micro-batches cost, and each step's batch made with them.

Before step 1 full micro-batches are tried (trials.py), so that a cap that memory does not hold fails there and not at
step 400. Where memory runs out all the same, the step is packed again at half the cap: loss and gradient do not depend
on packing.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from e3fast.config import TrainConfig
from e3fast.costs import Fit, Observation, Work, bin_work, refit, with_overhead
from e3fast.memory import OutOfMemory
from e3fast.packing import cut_overlong, pack
from e3fast.types import (
    Batch,
    Coefficients,
    FloatArray,
    LossParams,
    PackingPlan,
    Sample,
    StepStats,
)

if TYPE_CHECKING:
    from e3fast.draws import Perturb
    from e3fast.learner import Learner

WINDOW = 200  # micro-batches that a fit looks back on


class CostFit:
    """What one kind of micro-batch costs in seconds, from the times measured so far.

    A good plan makes all micro-batches alike, so the trials before step 1 stay in the fit: they differ the most.
    """

    def __init__(self, start: Coefficients) -> None:
        self.start = start
        self.anchors: list[Observation] = []
        self.recent: deque[Observation] = deque(maxlen=WINDOW)
        self.predicted = math.nan  # seconds of the last step, foretold by the fit before it
        self.measured = math.nan

    @property
    def fit(self) -> Fit | None:
        known = [*self.anchors, *self.recent]
        return refit(known, self.start) if known else None

    def observe(self, plan: PackingPlan, samples: Sequence[Sample], seconds: Sequence[float]) -> None:
        """The slots of a step; a slot's time is that of its costliest micro-batch."""
        lengths = [(sample.num_prompt_tokens, len(sample.token_ids) - sample.num_prompt_tokens) for sample in samples]
        works = [bin_work(plan.bins[heaviest(plan, slot)][slot], lengths, self.start) for slot in range(plan.num_slots)]
        fit = self.fit
        self.predicted = sum(map(fit.seconds, works)) if fit else math.nan
        self.measured = sum(seconds) if seconds else math.nan
        self.recent.extend(Observation(work, spent) for work, spent in zip(works, seconds, strict=True))

    def state(self) -> list[list[tuple[float, float, float]]]:
        return [[(o.work.linear, o.work.attention, o.seconds) for o in p] for p in (self.anchors, self.recent)]

    def restore(self, state: list[list[tuple[float, float, float]]]) -> None:
        parts = ([Observation(Work(a, b), c) for a, b, c in part] for part in state)
        self.anchors = next(parts)
        self.recent.extend(next(parts))


def heaviest(plan: PackingPlan, slot: int) -> int:
    """The rank that the others of a slot wait for."""
    return max(range(plan.num_ranks), key=lambda rank: plan.costs[rank][slot])


class Allocator:
    """Owns the caps and the costs; `update` ends a step whatever memory holds."""

    def __init__(self, config: TrainConfig, coefficients: Coefficients) -> None:
        """`coefficients`: FLOP of a forward pass."""
        self.config = config
        self.cap = config.tokens_per_micro_batch
        self.forward_cap = config.forward_tokens_per_micro_batch or 2 * self.cap
        start = with_overhead(coefficients, self.cap)
        self.trained, self.scored = CostFit(start), CostFit(start)
        self.num_replans = 0
        self.last_plan: PackingPlan | None = None

    def trim(self, samples: list[Sample]) -> tuple[list[Sample], int]:
        """Samples as the policy for over-long ones leaves them, and how many it cut."""
        if self.config.over_long != "cut":
            return samples, 0
        return cut_overlong(samples, self.config.tokens_per_micro_batch)

    def pack(
        self,
        samples: Sequence[Sample],
        weights: Sequence[float],
        num_ranks: int,
        loss: LossParams,
        scored_at_draws: bool = False,
    ) -> Batch:
        """The step's micro-batches; with `scored_at_draws`, for a forward pass alone of each sample at its own draw."""
        backward = "none" if scored_at_draws else "all" if loss.needs_every_row else "signal"
        return pack(
            samples,
            weights,
            self.cap,
            num_ranks,
            backward=backward,
            at_draws=scored_at_draws or loss.gradient_at == "draw",
            coefficients=self.coefficients(self.trained),
            forward_coefficients=self.coefficients(self.scored),
            sharing=self.config.share_prompts,
            score_all=scored_at_draws or self.config.entropy_rows == "all",
            forward_cap=self.forward_cap,
            # Under a cap that was halved, a sample that fitted before has a micro-batch of its own.
            hard_cap=max(self.config.hard_cap, self.config.tokens_per_micro_batch),
        )

    def coefficients(self, costs: CostFit) -> Coefficients:
        """What plans are made with: measured times only where the run may differ from its twin."""
        fit = None if self.config.deterministic else costs.fit
        return fit.coefficients if fit else costs.start

    def rescore(
        self, learner: Learner, samples: list[Sample], loss: LossParams, perturb: Perturb | None
    ) -> list[Sample]:
        """With loss.behaviour_logprobs "learner": drawn samples with the learner's log-probs at their draw."""
        drawn = [i for i, sample in enumerate(samples) if sample.route == "draw" and sample.num_loss_tokens]
        if loss.behaviour_logprobs == "engine" or not drawn:
            return samples
        own = [samples[i] for i in drawn]
        batch = self.pack(own, [0.0] * len(own), learner.num_ranks, loss, scored_at_draws=True)
        found = learner.logprobs(batch, perturb)
        again = {i: with_logprobs(samples[i], found[k]) for k, i in enumerate(drawn)}
        return [again.get(i, sample) for i, sample in enumerate(samples)]

    def update(
        self,
        learner: Learner,
        batch: Batch,
        samples: Sequence[Sample],
        weights: Sequence[float],
        loss: LossParams,
        probe: bool,
        perturb: Perturb | None = None,
    ) -> tuple[Batch, StepStats]:
        """Update; out of memory, with the samples packed again at half the cap. Returns the batch that went through.

        OutOfMemory where one sample alone is too much.
        """
        while True:
            try:
                stats = learner.update(batch, loss, probe, perturb)
            except OutOfMemory as error:
                failed = str(error)
            else:
                self.last_plan = batch.plan
                self.trained.observe(batch.plan, samples, stats.trained_seconds)
                self.scored.observe(batch.forward_plan, samples, stats.scored_seconds)
                return batch, stats
            self.shrink(batch, failed)
            batch = self.pack(samples, weights, learner.num_ranks, loss)

    def shrink(self, batch: Batch, failed: str) -> None:
        """Half of what did not fit becomes the cap, of this step and all later ones."""
        caps = halved(self.cap, batch.plan), halved(self.forward_cap, batch.forward_plan)
        if caps == (self.cap, self.forward_cap):
            raise OutOfMemory(
                f"out of memory with one sample in a micro-batch ({failed}); "
                "lower rollout.max_new_tokens or data.max_prompt_tokens"
            )
        self.cap, self.forward_cap = caps
        self.num_replans += 1

    def report(self) -> dict[str, float | int]:
        """The allocator's own figures of the step just done."""
        return {
            "allocator/cap": self.cap,
            "allocator/replans": self.num_replans,
            **fit_metrics("trained", self.trained),
            **fit_metrics("scored", self.scored),
        }

    def state(self) -> dict[str, Any]:
        return {
            "caps": [self.cap, self.forward_cap],
            "num_replans": self.num_replans,
            "trained": self.trained.state(),
            "scored": self.scored.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Halved caps stay halved; the run file may lower them further."""
        self.num_replans = state["num_replans"]
        if self.num_replans:
            self.cap, self.forward_cap = min(self.cap, state["caps"][0]), min(self.forward_cap, state["caps"][1])
        self.trained.restore(state["trained"])
        self.scored.restore(state["scored"])


def with_logprobs(sample: Sample, logprobs: FloatArray) -> Sample:
    """A sample whose asked tokens have these behaviour log-probs."""
    values = sample.rollout_logprobs.copy()
    values[sample.loss_mask | sample.entropy_mask] = logprobs
    return dataclasses.replace(sample, rollout_logprobs=values)


def halved(cap: int, plan: PackingPlan) -> int:
    """Half the tokens of the largest micro-batch that can be split; the cap itself where all hold one sample."""
    sizes = [
        tokens
        for rank, kept in zip(plan.tokens, plan.bins, strict=True)
        for tokens, fragments in zip(rank, kept, strict=True)
        if sum(map(len, fragments)) > 1
    ]
    return max(sizes) // 2 if sizes else cap


def fit_metrics(name: str, costs: CostFit) -> dict[str, float | int]:
    fit = costs.fit
    if fit is None:
        return {}
    return {
        **{f"fit/{name}_{part}": getattr(fit.coefficients, part) for part in ("c0", "a", "b", "head")},
        f"fit/{name}_r2": fit.r2,
        f"fit/{name}_observations": fit.num_observations,
        f"fit/{name}_condition": fit.condition,
        f"fit/{name}_rescaled_only": fit.rescaled_only,
        f"fit/{name}_seconds": costs.measured,
        f"fit/{name}_predicted_seconds": costs.predicted,
    }
