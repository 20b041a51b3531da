"""3PO: policy optimisation under perturbed parameters (arXiv 2608.09805; code insait-institute/c3po).

Rollouts are sampled from draws theta_d = m + sigma z of the policy's weights m, fresh each step, so that exploration is
in the weights and consistent over a whole completion. Three variants, by what credit and gradient see:

- b3po: one draw; groups, gradient and loss as plain GRPO, taken at that draw.
- m3po: M draws; each has groups of its own and a loss of its own at its draw, the step takes their mean.
- c3po: N draws; a prompt's rollouts are pooled over the draws for mean and deviation, the gradient is taken at m with
  the token ratio pi_m / pi_draw under the run's clip, and a sequence stays iff its ratio is in [1/mask, mask].

The noise is isotropic with one sigma beside the run's AdamW (an ablation of the authors), or that of IVON
(arXiv 2402.17641), which learns a precision for each weight: sigma = 1 / sqrt(ess (h + delta)). Differences: c3po's
gradient is at the mean (the sources leave it open; it has the least variance); a controller keeps c3po's share of kept
sequences between two bounds by moving sigma, where the noise is isotropic; noise is a function of seed, step, draw and
parameter name, the same in any sharding, and is never stored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from e3fast.ivon import IvonConfig
from e3fast.methods.base import Method
from e3fast.methods.e3 import RolloutBudget
from e3fast.noise import gaussian
from e3fast.streams import stream_key
from e3fast.tables import check
from e3fast.types import Group, LossParams, Request, StepContext, StepStats

if TYPE_CHECKING:
    from torch import Tensor

    from e3fast.config import RunConfig

IVON_KNOBS = tuple(f.name for f in dataclasses.fields(IvonConfig))
KEEP_KNOBS = ("keep_low", "keep_high", "factor", "sigma_min", "sigma_max")
EMA = 0.9  # weight of the old smoothed keep rate


@dataclass
class PerturbedWeights(Method):
    """Rollouts from draws of the weights."""

    variant: Literal["b3po", "m3po", "c3po"] = "c3po"
    draws: int | None = None  # None = 4, b3po 1
    posterior: Literal["isotropic", "ivon"] = "isotropic"
    sigma: float | None = None  # isotropic; None = 1e-3
    ess: float | None = None  # ivon, as are the next six; None = 1e9: raise on collapse, lower on stagnation
    hess_init: float | None = None  # None = 1e-3
    prior_precision: float | None = None  # None = 1e-6
    lr: float | None = None  # None = 1
    clip_radius: float | None = None  # None = 1e-3
    betas: tuple[float, float] | None = None  # None = (0.9, 0.9999)
    warmup: int | None = None  # None = 34 steps
    mask: float | None = None  # gradient at the mean; None = 2
    gradient_at: Literal["mean", "draw"] | None = None  # b3po alone may choose; None = draw
    controller: bool | None = None  # None = on where gradient is at the mean and noise isotropic
    keep_low: float | None = None  # controller: below this share of kept sequences sigma falls; None = 0.6
    keep_high: float | None = None  # above it sigma rises; None = 0.85
    factor: float | None = None  # by this factor a step; None = 1.02
    sigma_min: float | None = None  # None = 1e-5
    sigma_max: float | None = None  # None = 1e-2
    scope: Literal["all", "mlp"] = "all"  # weights that are perturbed
    behaviour_logprobs: Literal["engine", "learner"] | None = None  # gradient at the mean; None = engine

    sigma_now: float = field(init=False, default=0.0)
    keep_rate_ema: float | None = field(init=False, default=None)
    skipped: int = field(init=False, default=0)  # steps of which the mask left nothing

    order: ClassVar[int] = 30
    owns: ClassVar[frozenset[str]] = frozenset({"draw", "optimizer"})
    needs: ClassVar[frozenset[str]] = frozenset({"one_update"})

    @property
    def num_draws(self) -> int:
        return self.draws if self.draws is not None else 1 if self.variant == "b3po" else 4

    @property
    def at_mean(self) -> bool:
        return self.variant == "c3po" or self.gradient_at == "mean"

    @property
    def band(self) -> float | None:
        """The mask's c where there is one: a drawn sequence stays iff its ratio is in [1/c, c]."""
        return (self.mask or 2.0) if self.at_mean else None

    @property
    def controlled(self) -> bool:
        return self.controller if self.controller is not None else self.at_mean and self.posterior == "isotropic"

    @property
    def ivon(self) -> IvonConfig | None:
        """The optimizer's knobs, where the posterior is its own."""
        if self.posterior != "ivon":
            return None
        given = {name: getattr(self, name) for name in IVON_KNOBS if getattr(self, name) is not None}
        return IvonConfig(**given)

    def start(self, config: RunConfig, num_prompts: int) -> list[str]:
        self.check_variant()
        self.check_posterior(config)
        self.check_controller()
        if self.at_mean and config.loss.aggregation != "token":
            got = config.loss.aggregation
            raise ValueError(f"perturbed_weights with a mask needs loss.aggregation 'token', got {got!r}")
        if self.at_mean and config.train.entropy_rows != "all":
            raise ValueError("perturbed_weights with a mask needs train.entropy_rows 'all', got 'trained'")
        self.sigma_now = 1e-3 if self.sigma is None else self.sigma
        return self.check_groups(config)

    def check_variant(self) -> None:
        check(self.draws is None or self.draws >= 1, "draws", ">= 1", self.draws)
        if self.variant == "b3po" and self.num_draws != 1:
            raise ValueError(f"b3po uses one draw, got draws={self.draws}")
        if self.variant != "b3po" and self.gradient_at is not None:
            raise ValueError(f"gradient_at is fixed for {self.variant}: remove it (got {self.gradient_at!r})")
        check(self.mask is None or self.mask > 1, "mask", "> 1", self.mask)
        for name in ("mask", "behaviour_logprobs"):
            if getattr(self, name) is not None and not self.at_mean:
                raise ValueError(f"{name} is set but the gradient of {self.variant} is taken at the draw")

    def check_posterior(self, config: RunConfig) -> None:
        unused = ("sigma",) if self.posterior == "ivon" else IVON_KNOBS
        for name in unused:
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is set but posterior is {self.posterior!r}")
        check(self.sigma is None or self.sigma >= 0, "sigma", ">= 0", self.sigma)
        if self.posterior == "ivon" and config.train.optimizer != "ivon":
            raise ValueError("posterior 'ivon' replaces the optimiser: set train.optimizer = \"ivon\"")
        if self.ivon is not None:
            for name in ("ess", "hess_init", "prior_precision", "lr", "clip_radius"):
                check(getattr(self.ivon, name) > 0, name, "> 0", getattr(self.ivon, name))
            check(all(0 <= b < 1 for b in self.ivon.betas), "betas", "in [0, 1)", self.ivon.betas)
            check(self.ivon.warmup >= 0, "warmup", ">= 0", self.ivon.warmup)

    def check_controller(self) -> None:
        if self.controller and (self.posterior == "ivon" or not self.at_mean):
            raise ValueError("controller moves sigma by the mask's keep rate: it needs isotropic noise and the mask")
        for name in KEEP_KNOBS:
            if getattr(self, name) is not None and not self.controlled:
                raise ValueError(f"{name} is set but the controller is off")
        low, high, factor, least, most = self.keeping()
        check(0 <= low < high <= 1, "keep_low", f"in [0, keep_high={high})", low)
        check(factor > 1, "factor", "> 1", factor)
        check(0 < least < most, "sigma_min", f"in (0, sigma_max={most})", least)

    def keeping(self) -> tuple[float, float, float, float, float]:
        defaults = (0.6, 0.85, 1.02, 1e-5, 1e-2)
        pairs = zip((getattr(self, name) for name in KEEP_KNOBS), defaults, strict=True)
        low, high, factor, least, most = (default if given is None else given for given, default in pairs)
        return low, high, factor, least, most

    def check_groups(self, config: RunConfig) -> list[str]:
        budget = next((m for m in config.methods if isinstance(m, RolloutBudget)), None)
        name, smallest = "rollouts_per_prompt", config.rollout.rollouts_per_prompt
        if budget:
            name, smallest = "min_group", budget.min_group
        if self.variant == "m3po" and smallest < 2 * self.num_draws:
            wanted = f"m3po with {self.num_draws} draws needs at least {2 * self.num_draws} rollouts a prompt"
            raise ValueError(f"{wanted} (2 per draw), got {name}={smallest}")
        if self.variant == "c3po" and smallest < self.num_draws:
            return [f"some prompts have no rollout of some draws: {name}={smallest}, draws={self.num_draws}"]
        return []

    def plan(self, ctx: StepContext, requests: list[Request]) -> list[Request]:
        return [part for request in requests for part in self.split(request)]

    def split(self, request: Request) -> list[Request]:
        """One request a draw; together they sample what the whole would have, each part with weights of its own."""
        total, parts, done = request.num_rollouts, [], 0
        for draw in range(1, self.num_draws + 1):
            late = (draw - 1 - request.prompt.row) % self.num_draws < total % self.num_draws
            count = total // self.num_draws + late
            if count:
                first = request.first_rollout + done
                parts.append(dataclasses.replace(request, num_rollouts=count, first_rollout=first, draw=draw))
            done += count
        return parts

    def perturb(
        self, ctx: StepContext, draw: int, name: str, weight: Tensor, optimizer_state: Mapping[str, Tensor]
    ) -> Tensor:
        if self.scope == "mlp" and ".mlp." not in name:
            return weight
        key = stream_key(ctx.seed, "noise", ctx.step, draw, name)
        noise = gaussian(key, weight.numel(), weight.device).view_as(weight)
        return weight + self.deviation(optimizer_state) * noise

    def deviation(self, optimizer_state: Mapping[str, Tensor]) -> Tensor | float:
        """sigma of a weight's entries; with IVON from its precision, which starts at hess_init."""
        if self.ivon is None:
            return self.sigma_now
        precision = optimizer_state.get("hess", self.ivon.hess_init)
        return (self.ivon.ess * (precision + self.ivon.prior_precision)) ** -0.5

    def regroup(self, ctx: StepContext, groups: list[Group]) -> list[Group]:
        return pool_draws(groups) if self.variant == "c3po" else groups

    def tune(self, ctx: StepContext, loss: LossParams) -> LossParams:
        if not self.at_mean:
            return dataclasses.replace(loss, gradient_at="draw")
        if self.band is not None:  # the mask is the one correction of the ratio
            loss = dataclasses.replace(loss, importance_sampling="off", importance_band=0.0)
        return dataclasses.replace(loss, seq_mask=self.band, behaviour_logprobs=self.behaviour_logprobs or "engine")

    def observe(self, ctx: StepContext, groups: list[Group], stats: StepStats) -> None:
        if math.isnan(stats.keep_rate):
            return
        self.skipped += stats.keep_rate == 0
        old = stats.keep_rate if self.keep_rate_ema is None else self.keep_rate_ema
        self.keep_rate_ema = EMA * old + (1 - EMA) * stats.keep_rate
        if self.controlled:
            low, high, factor, least, most = self.keeping()
            if self.keep_rate_ema > high:
                self.sigma_now *= factor
            elif self.keep_rate_ema < low:
                self.sigma_now /= factor
            self.sigma_now = min(max(self.sigma_now, least), most)

    def report(self) -> dict[str, float]:
        sigma = {} if self.ivon else {"sigma": self.sigma_now}
        kept = {} if self.keep_rate_ema is None else {"keep_rate_ema": self.keep_rate_ema, "skipped": self.skipped}
        return sigma | kept


def pool_draws(groups: list[Group]) -> list[Group]:
    """All first groups of a prompt as one, in the order of their draws, at the place of its first."""
    pooled: dict[str, Group] = {}
    out: list[Group] = []
    for group in groups:
        if group.request.kind != "first" or not group.request.draw:
            out.append(group)
        elif group.prompt.id in pooled:
            pooled[group.prompt.id] = join(pooled[group.prompt.id], group)
        else:
            pooled[group.prompt.id] = group
            out.append(group)
    return [pooled[g.prompt.id] if g.request.kind == "first" and g.request.draw else g for g in out]


def join(a: Group, b: Group) -> Group:
    request = dataclasses.replace(a.request, num_rollouts=a.request.num_rollouts + b.request.num_rollouts)
    return Group(a.id, request, a.rollouts + b.rollouts, a.scores + b.scores)
