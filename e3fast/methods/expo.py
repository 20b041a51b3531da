"""EXPO: a KL weight that follows accuracy, and a curriculum around medium difficulty.

Papers: arXiv 2605.09923, and 2605.11403 ("FG-ExPO"), which has the formulas.

AccuracyKL: with a the clean accuracy of the step under way, not smoothed, the weight of KL(policy || start model) is

    beta (tanh a + 1) / 2

It moves by a factor of 1.76 at most, from 0.5 beta to 0.88 beta, so its control is a run with a fixed weight in the
middle, `curve="constant"` (a = 1/2 always), and not one without KL.

GaussianCurriculum: each prompt's smoothed pass rate p gives its weight in the draw,

    p <- alpha p + (1 - alpha) c/n          w = exp(-(p - center)^2 / (2 width^2))

With the paper's knobs this is weak: a prompt that always fails keeps weight 0.84 after 5 visits and 0.53 after 15. A
stronger variant has alpha 0.5 and width 0.15 to 0.2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from e3fast.methods.base import Method
from e3fast.tables import check
from e3fast.types import FloatArray, Group, LossParams, Prompt, StepContext, StepStats

if TYPE_CHECKING:
    from e3fast.config import RunConfig


@dataclass
class AccuracyKL(Method):
    """The more the policy gets right, the closer it is held to the start model."""

    beta: float = 0.02
    curve: Literal["tanh", "constant"] = "tanh"  # "constant" = the weight of a = 1/2 at every step, the control

    owns: ClassVar[frozenset[str]] = frozenset({"beta"})
    needs: ClassVar[frozenset[str]] = frozenset({"reference"})

    def start(self, config: RunConfig, num_prompts: int) -> list[str]:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"accuracy_kl needs beta > 0, got {self.beta:g} (remove the method instead)")
        return []

    def tune(self, ctx: StepContext, loss: LossParams) -> LossParams:
        accuracy = 0.5 if self.curve == "constant" else ctx.clean_accuracy or 0.0  # 0 where nothing was judged
        return dataclasses.replace(loss, beta=self.beta * (math.tanh(accuracy) + 1) / 2)


@dataclass
class GaussianCurriculum(Method):
    """Prompts of medium pass rate are drawn more often."""

    center: float = 0.5  # pass rate of the greatest weight
    width: float = 0.35
    alpha: float = 0.9  # weight of the old rate
    initial: float = 0.5  # rate of a prompt not seen yet

    p: FloatArray = field(init=False, default_factory=lambda: np.zeros(0))  # (N_D,) smoothed clean pass rate

    def start(self, config: RunConfig, num_prompts: int) -> list[str]:
        check(0 <= self.center <= 1, "center", "in [0, 1]", self.center)
        check(0 < self.width < math.inf, "width", "> 0", self.width)
        check(0 <= self.alpha < 1, "alpha", "in [0, 1)", self.alpha)
        check(0 <= self.initial <= 1, "initial", "in [0, 1]", self.initial)
        self.p = np.full(num_prompts, float(self.initial))
        return []

    def weigh(self, ctx: StepContext, prompts: Sequence[Prompt]) -> FloatArray:
        return self.weights()

    def weights(self) -> FloatArray:
        return np.exp(-((self.p - self.center) ** 2) / (2 * self.width**2))

    def observe(self, ctx: StepContext, groups: list[Group], stats: StepStats) -> None:
        for prompt_id, (judged, correct) in ctx.clean.items():
            if judged:
                row = ctx.rows[prompt_id]
                self.p[row] = self.alpha * self.p[row] + (1 - self.alpha) * correct / judged

    def report(self) -> dict[str, float]:
        return {"mean_rate": float(self.p.mean()), "mean_weight": float(self.weights().mean())}
