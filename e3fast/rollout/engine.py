"""What the loop asks of an engine; several owners, nothing to inherit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from e3fast.streams import stream_key
from e3fast.types import Request, Rollout

if TYPE_CHECKING:
    from torch import Tensor


class Engine(Protocol):
    policy_version: int
    draw: int  # whose weights it samples from: 0 = the policy's own

    def generate(self, requests: Sequence[Request]) -> list[list[Rollout]]:
        """`num_rollouts` completions of each request, in order, at its temperature, with their log-probabilities."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int, draw: int = 0) -> None:
        """Sample from these weights from now on. EngineError where the engine does not prove that it does."""
        ...

    def sleep(self) -> None:
        """Give memory back until `wake`: nothing is sampled meanwhile, and weights and caches may be gone."""
        ...

    def wake(self) -> None:
        """Take the memory again. Weights are to be loaded next."""
        ...

    def report(self) -> dict[str, float]:
        """The engine's own figures since the last report."""
        ...

    def close(self) -> None: ...


class EngineError(RuntimeError):
    """The engine is not there, or not the policy's: the message names the phase and says what to do."""


def rollout_key(request: Request, index: int) -> int:
    """The random stream of completion `index` of a request."""
    return stream_key(request.seed, request.first_rollout + index)
