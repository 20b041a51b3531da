"""What the loop asks of an engine; several owners, nothing to inherit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from e3fast.types import Request, Rollout


class Engine(Protocol):
    policy_version: int
    draw: int  # whose weights it samples from: 0 = the policy's own

    def generate(self, requests: Sequence[Request]) -> list[list[Rollout]]:
        """`num_rollouts` completions of each request, in order, at its temperature, with their log-probabilities."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int, draw: int = 0) -> None:
        """Sample from these weights from now on."""
        ...
