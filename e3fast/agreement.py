"""Whether the engine's log-probs are the learner's, asked before a run relies on it.

A mask over whole sequences adds up every token's difference, so rounding alone can throw sequences out.
"""

from __future__ import annotations

import math

from e3fast.advantages import make_sample
from e3fast.allocator import Allocator, with_logprobs
from e3fast.config import RunConfig
from e3fast.learner import Learner
from e3fast.prompts import PromptPool
from e3fast.rollout.engine import Engine
from e3fast.streams import stream_key
from e3fast.types import Group, LossParams, Request

NUM_ROLLOUTS, LEAST = 64, 0.95


def check_mask(
    config: RunConfig, pool: PromptPool, engine: Engine, learner: Learner, allocator: Allocator, band: float
) -> str:
    """A line on how many of 64 unperturbed rollouts the mask keeps. ValueError where it is less than 95 %."""
    prompts = pool.prompts[:NUM_ROLLOUTS]
    share = -(-NUM_ROLLOUTS // len(prompts))
    rollout = config.rollout
    requests = [
        Request(p, share, rollout.temperature, rollout.max_new_tokens, stream_key(config.seed, "mask", p.id))
        for p in prompts
    ]
    done = zip(requests, engine.generate(requests), strict=True)
    samples = [make_sample(Group(0, request, (), ()), own, 0.0) for request, rollouts in done for own in rollouts]
    samples, _ = allocator.trim(samples)
    batch = allocator.pack(samples, [0.0] * len(samples), learner.num_ranks, LossParams(), scored_at_draws=True)
    found = learner.logprobs(batch, None)
    again = [with_logprobs(sample, found[i]) for i, sample in enumerate(samples)]
    pairs = zip(again, samples, strict=True)
    gaps = [(a.rollout_logprobs - b.rollout_logprobs)[b.loss_mask].clip(-20, 20).sum() for a, b in pairs]
    kept = sum(abs(gap) <= math.log(band) for gap in gaps) / len(gaps)
    if kept < LEAST:
        raise ValueError(
            f"engine and learner differ so much that the mask keeps only {kept:.0%} of rollouts without any noise: "
            'set behaviour_logprobs = "learner" in perturbed_weights'
        )
    return f"mask at no noise keeps {kept:.0%} of {len(gaps)} rollouts"
