"""The seam for exploration methods: a base class of no-op hooks, in call order.

A method overrides the few hooks it means. Knobs are init fields; state is `field(init=False)` and is checkpointed as it
stands, so no method writes checkpoint code.
"""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from e3fast.types import Group, LossParams, Prompt, Request, StepContext, StepStats

if TYPE_CHECKING:
    from torch import Tensor

    from e3fast.config import RunConfig


SUPPLIED = frozenset({"entropy", "latents", "reference", "one_update", "top_p_1"})  # what this trainer has


@dataclass
class Method:
    """Plain GRPO: every hook does nothing."""

    order: ClassVar[int] = 60
    """Methods are called in run-file order, which must not decrease in `order`."""
    owns: ClassVar[frozenset[str]] = frozenset()
    """What this method alone may set: counts, temperature, draw, beta, rescue, selection, optimizer."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """What the trainer must supply.

    entropy, latents, reference (the frozen start model), one_update (one optimiser step a batch), top_p_1.
    """
    max_rounds: ClassVar[int] = 1
    """Rounds of rollouts in a step that this method may ask for."""

    def start(self, config: RunConfig, num_prompts: int) -> list[str]:
        """Check the knobs against the run and size the state. ValueError refuses the run.

        The list holds notes for the user.
        """
        return []

    def weigh(self, ctx: StepContext, prompts: Sequence[Prompt]) -> npt.NDArray[np.float64] | None:
        """Weight of each prompt in the draw, >= 0; None = no opinion."""
        return None

    def plan(self, ctx: StepContext, requests: list[Request]) -> list[Request]:
        """Set counts and temperatures of the requests about to be sampled."""
        return requests

    def retry(self, ctx: StepContext, groups: list[Group]) -> list[Request]:
        """More requests, given the groups so far; asked once a round while rounds are left."""
        return []

    def regroup(self, ctx: StepContext, groups: list[Group]) -> list[Group]:
        """Drop, merge or reshape groups before credit. Pure: it is also called as a preview."""
        return groups

    def tune(self, ctx: StepContext, loss: LossParams) -> LossParams:
        """Change this step's loss; it starts from the run's own."""
        return loss

    def perturb(
        self, ctx: StepContext, draw: int, name: str, weight: Tensor, optimizer_state: Mapping[str, Tensor]
    ) -> Tensor:
        """Draw `draw` >= 1 of a weight, fp32 and whole; `optimizer_state` is what the optimizer keeps for it.

        Pure, and the same each time it is called in a step: while rollouts are generated, and again in the learner.
        """
        return weight

    def observe(self, ctx: StepContext, groups: list[Group], stats: StepStats) -> None:
        """Learn from the step; the one hook that changes state."""

    def report(self) -> dict[str, float]:
        """State worth a line in the metrics."""
        return {}

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs, as values JSON can hold."""
        return {f.name: encode(getattr(self, f.name)) for f in fields(self) if not f.init}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. ValueError if it is not this method's."""
        names = [f.name for f in fields(self) if not f.init]
        if sorted(state) != sorted(names):
            raise ValueError(f"{type(self).__name__} has state {names}, the checkpoint holds {list(state)}")
        for name, value in state.items():
            setattr(self, name, decode(value) if isinstance(getattr(self, name), np.ndarray) else copy.deepcopy(value))


def encode(value: Any) -> Any:
    """An array as base64 of a .npy file, far shorter than its digits; else the value. Both are exact in JSON."""
    if not isinstance(value, np.ndarray):
        return copy.deepcopy(value)
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def decode(text: str) -> npt.NDArray[Any]:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def check_methods(methods: Sequence[Method]) -> None:
    """Refuse methods whose order, needs or ownership cannot be met. ValueError says what to do."""
    names = [type(m).__name__ for m in methods]
    wanted = sorted(range(len(methods)), key=lambda i: methods[i].order)
    if any(a.order > b.order for a, b in pairwise(methods)):
        raise ValueError(
            f"[[methods]] stand in the order {', '.join(names)}; write {', '.join(names[i] for i in wanted)}"
        )
    for name, method in zip(names, methods, strict=True):
        if missing := method.needs - SUPPLIED:
            raise ValueError(f"{name} needs {', '.join(sorted(missing))}, which this trainer does not supply")
    owner: dict[str, str] = {}
    for name, method in zip(names, methods, strict=True):
        for thing in sorted(method.owns):
            if thing in owner:
                raise ValueError(f"{owner[thing]} and {name} both set the {thing}: remove one")
            owner[thing] = name
