"""Cheap peers and controls: which prompts are worth rollouts, and one fixed temperature.

DynamicSampling (DAPO, arXiv 2503.14476): prompts whose rollouts are all right or all wrong are dropped, and new ones
drawn until B informative ones stand, or `max_rounds` is reached. It differs by the size of a refill, which is that of
GRESO: with m prompts missing and a share d of those so far dropped,

    ceil(margin m / (1 - d)), at most B         (`full_batches` asks for B each time, as DAPO does)

Dropped prompts leave the loss's normaliser too: the expected direction stays, the step is rescaled.

SkipTrivial (GRESO, arXiv 2506.02177; code: Infini-AI-Lab/GRESO): a prompt whose last s visits were all trivial, in one
way, stays in the draw with probability

    max(q^s, 0.01)          q = q_easy after all-correct visits, q_hard after all-wrong ones

and each q moves by 0.01 a step, so that all-correct prompts make up a third and all-wrong ones two thirds of `target`.
It differs in that a skipped prompt is left out of the draw, by weight 0, and not drawn and thrown away.

PosteriorSampler (MoPPS, arXiv 2507.04632; code: thu-rllab/MoPPS): each prompt's pass rate has a posterior Beta(a, b),
from Beta(1, 1). Of `pool` candidates for each prompt needed, those are taken whose r ~ Beta(a, b) is nearest to 1/2. A
visit with c of n correct gives

    a <- lam a + (1 - lam) + c          b <- lam b + (1 - lam) + n - c

FixedTemperature: one sampling temperature from some step on, the control of every method that moves it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from e3fast.methods.base import Method
from e3fast.streams import stream_key, uniforms
from e3fast.tables import check
from e3fast.types import FloatArray, Group, IntArray, Prompt, Request, StepContext, StepStats

if TYPE_CHECKING:
    from e3fast.config import RunConfig

ALL_CORRECT, ALL_WRONG = 0.98, 0.11  # pass rates from which, and up to which, SkipTrivial calls a visit trivial
LEAST_KEPT = 0.01  # probability with which even the most trivial prompt stays in the draw
Q_CHANGE = 0.01  # a step


@dataclass
class DynamicSampling(Method):
    """Prompts without signal are dropped, and others drawn in their place."""

    max_rounds: int = 10  # a constant of other methods, here a knob
    margin: float | None = None  # None = 1.25: prompts asked for each one that is expected to be missing
    full_batches: bool = False  # ask for B prompts each time

    num_kept: int = field(init=False, default=0)  # prompts of the last step, trained on
    num_drawn: int = field(init=False, default=0)  # and drawn
    short_steps: int = field(init=False, default=0)  # steps with fewer than B prompts to train on

    order: ClassVar[int] = 50

    def start(self, config: RunConfig, num_prompts: int) -> list[str]:
        check(self.max_rounds >= 2, "max_rounds", ">= 2", self.max_rounds)
        if self.margin is not None and self.full_batches:
            raise ValueError("margin is set but full_batches is on")
        check(self.margin is None or 1 <= self.margin < math.inf, "margin", ">= 1", self.margin)
        if num_prompts <= config.train.prompts_per_step:
            return ["DynamicSampling only drops prompts: a step draws the whole pool and leaves none to refill from"]
        return []

    def retry(self, ctx: StepContext, groups: list[Group]) -> list[Request]:
        if ctx.pending or ctx.round >= self.max_rounds:  # what others asked for may yet make a prompt informative
            return []
        num_mixed = len(mixed_prompts(ctx.regrouped(groups)))
        missing = ctx.prompts_per_step - num_mixed
        if missing <= 0:
            return []
        wanted = self.refill_size(ctx.prompts_per_step, missing, num_mixed, len({group.prompt.id for group in groups}))
        size = min(wanted, ctx.num_prompts - len(ctx.rows))
        return ctx.refill(size) if size else []

    def refill_size(self, batch: int, missing: int, num_mixed: int, num_drawn: int) -> int:
        """New prompts to ask for, if as many of them are dropped as of those so far."""
        if self.full_batches or not num_mixed:
            return batch
        margin = 1.25 if self.margin is None else self.margin
        return min(math.ceil(margin * missing * num_drawn / num_mixed), batch)

    def regroup(self, ctx: StepContext, groups: list[Group]) -> list[Group]:
        kept = set(mixed_prompts(groups)[: ctx.prompts_per_step])
        return [group for group in groups if group.prompt.id in kept]

    def observe(self, ctx: StepContext, groups: list[Group], stats: StepStats) -> None:
        self.num_kept = len({group.prompt.id for group in groups})
        self.num_drawn = len(ctx.rows)
        self.short_steps += self.num_kept < ctx.prompts_per_step

    def report(self) -> dict[str, float]:
        share = self.num_kept / self.num_drawn if self.num_drawn else math.nan
        return {"kept_share": share, "short_steps": self.short_steps}


def mixed_prompts(groups: Sequence[Group]) -> list[str]:
    """Ids of the prompts with right and wrong rollouts, over all of their groups, in the order of the groups.

    That is the order of the draw: rounds follow one another, and within one each plan keeps the order of prompts.
    """
    outcomes: dict[str, set[bool]] = {}
    for group in groups:
        judged = [score.verdict == "correct" for score in group.scores if score.verdict != "failed"]
        outcomes.setdefault(group.prompt.id, set()).update(judged)
    return [prompt_id for prompt_id, seen in outcomes.items() if len(seen) == 2]


@dataclass
class SkipTrivial(Method):
    """Prompts that were trivial visit after visit are drawn less often."""

    target: float = 0.25  # share of trivial prompts that q is moved for: 1/3 all-correct, 2/3 all-wrong
    initial: float = 0.5  # both q, until the first phase ends
    q_min: float = 0.05
    q_max: float = 0.95

    q_easy: float = field(init=False, default=0.5)
    q_hard: float = field(init=False, default=0.5)
    streak: IntArray = field(
        init=False, default_factory=lambda: np.zeros(0, np.int64)
    )  # (N_D,) trivial visits in a row up to the last one; > 0 all-correct ones, < 0 all-wrong ones

    def start(self, config: RunConfig, num_prompts: int) -> list[str]:
        check(0 < self.target <= 1, "target", "in (0, 1]", self.target)
        check(0 < self.q_max <= 1, "q_max", "in (0, 1]", self.q_max)
        check(0 < self.q_min <= self.q_max, "q_min", f"in (0, q_max={self.q_max}]", self.q_min)
        limits = f"in [q_min={self.q_min}, q_max={self.q_max}]"
        check(self.q_min <= self.initial <= self.q_max, "initial", limits, self.initial)
        self.q_easy = self.q_hard = float(self.initial)
        self.streak = np.zeros(num_prompts, np.int64)
        notes = []
        if config.train.steps * config.train.prompts_per_step < num_prompts:
            notes.append(f"SkipTrivial: q stays {self.initial}, the run draws fewer prompts than the pool has")
        return notes

    def keep_probability(self) -> FloatArray:
        q = np.where(self.streak > 0, self.q_easy, self.q_hard)
        return np.maximum(q ** np.abs(self.streak), LEAST_KEPT)

    def weigh(self, ctx: StepContext, prompts: Sequence[Prompt]) -> FloatArray:
        u = uniforms(stream_key(ctx.seed, "skip", ctx.step), np.arange(len(self.streak)))
        return (u < self.keep_probability()).astype(np.float64)

    def observe(self, ctx: StepContext, groups: list[Group], stats: StepStats) -> None:
        num_judged, num_easy, num_hard = 0, 0, 0
        for prompt_id, (judged, correct) in ctx.clean.items():
            if not judged:
                continue
            row, rate = ctx.rows[prompt_id], correct / judged
            old = int(self.streak[row])
            easy, hard = rate >= ALL_CORRECT, rate <= ALL_WRONG
            self.streak[row] = max(old, 0) + 1 if easy else min(old, 0) - 1 if hard else 0
            num_judged, num_easy, num_hard = num_judged + 1, num_easy + easy, num_hard + hard
        if num_judged and ctx.visits >= ctx.num_prompts:  # before that most prompts are seen for the first time
            self.q_easy = self.moved(self.q_easy, 3 * num_easy >= self.target * num_judged)
            self.q_hard = self.moved(self.q_hard, 3 * num_hard >= 2 * self.target * num_judged)

    def moved(self, q: float, too_many: bool) -> float:
        return min(max(q - Q_CHANGE if too_many else q + Q_CHANGE, self.q_min), self.q_max)

    def report(self) -> dict[str, float]:
        return {"q_easy": self.q_easy, "q_hard": self.q_hard, "keep_share": float(self.keep_probability().mean())}


@dataclass
class PosteriorSampler(Method):
    """Prompts whose pass rate, as their posterior may have it, is nearest to a half."""

    lam: float = 1.0  # weight of what was known before a visit; the code has 0.5 on Countdown and Geometry
    pool: int = 16  # candidates for each prompt needed; the code has 8 there

    alpha: FloatArray = field(init=False, default_factory=lambda: np.ones(0))  # (N_D,) successes, and 1
    beta: FloatArray = field(init=False, default_factory=lambda: np.ones(0))  # (N_D,) failures, and 1

    owns: ClassVar[frozenset[str]] = frozenset({"selection"})

    def start(self, config: RunConfig, num_prompts: int) -> list[str]:
        check(0 < self.lam <= 1, "lam", "in (0, 1]", self.lam)
        check(self.pool >= 2, "pool", ">= 2", self.pool)  # one candidate a place leaves nothing to choose
        self.alpha, self.beta = np.ones(num_prompts), np.ones(num_prompts)
        return []

    def weigh(self, ctx: StepContext, prompts: Sequence[Prompt]) -> FloatArray:
        rows = self.candidates(ctx)
        rng = np.random.default_rng(stream_key(ctx.seed, "beta", ctx.step, ctx.round))
        rates = rng.beta(self.alpha[rows], self.beta[rows])
        weights = np.zeros(len(self.alpha))
        weights[rows[np.argsort(np.abs(rates - 0.5), kind="stable")[: ctx.need]]] = 1.0
        return weights

    def candidates(self, ctx: StepContext) -> IntArray:
        """Random rows, `pool` for each prompt needed where there are as many; none that this step has drawn."""
        drawn = list(ctx.rows.values())
        u = uniforms(stream_key(ctx.seed, "candidates", ctx.step), np.arange(len(self.alpha)))
        u[drawn] = -1.0
        return np.argsort(-u, kind="stable")[: min(self.pool * ctx.need, len(u) - len(drawn))]

    def observe(self, ctx: StepContext, groups: list[Group], stats: StepStats) -> None:
        for prompt_id, (judged, correct) in ctx.clean.items():
            if judged:
                row = ctx.rows[prompt_id]
                self.alpha[row] = self.lam * self.alpha[row] + (1 - self.lam) + correct
                self.beta[row] = self.lam * self.beta[row] + (1 - self.lam) + judged - correct

    def report(self) -> dict[str, float]:
        return {
            "mean_rate": float((self.alpha / (self.alpha + self.beta)).mean()),
            "visited_share": float((self.alpha + self.beta > 2).mean()),
        }


@dataclass
class FixedTemperature(Method):
    """Sampling at one temperature from some step on; before it at the run's own."""

    temperature: float = 1.2
    start_step: int = 0  # counted from 0

    order: ClassVar[int] = 20
    owns: ClassVar[frozenset[str]] = frozenset({"temperature"})

    def start(self, config: RunConfig, num_prompts: int) -> list[str]:
        check(0 < self.temperature < math.inf, "temperature", "> 0", self.temperature)
        steps = config.train.steps
        check(0 <= self.start_step < steps, "start_step", f"in [0, train.steps={steps})", self.start_step)
        return []

    def plan(self, ctx: StepContext, requests: list[Request]) -> list[Request]:
        if ctx.step < self.start_step:
            return requests
        return [dataclasses.replace(request, temperature=self.temperature) for request in requests]
