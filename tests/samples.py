"""Random samples for packing and learner tests."""

from __future__ import annotations

import numpy as np

from e3fast.types import Sample


def make_samples(shape, seed: int = 0, vocab: int = 257, zero_groups=(), temperature=None) -> list[Sample]:
    """`shape` lists groups, each (prompt length, [completion lengths])."""
    rng, samples = np.random.default_rng(seed), []
    for g, (p, completions) in enumerate(shape):
        prompt = rng.integers(1, vocab, p)
        for c in completions:
            asked = np.arange(p + c) >= p
            advantage = 0.0 if g in zero_groups else rng.normal()
            tau = temperature or float(rng.choice([0.6, 1.0, 1.3]))
            samples.append(
                Sample(
                    group=g,
                    prompt_id=str(g),
                    num_prompt_tokens=p,
                    token_ids=np.concatenate([prompt, rng.integers(1, vocab, c)]),
                    loss_mask=asked,
                    entropy_mask=asked,
                    advantages=np.where(asked, advantage, 0.0),
                    rollout_logprobs=np.where(asked, -1.0 - rng.random(p + c), 0.0),
                    temperatures=np.full(p + c, tau),
                )
            )
    return samples
