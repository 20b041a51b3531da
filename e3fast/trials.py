"""Micro-batches run before step 1: whether memory holds the caps, and what times the costs start from.

Gradients and optimizer state stand meanwhile. Small trials come first and foretell the full ones, since a CPU that runs
out of memory kills the process instead of telling it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from e3fast.costs import Observation, bin_work
from e3fast.memory import GIB, RESERVE, MemoryPlan, OutOfMemory, Trial, available_bytes, fit_line
from e3fast.packing import pack
from e3fast.types import MicroBatch, Sample

if TYPE_CHECKING:
    from e3fast.allocator import CostFit
    from e3fast.config import TrainConfig
    from e3fast.draws import Perturb
    from e3fast.learner import LocalLearner

SHORT = 64  # tokens of a short sequence
WARM_UP = 128  # tokens of a first trial that nothing is read from: libraries set themselves up in it


class Trials:
    """Runs made-up micro-batches on a learner, and remembers what they took.

    With `perturb` at a draw of the weights, as the run's own will be: what draws keep in memory is then there too.
    """

    def __init__(self, learner: LocalLearner, vocab_size: int, costs: CostFit, perturb: Perturb | None = None) -> None:
        self.learner, self.vocab_size, self.costs, self.perturb = learner, vocab_size, costs, perturb
        self.random = np.random.default_rng(0)  # its own: nothing of the run is drawn from here

    def run(self, tokens: int, each: int, backward: bool = True) -> Trial:
        """One micro-batch of exactly `tokens`, in sequences of `each`. OutOfMemory where it does not fit."""
        lengths = split(tokens, min(each, tokens))
        trial = self.learner.trial(self.micro_batch(lengths), backward, self.perturb)
        if backward:
            alone = tuple((i,) for i in range(len(lengths)))
            work = bin_work(alone, [(1, length - 1) for length in lengths], self.costs.start)
            self.costs.anchors.append(Observation(work, trial.seconds))
        return trial

    def micro_batch(self, lengths: Sequence[int]) -> MicroBatch:
        """Random tokens, every one but the first of a sequence in the loss: the most that a micro-batch can ask."""
        samples = [self.sample(i, length) for i, length in enumerate(lengths)]
        weights = [1.0 / sum(lengths)] * len(lengths)
        whole = pack(samples, weights, sum(lengths), 1, sharing=False).micro_batches[0][0]
        return dataclasses.replace(whole, draw=1 if self.perturb else 0)

    def sample(self, group: int, length: int) -> Sample:
        asked = np.arange(length) > 0
        return Sample(
            group=group,
            prompt_id="",
            num_prompt_tokens=1,
            token_ids=self.random.integers(0, self.vocab_size, length),
            loss_mask=asked,
            entropy_mask=asked,
            advantages=np.where(asked, 1.0, 0.0),
            rollout_logprobs=np.zeros(length),
            temperatures=np.ones(length),
        )


def split(tokens: int, each: int) -> list[int]:
    """Sequences of `each` tokens and a shorter last one; none of one token, which would have nothing to predict."""
    lengths = [each] * (tokens // each) + [tokens % each] * (tokens % each > 0)
    if len(lengths) > 1 and lengths[-1] == 1:
        lengths[-2:] = [lengths[-2] - 1, 2]
    return lengths


def try_caps(
    learner: LocalLearner, config: TrainConfig, cap: int, forward_cap: int, longest: int, trials: Trials
) -> MemoryPlan | None:
    """The memory plan that the caps were confirmed with; None where memory cannot be read.

    `longest`: tokens of the longest sample there can be. ValueError, with the largest cap that fits, where they do not.
    """
    kinds = sorted({SHORT, min(longest, cap)}, reverse=True)
    learner.allocate()
    try:
        trials.run(min(WARM_UP, cap), SHORT)
        trials.costs.anchors.clear()
        small = [trials.run(max(2, cap // part), SHORT) for part in (8, 4)]
        plan = plan_memory(learner, small)
        refuse(plan, config, cap)
        full = [trials.run(cap, each) for each in kinds]
        if config.hard_cap:
            trials.run(min(config.hard_cap, longest), longest)
        if forward_cap > 2 * cap:  # below that, the activations that a backward pass keeps outweigh it
            refuse_forward(trials.run(cap, SHORT, backward=False), forward_cap, plan)
            for each in kinds:
                trials.run(forward_cap, each, backward=False)
        if not config.deterministic:
            for part in (4, 2):
                trials.run(max(2, cap // part), min(longest, cap))
    except OutOfMemory as error:
        raise ValueError(f"train.tokens_per_micro_batch={cap} does not fit in memory ({error}): lower it") from None
    finally:
        learner.drop_gradients()
    return plan_memory(learner, [*small, *full])


def plan_memory(learner: LocalLearner, trials: Sequence[Trial]) -> MemoryPlan | None:
    free = available_bytes(learner.device)
    if free is None or any(trial.peak_bytes is None for trial in trials):
        return None
    fixed, per_token = fit_line(trials)
    return MemoryPlan(**learner.standing_bytes(), fixed=fixed, per_token=per_token, available=(1 - RESERVE) * free)


def refuse_forward(trial: Trial, forward_cap: int, plan: MemoryPlan | None) -> None:
    need = (trial.peak_bytes or 0) * forward_cap / trial.tokens
    if plan is not None and need > plan.available:
        raise ValueError(
            f"train.forward_tokens_per_micro_batch={forward_cap} needs about {need / GIB:.1f} GiB, "
            f"and {plan.available / GIB:.1f} GiB are free; lower it"
        )


def refuse(plan: MemoryPlan | None, config: TrainConfig, cap: int) -> None:
    largest = max(cap, config.hard_cap)
    if plan is not None and plan.need(largest) > plan.available:
        name = "hard_cap" if config.hard_cap else "tokens_per_micro_batch"
        raise ValueError(
            f"train.{name}={largest} needs about {plan.need(largest) / GIB:.1f} GiB, and {plan.available / GIB:.1f} "
            "GiB are free beside weights, gradients and optimizer: "
            f"about {plan.largest_cap} tokens fit; lower it"
        )
