"""Rewards by their run-file names. A reward is a plain function (prompt, rollout) -> Score, run in a worker process."""

from __future__ import annotations

import difflib
import functools
import importlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from e3fast.types import VERDICTS, Prompt, Reward, Rollout, Score

if TYPE_CHECKING:
    from e3fast.config import RewardConfig

# Module and function. Imported when asked for, so that a worker loads the verifier it runs and no other.
REWARDS = {
    "auto": "e3fast.rewards.auto:auto_score",
    "gym": "e3fast.rewards.gym:gym_score",
    "math": "e3fast.rewards.math_answer:math_score",
}


def find_reward(config: RewardConfig) -> Reward:
    """The reward a run file names, ready to be sent to a worker. ValueError names what is wrong with the name."""
    if config.name in REWARDS:
        return functools.partial(load(config.name, REWARDS[config.name]), format_weight=config.format_weight)
    if ":" not in config.name:
        near = difflib.get_close_matches(config.name, REWARDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = f"{', '.join(REWARDS)}, or 'package.module:function'"
        raise ValueError(f"unknown reward {config.name!r}; {hint}known: {known}")
    if config.format_weight:
        raise ValueError(f"reward.format_weight does nothing with a reward of your own ({config.name}): remove it")
    return functools.partial(own_score, load(config.name, config.name))


def load(name: str, path: str) -> Callable[..., Any]:
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot load reward {name!r}: {error}") from None
    if not callable(found):
        raise ValueError(f"reward {name!r} is not a function")
    return found


def own_score(function: Callable[[Prompt, Rollout], Score | float], prompt: Prompt, rollout: Rollout) -> Score:
    """A user's reward as a Score. A bare number is `correct` from 1.0 up; below, `truncated` if cut, else `wrong`."""
    result = function(prompt, rollout)
    if not isinstance(result, Score):
        value = float(result)
        below = "truncated" if rollout.finish_reason == "length" else "wrong"
        result = Score(value, "correct" if value >= 1.0 else below, {"reward": value})
    if result.verdict not in VERDICTS:
        raise ValueError(f"verdict must be one of {', '.join(VERDICTS)}; got {result.verdict!r}")
    if not math.isfinite(result.value):
        raise ValueError(f"a reward must be a finite number, got {result.value}")
    return result


__all__ = ["REWARDS", "find_reward"]
