"""E3: rollout budgets by difficulty, and a temperature that holds entropy.

Paper: arXiv 2505.18573; code: LiaoMengqi/E3-RL4LLMs.

RolloutBudget: prompts are ranked by clean pass rate once a phase; a batch's rollouts go to the harder ones at equal
total, within bounds that widen phase by phase. `mode="faithful"` repeats the published algorithm; "fixed" differs: no
group above its bound, integer shares that lose no rollout to a 1e-8, equal ranks treated alike, unseen prompts in the
middle, ties broken at random each phase, and no run of all to the first prompts where nothing is known.

EntropyTemperature (paper's Eq. 4 and 5): with F = ln V + ln ln V for V logits,

    tau <- tau (1 + gain tau ln(H*/H) / F)      H* = H_init a(t), a(t) falls from 1 to `anneal_factor` by a half cosine

It differs by clips of the step and of the range, one controller for all ranks, and state that is saved.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from e3fast.methods.base import Method
from e3fast.methods.budget import (
    allocate_faithful,
    allocate_fixed,
    allocate_greedy,
    allocate_sera,
    bounds,
    knapsack_gain,
    rank_weights,
    variance_gain,
)
from e3fast.streams import stream_key, uniforms
from e3fast.tables import check
from e3fast.types import FloatArray, Group, IntArray, LossParams, Request, Score, StepContext, StepStats

if TYPE_CHECKING:
    from e3fast.config import RunConfig

logger = logging.getLogger(__name__)


@dataclass
class RolloutBudget(Method):
    """Unequal rollout counts at equal total."""

    min_group: int = 4
    max_group: int = 12
    widen: int = 2  # bounds move by this each phase
    phase_prompts: int | None = None  # visits of one phase; None = the pool's size
    estimator: Literal["rank", "variance", "knapsack", "sera"] = "rank"
    variance_form: Literal["rloo", "drgrpo"] | None = None  # "variance" only; None = rloo
    mode: Literal["fixed", "faithful"] | None = None  # "rank" only; None = fixed
    ties: Literal["random", "mean", "index"] | None = None  # "rank" only; None = random, index where faithful
    unseen: Literal["middle", "hardest"] | None = None  # "rank" only; None = middle, hardest where faithful
    leftover: Literal["hardest", "remainder"] | None = None  # "rank" only; None = hardest
    decay: float | None = None  # old counts x decay at each phase's end; None = 1, sera 0.75
    prior: float | None = None  # Beta(prior, prior) of the other estimators; None = 0.5
    group_weight: Literal["token", "prompt"] | None = None  # None = token for rank and knapsack, prompt for the others
    length_mu: float = 0.0  # shorter correct answers to easy prompts earn more: r - mu l / (1 + mu l)
    length_share: float = 0.0  # the easiest share of prompts that this touches

    succ: FloatArray = field(init=False, default_factory=lambda: np.zeros(0))  # (N_D,) clean successes
    count: FloatArray = field(init=False, default_factory=lambda: np.zeros(0))  # (N_D,) clean rollouts
    weight: IntArray = field(
        init=False, default_factory=lambda: np.zeros(0, dtype=np.int64)
    )  # (N_D,) 2 N_seen k, frozen
    rate: FloatArray = field(init=False, default_factory=lambda: np.zeros(0))  # (N_D,) pass rate with prior, frozen
    num_ranked: int = field(init=False, default=0)
    phase: int = field(init=False, default=0)
    phase_size: int = field(init=False, default=0)  # visits of one phase

    order: ClassVar[int] = 10
    owns: ClassVar[frozenset[str]] = frozenset({"counts"})

    def start(self, config: RunConfig, num_prompts: int) -> list[str]:
        self.check_knobs(config)
        self.phase_size = self.phase_prompts or num_prompts
        for name in ("succ", "count"):
            setattr(self, name, np.zeros(num_prompts))
        self.rate = np.full(num_prompts, 0.5)
        self.weight = np.full(num_prompts, -1, dtype=np.int64)
        notes = []
        steps, batch = config.train.steps, config.train.prompts_per_step
        if steps * batch < 2 * self.phase_size:
            uniform = min(steps, -(-self.phase_size // batch))
            notes.append(f"rollout budget stays uniform for the first {uniform} of {steps} steps")
        if self.min_group == 1:
            notes.append("min_group = 1: groups of one rollout give no gradient (got 1)")
        return notes

    def check_knobs(self, config: RunConfig) -> None:
        group, batch = config.rollout.rollouts_per_prompt, config.train.prompts_per_step
        check(1 <= self.min_group <= group, "min_group", f"in [1, rollouts_per_prompt={group}]", self.min_group)
        check(self.max_group >= group, "max_group", f"at least rollouts_per_prompt={group}", self.max_group)
        check(self.widen >= 1, "widen", ">= 1", self.widen)
        if self.phase_prompts is not None:
            check(self.phase_prompts >= batch, "phase_prompts", f">= prompts_per_step={batch}", self.phase_prompts)
        check(self.decay is None or 0 < self.decay <= 1, "decay", "in (0, 1]", self.decay)
        check(self.prior is None or self.prior > 0, "prior", "> 0", self.prior)
        if (self.length_mu > 0) != (self.length_share > 0):
            a, b = ("length_share", "length_mu") if self.length_share else ("length_mu", "length_share")
            raise ValueError(f"{a} is set but {b} is 0: set both or neither")
        check(
            0 <= self.length_share <= 1 and self.length_mu >= 0,
            "length_share, length_mu",
            "in [0, 1], >= 0",
            (self.length_share, self.length_mu),
        )
        self.check_estimator()
        if config.loss.aggregation != "token" and self.group_weight == "prompt":
            raise ValueError(
                "group_weight 'prompt' needs loss.aggregation 'token': other aggregations set their own weights"
            )

    def check_estimator(self) -> None:
        if self.estimator != "rank":
            for name in ("mode", "ties", "unseen", "leftover"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is set but estimator is {self.estimator!r}: it belongs to 'rank'")
        elif self.prior is not None:
            raise ValueError("prior is set but estimator is 'rank', which uses raw pass rates")
        if self.variance_form is not None and self.estimator != "variance":
            raise ValueError(f"variance_form is set but estimator is {self.estimator!r}")
        if self.estimator == "variance":
            least = 3 if self.variance_form == "drgrpo" else 2
            form = f"variance with form {self.variance_form or 'rloo'}"
            if self.min_group < least:
                raise ValueError(f"{form} needs min_group >= {least}, got {self.min_group}")
        if self.mode == "faithful":
            for name, fixed in (("ties", "index"), ("unseen", "hardest")):
                if getattr(self, name) is not None:
                    got = f"{name}={getattr(self, name)!r}"
                    raise ValueError(f"mode 'faithful' fixes {name} to {fixed!r}; remove {got} or use mode 'fixed'")
            if self.leftover is not None:
                raise ValueError(f"mode 'faithful' has its own leftover rule; remove leftover={self.leftover!r}")

    def difficulty(self, row: int) -> float | None:
        """k in [0, 1), bigger = harder; None before the first ranking."""
        if not self.num_ranked:
            return None
        weight = int(self.weight[row])
        if weight >= 0:
            return weight / (2 * self.num_ranked)
        return 0.5

    def plan(self, ctx: StepContext, requests: list[Request]) -> list[Request]:
        if not requests:
            return requests
        low, high = bounds(self.phase, ctx.rollouts_per_prompt, self.min_group, self.max_group, self.widen)
        total = sum(request.num_rollouts for request in requests)
        rows = [request.prompt.row for request in requests]
        if low * len(rows) > total or high * len(rows) < total:  # another planner's counts leave no room: keep them
            return requests
        counts = self.allocate(ctx.seed, rows, total, low, high)
        return [dataclasses.replace(r, num_rollouts=n) for r, n in zip(requests, counts, strict=True)]

    def allocate(self, seed: int, rows: list[int], total: int, low: int, high: int) -> list[int]:
        order = uniforms(stream_key(seed, "budget-ties", self.phase), rows).tolist()
        if self.estimator == "rank" and self.mode == "faithful":
            return allocate_faithful([self.difficulty(row) for row in rows], total, low, high)
        if self.estimator == "rank":
            middle = self.num_ranked  # 2 N_seen x 1/2
            hardest = 2 * self.num_ranked
            unknown = hardest if self.unseen == "hardest" else middle
            weights = [int(self.weight[row]) if self.weight[row] >= 0 else unknown for row in rows]
            return allocate_fixed(weights, total, low, high, self.leftover or "hardest", order)
        rates = [float(self.rate[row]) for row in rows]
        if self.estimator == "sera":
            return allocate_sera(rates, total, low, high, order)[0]
        form = self.variance_form or "rloo"
        sizes = range(low, high)
        if self.estimator == "variance":
            gains = [[variance_gain(rate, n, form) for n in sizes] for rate in rates]
        else:
            gains = [[knapsack_gain(rate, n) for n in sizes] for rate in rates]
        return allocate_greedy(gains, rates, total, low, high, order)

    def tune(self, ctx: StepContext, loss: LossParams) -> LossParams:
        weight = self.group_weight or ("token" if self.estimator in ("rank", "knapsack") else "prompt")
        if self.group_weight is None and (weight == "token" or loss.aggregation != "token"):
            return loss
        return dataclasses.replace(loss, group_weight=weight)

    def regroup(self, ctx: StepContext, groups: list[Group]) -> list[Group]:
        if not self.length_mu:
            return groups
        easy = lambda g: (k := self.difficulty(g.prompt.row)) is not None and k <= self.length_share  # noqa: E731
        return [
            self.shorten(group) if self.weight[group.prompt.row] >= 0 and easy(group) else group for group in groups
        ]

    def shorten(self, group: Group) -> Group:
        def shaped(score: Score, num_tokens: int) -> Score:
            cost = self.length_mu * num_tokens
            return (
                dataclasses.replace(score, value=score.value - cost / (1 + cost))
                if score.verdict == "correct"
                else score
            )

        pairs = zip(group.scores, group.rollouts, strict=True)
        return dataclasses.replace(
            group, scores=tuple(shaped(score, len(rollout.token_ids)) for score, rollout in pairs)
        )

    def observe(self, ctx: StepContext, groups: list[Group], stats: StepStats) -> None:
        for prompt_id, (judged, correct) in ctx.clean.items():
            self.succ[ctx.rows[prompt_id]] += correct
            self.count[ctx.rows[prompt_id]] += judged
        if ctx.visits // self.phase_size > self.phase:
            decay = self.decay if self.decay is not None else (0.75 if self.estimator == "sera" else 1.0)
            self.succ *= decay
            self.count *= decay
            self.phase = ctx.visits // self.phase_size
            self.rank(ctx.seed)

    def rank(self, seed: int) -> None:
        """Freeze ranks and rates for the phase that starts."""
        prior = self.prior if self.prior is not None else 0.5
        self.rate = (self.succ + prior) / (self.count + 2 * prior)
        raw = np.divide(self.succ, self.count, out=np.zeros_like(self.succ), where=self.count > 0)
        seen = np.flatnonzero(self.count > 0)
        if self.mode == "faithful":
            seen = np.arange(len(raw))  # unseen prompts count as pass rate 0
        ties = self.ties or ("index" if self.mode == "faithful" else "random")
        order = uniforms(stream_key(seed, "budget-ties", self.phase), seen) if ties == "random" else seen.astype(float)
        self.weight = np.full(len(raw), -1, dtype=np.int64)
        self.weight[seen] = rank_weights(raw[seen], ties, order)
        self.num_ranked = len(seen)

    def report(self) -> dict[str, float]:
        return {"phase": self.phase, "num_ranked": self.num_ranked}


@dataclass
class EntropyTemperature(Method):
    """One sampling temperature for all ranks, moved so that the policy's entropy follows its target."""

    target: float | str = "first"  # "first" = the run's own first steps; else nats per token
    init_steps: int = 1
    anneal: bool = True
    anneal_factor: float | None = None  # None = 0.9 where anneal is on
    anneal_ratio: float | None = None  # None = 0.4: the share of steps, at the end, over which the target falls
    anneal_lag: int | None = None  # None = 0; the released code has 1
    tau_min: float = 0.5
    tau_max: float = 2.0
    max_change: float = 0.1  # relative change a step
    ema: float = 0.0  # weight of the old smoothed entropy
    gain: float = 1.0

    tau: float = field(init=False, default=1.0)
    init_sum: float = field(init=False, default=0.0)
    init_count: int = field(init=False, default=0)
    h_target0: float | None = field(init=False, default=None)
    h_ema: float | None = field(init=False, default=None)
    skipped: int = field(init=False, default=0)  # steps in a row without a usable entropy
    last_target: float | None = field(init=False, default=None)
    spread: float = field(init=False, default=0.0)  # F = ln V + ln ln V

    order: ClassVar[int] = 20
    owns: ClassVar[frozenset[str]] = frozenset({"temperature"})
    needs: ClassVar[frozenset[str]] = frozenset({"entropy", "top_p_1"})

    def start(self, config: RunConfig, num_prompts: int) -> list[str]:
        target = self.target
        if not (target == "first" or (isinstance(target, float | int) and target > 0)):
            raise ValueError(f'target entropy must be "first" or > 0, got {target}')
        for name in ("anneal_factor", "anneal_ratio", "anneal_lag"):
            if not self.anneal and getattr(self, name) is not None:
                raise ValueError(f"{name} is set but anneal is off")
        factor, ratio = self.annealing()[:2]
        check(0 < factor <= 1, "anneal_factor", "in (0, 1]", factor)
        check(0 <= ratio <= 1, "anneal_ratio", "in [0, 1]", ratio)
        check(self.anneal_lag in (None, 0, 1), "anneal_lag", "0 or 1", self.anneal_lag)
        check(0 < self.tau_min < self.tau_max, "tau_min", f"in (0, tau_max={self.tau_max}]", self.tau_min)
        tau, limits = config.rollout.temperature, f"in [tau_min={self.tau_min}, tau_max={self.tau_max}]"
        check(self.tau_min <= tau <= self.tau_max, "rollout.temperature", limits, tau)
        check(self.max_change > 0, "max_change", "> 0", self.max_change)
        check(0 <= self.ema < 1, "ema", "in [0, 1)", self.ema)
        check(self.gain > 0, "gain", "> 0", self.gain)
        check(self.init_steps >= 1, "init_steps", ">= 1", self.init_steps)
        self.tau = config.rollout.temperature
        if target != "first":
            self.h_target0 = float(target)
        return []

    def annealing(self) -> tuple[float, float, int]:
        known = lambda value, default: default if value is None else value  # noqa: E731
        return known(self.anneal_factor, 0.9), known(self.anneal_ratio, 0.4), known(self.anneal_lag, 0)

    def plan(self, ctx: StepContext, requests: list[Request]) -> list[Request]:
        return [dataclasses.replace(request, temperature=self.tau) for request in requests]

    def observe(self, ctx: StepContext, groups: list[Group], stats: StepStats) -> None:
        self.spread = self.spread or width_spread(stats.num_classes)
        self.learn(ctx.step + 1, ctx.max_steps, stats.entropy)

    def learn(self, step: int, max_steps: int, entropy: float) -> None:
        """Take the entropy of 1-based `step`, set the temperature of the next."""
        if not entropy > 1e-6:  # NaN too
            self.skipped += 1
            if self.skipped % 10 == 0:
                logger.warning("no usable entropy for %d steps (got %s): the temperature stays", self.skipped, entropy)
            return
        self.skipped = 0
        self.h_ema = entropy if self.h_ema is None else self.ema * self.h_ema + (1 - self.ema) * entropy
        if step <= self.init_steps:
            self.init_sum += entropy
            self.init_count += 1
            self.last_target = self.h_target0
            if self.target == "first":
                self.last_target = self.h_target0 = self.init_sum / self.init_count
            return
        if self.h_target0 is None:  # every first step was unusable: start from this one
            self.h_target0 = entropy
        self.last_target = self.h_target0 * self.anneal_share(step, max_steps)
        change = self.gain * self.tau * math.log(self.last_target / self.h_ema) / self.spread
        change = min(max(change, -self.max_change), self.max_change)
        self.tau = min(max(self.tau * (1 + change), self.tau_min), self.tau_max)

    def anneal_share(self, step: int, max_steps: int) -> float:
        """a(t) of 1-based step t: 1, then a half cosine down to `anneal_factor` at the last step."""
        if not self.anneal:
            return 1.0
        factor, ratio, lag = self.annealing()
        start = max_steps - math.floor(ratio * max_steps)
        t = step - lag
        if t < start or start == max_steps:
            return 1.0
        return factor + (1 - factor) * 0.5 * (1 + math.cos(math.pi * (t - start) / (max_steps - start)))

    def report(self) -> dict[str, float]:
        target = self.last_target if self.last_target is not None else math.nan
        return {"tau_next": self.tau, "target": target, "skipped": self.skipped}


def width_spread(num_classes: int) -> float:
    """F = ln V + ln ln V of the paper's derivation."""
    return math.log(num_classes) + math.log(math.log(num_classes))
