"""Small records for tests."""

from __future__ import annotations

import math

import numpy as np

from e3fast.types import Group, Prompt, Request, Rollout, Score, StepContext, StepStats


def prompt(row: int = 0, token_ids=(5, 6, 7)) -> Prompt:
    return Prompt(str(row), row, tuple(token_ids), ({"role": "user", "content": f"q{row}"},), "1", "test")


def request(of: Prompt | None = None, num_rollouts: int = 8, temperature: float = 1.0, **changes) -> Request:
    fields = dict(max_new_tokens=16, seed=1, kind="first") | changes
    return Request(of or prompt(), num_rollouts, temperature, **fields)


def group(
    of: Prompt | None = None,
    rewards=None,
    lengths=None,
    verdicts=None,
    id: int = 0,
    temperature: float = 1.0,
    **changes,
) -> Group:
    """A group with one rollout a verdict; a correct one earns 1 unless `rewards` says otherwise."""
    verdicts = verdicts or ["correct" if r > 0 else "wrong" for r in rewards or [1.0]]
    lengths = lengths or [3] * len(verdicts)
    rewards = rewards if rewards is not None else [1.0 if v == "correct" else 0.0 for v in verdicts]
    asked = request(of, len(verdicts), temperature, **changes)
    rollouts = [
        Rollout(asked, tuple(range(10, 10 + n)), "t", (-0.5,) * n, "length" if v == "truncated" else "stop", 0)
        for n, v in zip(lengths, verdicts, strict=True)
    ]
    scores = [Score(float(r), v) for r, v in zip(rewards, verdicts, strict=True)]
    return Group(id, asked, tuple(rollouts), tuple(scores))


def context(**changes) -> StepContext:
    fields = dict(
        seed=7,
        step=0,
        max_steps=10,
        num_prompts=6,
        prompts_per_step=3,
        rollouts_per_prompt=8,
        visits=3,
        need=3,
        refill=lambda n: [],
        regrouped=lambda groups: groups,
        encode=lambda messages: tuple(range(sum(len(m["content"].split()) for m in messages))),
        latents=lambda prompts: np.zeros((len(prompts), 256)),
        max_prompt_tokens=1024,
    )
    return StepContext(**(fields | changes))


def stats(entropy: float = 1.0, num_classes: int = 151936, keep_rate: float = math.nan, latents=None) -> StepStats:
    return StepStats(
        loss=0.0,
        entropy=entropy,
        entropy_tokens=1,
        num_classes=num_classes,
        entropy_at_one=1.0,
        elasticity=1.5,
        grad_norm=0.0,
        ratio_max=1.0,
        clip_share=0.0,
        mismatch_mean=0.0,
        mismatch_max=0.0,
        mismatch_kl=0.0002,
        effective_sample_share=0.99,
        importance_capped=math.nan,
        importance_kept=math.nan,
        kl=math.nan,
        keep_rate=keep_rate,
        trained_tokens=1,
        scored_tokens=0,
        stepped=True,
        trained_seconds=(1.0,),
        scored_seconds=(),
        latents=latents or {},
    )
