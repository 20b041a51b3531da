"""LEEPS, a reconstruction: prompts chosen from an exploit and an explore portfolio.

Paper: arXiv 2607.28077, of which only the abstract was at hand. It gives the skeleton; every constant here is ours, so
results of this class are not LEEPS's.

PortfolioSampler: among random candidates, the exploit portfolio holds prompts seen lately whose last group was mixed
(some rollouts correct, some not), the explore portfolio all others. Each gives a share of the step's prompts by its
recent rate of mixed groups. Exploit prompts are ranked by Thompson's rule, p ~ Beta(1 + a, 1 + b) of decayed counts,

    informative(p, G) (1 - exp(-age / cooldown))      informative(p, G) = 1 - p^G - (1 - p)^G

and explore prompts by u = E[informative] under a Beta whose counts come from their nearest neighbours (the hidden state
at the prompt's last token, centred and reduced to 256 numbers): at most `max_pseudo` rollouts, times a gate. The gate
opens only as far as the neighbours' pass rates have ranked the explore prompts' own; none is a neighbour of itself.

The price is coverage of the pool, which is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from e3fast.methods.base import Method
from e3fast.methods.portfolio import (
    Neighbours,
    ask_neighbours,
    directions,
    expected_informative,
    explore_beta,
    gate_of,
    informative,
    is_mixed,
    mixed_rates,
    no_neighbours,
    rested,
    split,
    top,
)
from e3fast.streams import stream_key, uniforms
from e3fast.tables import check
from e3fast.types import BoolArray, FloatArray, Group, IntArray, Prompt, StepContext, StepStats

if TYPE_CHECKING:
    from e3fast.config import RunConfig

LATENT_SIZE = 256
HALF_MAX = float(np.finfo(np.float16).max)


@dataclass
class PortfolioSampler(Method):
    """The step's prompts: seen ones that were mixed, and others that their neighbours speak for."""

    window: int = 10  # steps of outcomes that set the portfolios' shares
    share_low: float = 0.2  # of the exploit portfolio
    share_high: float = 0.8
    stale_after: int | None = None  # steps until what is known of a prompt counts no more; None = 1.25 pool passes
    decay: float = 0.98  # of old counts and of a neighbour's weight, per step
    cooldown: float = 5.0  # steps over which a prompt comes back
    score_temperature: float = 0.15  # of the explore draw: bigger = more random
    uniform_share: float = 0.1  # of the explore prompts, drawn without looking
    candidates: int | None = None  # random rows looked at; None = 16 for each prompt needed, 0 = the pool
    max_pseudo: float = 4.0  # rollouts that neighbours may stand for; 0 = no neighbours and no latents
    neighbours: int | None = None  # None = 16
    power: float | None = None  # of the cosine, in a neighbour's weight; None = 4
    gate_window: int | None = None  # pairs that set the gate; None = 512
    gate_min: int | None = None  # pairs before it opens; None = 64

    a: FloatArray = field(init=False, default_factory=lambda: np.zeros(0))  # (N_D,) decayed clean successes
    b: FloatArray = field(init=False, default_factory=lambda: np.zeros(0))  # (N_D,) decayed clean failures
    last_step: IntArray = field(init=False, default_factory=lambda: np.zeros(0, np.int64))  # (N_D,) -1 = never seen
    last_rate: FloatArray = field(init=False, default_factory=lambda: np.zeros(0))  # (N_D,) clean pass rate then
    latent: npt.NDArray[np.float16] = field(init=False, default_factory=lambda: np.zeros(0, np.float16))  # (N_D, 256)
    has_latent: BoolArray = field(init=False, default_factory=lambda: np.zeros(0, np.bool_))  # (N_D,)
    latents_at: int = field(init=False, default=0)  # step of the last pass over the whole pool
    outcomes: IntArray = field(
        init=False, default_factory=lambda: np.zeros((1, 2, 2), np.int64)
    )  # (window, exploit and explore, groups and mixed ones); step t in row t % window
    predicted: FloatArray = field(init=False, default_factory=lambda: np.zeros(0))  # neighbours' rates of explore picks
    found: FloatArray = field(init=False, default_factory=lambda: np.zeros(0))  # their own clean rates, same order
    fresh_for: int = field(init=False, default=0)  # stale_after, in steps

    owns: ClassVar[frozenset[str]] = frozenset({"selection"})
    needs: ClassVar[frozenset[str]] = frozenset({"latents"})

    def start(self, config: RunConfig, num_prompts: int) -> list[str]:
        self.check_knobs(config)
        passes = 1.25 * num_prompts / config.train.prompts_per_step
        self.fresh_for = math.ceil(passes) if self.stale_after is None else self.stale_after
        self.a, self.b, self.last_rate = np.zeros(num_prompts), np.zeros(num_prompts), np.zeros(num_prompts)
        self.last_step = np.full(num_prompts, -1, np.int64)
        self.outcomes = np.zeros((self.window, 2, 2), np.int64)
        if self.max_pseudo:
            self.latent = np.zeros((num_prompts, LATENT_SIZE), np.float16)
            self.has_latent = np.zeros(num_prompts, np.bool_)
        return []

    def check_knobs(self, config: RunConfig) -> None:
        size, batch = config.rollout.rollouts_per_prompt, config.train.prompts_per_step
        check(size >= 2, "rollout.rollouts_per_prompt", ">= 2 for portfolio_sampler: one alone is never mixed", size)
        check(self.window >= 1, "window", ">= 1", self.window)
        check(0 <= self.share_high <= 1, "share_high", "in [0, 1]", self.share_high)
        limits = f"in [0, share_high={self.share_high}]"
        check(0 <= self.share_low <= self.share_high, "share_low", limits, self.share_low)
        check(self.stale_after is None or self.stale_after >= 1, "stale_after", ">= 1", self.stale_after)
        check(0 < self.decay <= 1, "decay", "in (0, 1]", self.decay)
        check(self.cooldown > 0, "cooldown", "> 0", self.cooldown)
        check(self.score_temperature > 0, "score_temperature", "> 0", self.score_temperature)
        check(0 <= self.uniform_share <= 1, "uniform_share", "in [0, 1]", self.uniform_share)
        enough = not self.candidates or self.candidates >= batch
        check(enough, "candidates", f"0 (the pool) or >= prompts_per_step={batch}", self.candidates)
        check(self.max_pseudo >= 0, "max_pseudo", ">= 0", self.max_pseudo)
        self.check_neighbours()

    def check_neighbours(self) -> None:
        hint = " (to run without latents set max_pseudo = 0)"
        count, power, window, least = self.neighbour_knobs()
        if count < 1:
            raise ValueError(f"neighbours must be >= 1, got {count}{hint}")
        for name in ("neighbours", "power", "gate_window", "gate_min"):
            if not self.max_pseudo and getattr(self, name) is not None:
                raise ValueError(f"{name} is set but max_pseudo is 0: no neighbour is asked")
        check(power > 0, "power", "> 0", power)
        check(window >= 2, "gate_window", ">= 2", window)
        check(2 <= least <= window, "gate_min", f"in [2, gate_window={window}]", least)

    def neighbour_knobs(self) -> tuple[int, float, int, int]:
        known = lambda value, default: default if value is None else value  # noqa: E731
        return (
            known(self.neighbours, 16),
            known(self.power, 4.0),
            known(self.gate_window, 512),
            known(self.gate_min, 64),
        )

    def weigh(self, ctx: StepContext, prompts: Sequence[Prompt]) -> FloatArray:
        if self.max_pseudo:
            self.fetch_latents(ctx, prompts)
        exploit, explore = self.portfolios(ctx, self.candidate_rows(ctx))
        num_exploit, num_explore = split(ctx.need, self.share(), len(exploit), len(explore))
        weights = np.zeros(len(prompts))
        weights[self.pick_exploit(ctx, exploit, num_exploit)] = 1
        weights[self.pick_explore(ctx, explore, num_explore)] = 1
        return weights

    def fetch_latents(self, ctx: StepContext, prompts: Sequence[Prompt]) -> None:
        """Fill in missing latents and renew those of a whole pool that has moved on.

        State, but no more than a cache: a second call in the same step finds all in place.
        """
        if ctx.step - self.latents_at >= self.fresh_for:
            self.has_latent[:] = False
            self.latents_at = ctx.step
        missing = [prompt for prompt in prompts if not self.has_latent[prompt.row]]
        if missing:
            self.store([prompt.row for prompt in missing], ctx.latents(missing))

    def store(self, rows: list[int], latents: FloatArray) -> None:
        self.latent[rows] = np.clip(np.nan_to_num(latents), -HALF_MAX, HALF_MAX)
        self.has_latent[rows] = True

    def candidate_rows(self, ctx: StepContext) -> IntArray:
        """Random rows to look at, in rising order, without those drawn in this step already."""
        free = np.setdiff1d(np.arange(len(self.a)), np.fromiter(ctx.rows.values(), np.int64))
        size = 16 * ctx.need if self.candidates is None else self.candidates or len(free)
        u = uniforms(stream_key(ctx.seed, "candidates", ctx.step), free)
        return np.sort(free[top(u, size)])

    def portfolios(self, ctx: StepContext, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Rows of the exploit portfolio (fresh, and mixed when last seen), and the others."""
        exploit = self.is_fresh(ctx, rows) & is_mixed(self.last_rate[rows])
        return rows[exploit], rows[~exploit]

    def is_fresh(self, ctx: StepContext, rows: IntArray) -> BoolArray:
        return (self.last_step[rows] >= 0) & (ctx.step - self.last_step[rows] <= self.fresh_for)

    def share(self) -> float:
        exploit, explore = mixed_rates(self.outcomes)
        return min(max(exploit / (exploit + explore), self.share_low), self.share_high)

    def pick_exploit(self, ctx: StepContext, rows: IntArray, count: int) -> IntArray:
        random = np.random.Generator(np.random.Philox(key=stream_key(ctx.seed, "thompson", ctx.step, ctx.round)))
        rates = random.beta(1 + self.a[rows], 1 + self.b[rows])
        back = rested(ctx.step - self.last_step[rows], self.cooldown)
        return rows[top(informative(rates, ctx.rollouts_per_prompt) * back, count)]

    def pick_explore(self, ctx: StepContext, rows: IntArray, count: int) -> IntArray:
        looked_at = math.floor((1 - self.uniform_share) * count + 1e-9)  # 0.7 x 10 is 7, not 6.999
        gumbel = -np.log(-np.log(uniforms(stream_key(ctx.seed, "explore", ctx.step), rows)))
        chance = np.maximum(self.explore_scores(ctx, rows), 1e-300)
        best = top(np.log(chance) / self.score_temperature + gumbel, looked_at)
        rest = np.delete(rows, best)
        u = uniforms(stream_key(ctx.seed, "explore-uniform", ctx.step), rest)
        return np.concatenate([rows[best], rest[top(u, count - looked_at)]])

    def explore_scores(self, ctx: StepContext, rows: IntArray) -> FloatArray:
        """u: the expected chance that each row's next group is mixed."""
        seen = self.last_step >= 0
        if not seen.any():
            half = np.full(len(rows), 0.5)
            return expected_informative(half, half, ctx.rollouts_per_prompt)
        gate = self.gate()
        near = self.neighbours_of(ctx, rows) if gate else no_neighbours(len(rows))
        base_rate = float(self.last_rate[seen].mean())
        size = ctx.rollouts_per_prompt
        return expected_informative(
            *explore_beta(near, base_rate, self.a[rows], self.b[rows], size, self.max_pseudo, gate), size
        )

    def neighbours_of(self, ctx: StepContext, rows: IntArray) -> Neighbours:
        """What the nearest fresh prompts say of each row."""
        count, power = self.neighbour_knobs()[:2]
        all_rows = np.arange(len(self.a))
        others = all_rows[self.is_fresh(ctx, all_rows) & self.has_latent]
        if not len(others):
            return no_neighbours(len(rows))
        mean = self.latent[self.has_latent].mean(axis=0, dtype=np.float32)
        place = np.full(len(self.a), -1)
        place[others] = np.arange(len(others))
        return ask_neighbours(
            directions(self.latent[rows], mean),
            directions(self.latent[others], mean),
            place[rows],
            self.last_rate[others],
            (ctx.step - self.last_step[others]).astype(np.float64),
            count,
            power=power,
            decay=self.decay,
        )

    def gate(self) -> float:
        """How far neighbours are believed."""
        return gate_of(self.predicted, self.found, self.neighbour_knobs()[3])

    def observe(self, ctx: StepContext, groups: list[Group], stats: StepStats) -> None:
        judged = [(ctx.rows[prompt_id], n, c) for prompt_id, (n, c) in ctx.clean.items() if n]
        rows = np.array([row for row, _, _ in judged], np.int64)
        counts, correct = (np.array([entry[i] for entry in judged], np.float64) for i in (1, 2))
        self.note_outcomes(ctx, rows, correct / counts)  # by what was known when they were chosen
        self.a *= self.decay
        self.b *= self.decay
        self.a[rows] += correct
        self.b[rows] += counts - correct
        self.last_step[rows] = ctx.step
        self.last_rate[rows] = correct / counts
        if self.max_pseudo and stats.latents:
            ids = list(stats.latents)
            self.store([ctx.rows[i] for i in ids], np.stack([stats.latents[i] for i in ids]))

    def note_outcomes(self, ctx: StepContext, rows: IntArray, rates: FloatArray) -> None:
        """Mixed groups of each portfolio, and what neighbours had said of the explore prompts."""
        slot = self.outcomes[ctx.step % self.window]
        slot[:] = 0
        exploit = np.isin(rows, self.portfolios(ctx, rows)[0])
        for portfolio, members in enumerate((exploit, ~exploit)):
            slot[portfolio] = members.sum(), is_mixed(rates[members]).sum()
        if not self.max_pseudo:
            return
        near = self.neighbours_of(ctx, rows[~exploit])
        told = near.weight > 0  # without neighbours nothing was said
        window = self.neighbour_knobs()[2]
        self.predicted = np.concatenate([self.predicted, near.rate[told]])[-window:]
        self.found = np.concatenate([self.found, rates[~exploit][told]])[-window:]

    def report(self) -> dict[str, float]:
        exploit, explore = mixed_rates(self.outcomes)
        shares = {"share_exploit": self.share(), "rate_exploit": exploit, "rate_explore": explore}
        seen = float((self.last_step >= 0).mean()) if len(self.last_step) else 0.0
        return shares | {"gate": self.gate(), "coverage": seen}
