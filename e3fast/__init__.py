"""e3fast: GRPO-family training of language models on verifiable rewards. The public API.

Each name loads at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from csrc_triton import grpo_loss, linear_grpo_loss, linear_logprobs
    from e3fast.advantages import group_advantages
    from e3fast.methods.base import Method
    from e3fast.packing import pack
    from e3fast.types import Group, Prompt, Request, Rollout, Score

__version__ = "0.1.0"
HOME = {
    **dict.fromkeys(("grpo_loss", "linear_grpo_loss", "linear_logprobs"), "csrc_triton"),
    **dict.fromkeys(("Group", "Prompt", "Request", "Rollout", "Score"), "e3fast.types"),
    "Method": "e3fast.methods.base",
    "group_advantages": "e3fast.advantages",
    "pack": "e3fast.packing",
}
__all__ = [
    "Group",
    "Method",
    "Prompt",
    "Request",
    "Rollout",
    "Score",
    "group_advantages",
    "grpo_loss",
    "linear_grpo_loss",
    "linear_logprobs",
    "pack",
]


def __getattr__(name: str) -> Any:
    # Late, so that a reward worker, which imports e3fast.rewards alone, does not load torch.
    if name not in HOME:
        raise AttributeError(f"module 'e3fast' has no attribute {name!r}")
    return getattr(importlib.import_module(HOME[name]), name)
