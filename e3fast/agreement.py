"""Whether the engine's log-probs are the learner's, asked before a run relies on it.

At learning rate 0 every ratio of learner to engine should be 1. Rounding moves single tokens; a mask over whole
sequences adds up every token's difference, so rounding alone can throw sequences out.
"""

from __future__ import annotations

import math

import numpy as np

from e3fast.advantages import make_sample
from e3fast.allocator import Allocator, with_logprobs
from e3fast.config import RunConfig
from e3fast.learner import Learner
from e3fast.prompts import PromptPool
from e3fast.rollout.engine import Engine
from e3fast.streams import stream_key
from e3fast.types import FloatArray, Group, LossParams, Request

NUM_ROLLOUTS, LEAST = 64, 0.95  # for the mask
RATIO_ROLLOUTS, RATIO_TOKENS = 16, 64
RATIO_LIMITS = {"fp32": 1e-2, "bf16": 0.25}  # mean |difference| in nats; rounding gives 1e-5 and 0.03 (demo model)


def check_ratio(
    config: RunConfig, pool: PromptPool, engine: Engine, learner: Learner, allocator: Allocator, dtype: str
) -> str:
    """A line on how far learner and engine are apart before the first step. ValueError where it is too far."""
    gaps = np.concatenate(sample_gaps(config, pool, engine, learner, allocator, RATIO_ROLLOUTS, RATIO_TOKENS))
    mean, ratio = float(np.abs(gaps).mean()), np.exp(gaps)
    if not mean <= RATIO_LIMITS[dtype]:
        raise ValueError(
            f"at learning rate 0 the log-probs of engine and learner differ by {mean:.3g} nats a token "
            f"(at most {RATIO_LIMITS[dtype]:g} in {dtype}): the engine samples from another policy than the one "
            "trained. Compare their versions, chat templates and number formats"
        )
    share = float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()))
    return (
        f"engine against learner at learning rate 0: mean |difference| {mean:.2g} nats, max {np.abs(gaps).max():.2g}, "
        f"effective sample {share:.1%}"
    )


def check_mask(
    config: RunConfig, pool: PromptPool, engine: Engine, learner: Learner, allocator: Allocator, band: float
) -> str:
    """A line on how many of 64 unperturbed rollouts the mask keeps. ValueError where it is less than 95 %."""
    longest = config.rollout.max_new_tokens
    gaps = sample_gaps(config, pool, engine, learner, allocator, NUM_ROLLOUTS, longest)
    kept = sum(abs(gap.sum()) <= math.log(band) for gap in gaps) / len(gaps)
    if kept < LEAST:
        raise ValueError(
            f"engine and learner differ so much that the mask keeps only {kept:.0%} of rollouts without any noise: "
            'set behaviour_logprobs = "learner" in perturbed_weights'
        )
    return f"mask at no noise keeps {kept:.0%} of {len(gaps)} rollouts"


def sample_gaps(
    config: RunConfig,
    pool: PromptPool,
    engine: Engine,
    learner: Learner,
    allocator: Allocator,
    num_rollouts: int,
    max_new_tokens: int,
) -> list[FloatArray]:
    """learner - engine log-probs of some unperturbed rollouts' tokens, rollout by rollout."""
    prompts = pool.prompts[:num_rollouts]
    share = -(-num_rollouts // len(prompts))
    rollout = config.rollout
    longest = min(max_new_tokens, rollout.max_new_tokens)
    requests = [
        Request(p, share, rollout.temperature, longest, stream_key(config.seed, "agreement", p.id)) for p in prompts
    ]
    done = zip(requests, engine.generate(requests), strict=True)
    samples = [make_sample(Group(0, request, (), ()), own, 0.0) for request, rollouts in done for own in rollouts]
    samples, _ = allocator.trim(samples)
    batch = allocator.pack(samples, [0.0] * len(samples), learner.num_ranks, LossParams(), scored_at_draws=True)
    found = learner.logprobs(batch, None)
    again = [with_logprobs(sample, found[i]) for i, sample in enumerate(samples)]
    pairs = zip(again, samples, strict=True)
    return [(a.rollout_logprobs - b.rollout_logprobs)[b.loss_mask].clip(-20, 20) for a, b in pairs]
