"""The default reward: a gym prompt by its own verifier, every other by math-verify."""

from __future__ import annotations

from e3fast.rewards.gym import gym_score
from e3fast.rewards.math_answer import math_score
from e3fast.types import Prompt, Rollout, Score


def auto_score(prompt: Prompt, rollout: Rollout, *, format_weight: float = 0.0) -> Score:
    score = gym_score if prompt.source.startswith("gym:") else math_score
    return score(prompt, rollout, format_weight=format_weight)
