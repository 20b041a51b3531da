"""PortfolioSampler: worked values of its arithmetic, its draw, what it learns, and a toy in which it must win."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e3fast.config import RolloutConfig, RunConfig, TrainConfig
from e3fast.methods import Method, PortfolioSampler
from e3fast.methods.leeps import LATENT_SIZE
from e3fast.methods.portfolio import Neighbours, expected_informative, mixed_rates, split
from e3fast.prompts import PromptPool
from e3fast.streams import stream_key, uniforms
from tests.records import context, prompt, stats

ONE = np.ones(1)


def config(batch=3, size=8, methods=()):
    return RunConfig(
        rollout=RolloutConfig(rollouts_per_prompt=size), train=TrainConfig(prompts_per_step=batch), methods=methods
    )


def started(num_prompts=6, batch=3, **knobs):
    method = PortfolioSampler(**knobs)
    method.start(config(batch), num_prompts)
    return method


def picks(method, ctx):
    """The rows it chooses."""
    weights = method.weigh(ctx, [prompt(row) for row in range(len(method.a))])
    assert set(np.unique(weights)) <= {0.0, 1.0}
    return np.flatnonzero(weights).tolist()


def learn(method, step, clean, latents=None, **changes):
    """Observe a step in which row r had clean[r] = (judged, correct)."""
    rows = {str(row): row for row in clean}
    ctx = context(step=step, clean={str(row): counts for row, counts in clean.items()}, rows=rows, **changes)
    method.observe(ctx, [], stats(latents=latents))


@settings(deadline=None)
@given(st.data())
def test_as_many_prompts_as_needed_none_of_them_twice(data):
    """Whatever is known of the pool: 0/1 weights, `need` of them 1, this step's own rows never."""
    num_prompts = data.draw(st.integers(2, 60))
    need = data.draw(st.integers(1, num_prompts))
    taken = data.draw(st.sets(st.integers(0, num_prompts - 1), max_size=num_prompts - need))
    knobs = data.draw(
        st.fixed_dictionaries(
            {"candidates": st.sampled_from([None, 0, need]), "uniform_share": st.sampled_from([0.0, 0.1, 1.0])}
        )
    )
    method = started(num_prompts, need, max_pseudo=data.draw(st.sampled_from([0.0, 4.0])), **knobs)
    seen = data.draw(st.dictionaries(st.integers(0, num_prompts - 1), st.integers(0, 8)))
    learn(method, 0, {row: (8, c) for row, c in seen.items()})
    ctx = context(step=data.draw(st.integers(1, 5)), need=need, rows={f"p{row}": row for row in taken})
    before = dataclasses.replace(ctx)
    chosen = picks(method, ctx)
    assert len(chosen) == need and not taken & set(chosen) and ctx == before
    assert picks(method, ctx) == chosen


def test_only_candidates_are_chosen():
    """The rows with the largest u of the step's stream."""
    method = started(200, 5, candidates=10)
    u = uniforms(stream_key(7, "candidates", 4), np.arange(200))
    assert set(picks(method, context(step=4, need=5))) <= set(np.argsort(-u)[:10].tolist())


def test_an_unknown_pool_is_drawn_at_random():
    """No prompt has an advantage, and another step draws others."""
    drawn = [picks(started(40, 8), context(step=step, need=8)) for step in range(60)]
    times = np.bincount(np.concatenate(drawn), minlength=40)
    assert all(len(rows) == 8 for rows in drawn) and times.min() >= 3 and times.max() <= 25


def test_mixed_prompts_are_exploited_after_a_rest():
    """Of the seen ones, those of mixed outcome and long unseen come first."""
    method = started(12, 2, share_low=1.0, share_high=1.0, max_pseudo=0.0)
    learn(method, 0, {0: (800, 400), 1: (800, 400)})
    learn(method, 19, {2: (800, 400), 3: (800, 400), 4: (800, 796), 5: (800, 0)})
    assert method.fresh_for == 8
    method.fresh_for = 30
    assert picks(method, context(step=20, need=2)) == [0, 1]
    assert picks(method, context(step=20, need=4)) == [0, 1, 2, 3]
    method.fresh_for = 8  # 0 and 1 are stale
    assert picks(method, context(step=20, need=3)) == [2, 3, 4]


def test_shares_of_the_portfolios():
    outcomes = np.array([[[40, 30], [90, 24]]])
    assert mixed_rates(outcomes) == pytest.approx((0.738095, 0.271739), abs=1e-6)
    method = started()
    method.outcomes = outcomes
    assert method.share() == pytest.approx(0.730907, abs=1e-6)
    assert split(64, method.share(), 1000, 1000) == (47, 17)


@given(st.integers(0, 500), st.floats(0, 1), st.integers(0, 500), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_the_share_stays_inside_its_limits(groups, mixed, others, other_mixed, low, more):
    method = started(share_low=low, share_high=low + (1 - low) * more)
    method.outcomes = np.array([[[groups, int(mixed * groups)], [others, int(other_mixed * others)]]])
    assert low <= method.share() <= method.share_high


def test_thompson_draws_follow_the_counts():
    """A prompt known to be half solved beats one of a few rollouts often, not always."""
    method = started(2, 1, share_low=1.0, share_high=1.0, max_pseudo=0.0)
    learn(method, 0, {0: (80, 40), 1: (8, 7)})
    times = [picks(method, context(step=1, seed=seed, need=1)) for seed in range(300)]
    assert 200 < times.count([0]) < 300


def test_explore_prefers_what_may_be_mixed_and_looks_elsewhere_too():
    """Prompts that failed often come last where every pick is scored, and as often as others where none is."""
    counts = {}
    for uniform_share in (0.0, 1.0):
        method = started(20, 5, share_low=0.0, share_high=0.0, max_pseudo=0.0, uniform_share=uniform_share)
        learn(method, 0, {row: (200, 0) for row in range(10)})
        learn(method, 1, {19: (8, 4)})
        rows = [row for seed in range(40) for row in picks(method, context(step=2, seed=seed, need=5))]
        counts[uniform_share] = sum(row < 10 for row in rows)
    assert counts[0.0] == 0 and 70 < counts[1.0] < 130


def test_explore_scores():
    """Nothing observed: Beta(.5, .5). Then the pool's rate and a prompt's own old counts."""
    method = started(4, max_pseudo=0.0, decay=0.5)
    rows = np.arange(4)
    assert method.explore_scores(context(), rows) == pytest.approx([0.607239] * 4, abs=1e-6)
    learn(method, 0, {0: (8, 0), 1: (8, 8)})
    learn(method, 1, {1: (8, 2)})
    a, b, base = np.array([0, 6.0, 0, 0]), np.array([4.0, 6, 0, 0]), 0.125  # row 1: 8/2 + 2 and 0/2 + 6
    expected = expected_informative(base + 0.2 + a / 2, 1 - base + 0.2 + b / 2, 8)
    assert method.explore_scores(context(step=2), rows) == pytest.approx(expected)


def test_neighbours_move_scores_as_far_as_the_gate_is_open():
    """Row 2 looks like row 0 (half solved), row 3 like row 1 (never): seen through an open gate only."""
    latents = np.zeros((4, LATENT_SIZE))
    latents[:, 0] = [1, -1, 2, -2]
    method = started(4, gate_min=2)
    ctx = context(step=1, latents=lambda prompts: latents[[p.row for p in prompts]])
    learn(method, 0, {0: (8, 4), 1: (8, 0)})
    picks(method, ctx)
    assert np.ptp(method.explore_scores(ctx, np.array([2, 3]))) == 0
    method.predicted, method.found = np.arange(4.0), np.arange(4.0)
    like_half, like_never = method.explore_scores(ctx, np.array([2, 3]))
    assert like_half > 0.8 > 0.5 > like_never
    near = method.neighbours_of(ctx, np.array([0, 2]))
    assert isinstance(near, Neighbours) and near.weight == pytest.approx([0, 0.98])  # 0 is not its own neighbour


def test_what_a_step_teaches():
    method = started(6, 2, window=2, decay=0.5)
    learn(method, 0, {0: (8, 4), 1: (8, 8), 2: (0, 0)})
    assert method.a.tolist() == [4, 8, 0, 0, 0, 0] and method.b.tolist() == [4, 0, 0, 0, 0, 0]
    assert method.last_step.tolist() == [0, 0, -1, -1, -1, -1] and method.last_rate[:2].tolist() == [0.5, 1]
    assert method.outcomes.tolist() == [[[0, 0], [2, 1]], [[0, 0], [0, 0]]]  # failed rollouts make no group
    learn(method, 1, {0: (8, 0), 1: (8, 2)})  # 0 was mixed: exploit
    assert method.a.tolist()[:2] == [2, 6] and method.b.tolist()[:2] == [10, 6]
    assert method.outcomes.tolist() == [[[0, 0], [2, 1]], [[1, 0], [1, 1]]]
    learn(method, 2, {5: (8, 1)})  # step 0 leaves the window
    assert method.outcomes.tolist() == [[[0, 0], [1, 1]], [[1, 0], [1, 1]]]
    assert method.report()["coverage"] == pytest.approx(0.5)
    assert method.report()["rate_explore"] == pytest.approx(3 / 4)


def test_pairs_for_the_gate_are_explore_prompts_with_neighbours():
    """What neighbours said before the step was learned from; the last `gate_window` of them."""
    latents = np.zeros((6, LATENT_SIZE))
    latents[:, 0] = [1, 1, 1, -1, -1, -1]
    method = started(6, gate_window=3, gate_min=2)
    ctx = context(latents=lambda prompts: latents[[p.row for p in prompts]])
    picks(method, ctx)
    learn(method, 0, {0: (8, 4)})  # nobody to ask yet
    assert not method.predicted.size
    learn(method, 1, {0: (8, 8), 1: (8, 2), 3: (8, 1)})  # 0 is exploited, 3 has no neighbour on its side
    assert method.predicted.tolist() == [0.5] and method.found.tolist() == [0.25]
    learn(method, 2, {2: (8, 0), 4: (8, 7), 5: (8, 6), 0: (8, 0)})
    assert method.found.tolist() == [0.875, 0.75, 0] and method.predicted.tolist()[:2] == [0.125, 0.125]


def test_latents_are_fetched_once_and_again_when_stale():
    asked = []

    def latents(prompts):
        asked.append([p.row for p in prompts])
        return np.full((len(prompts), LATENT_SIZE), float(len(asked)))

    method = started(4, stale_after=3)
    for step in (0, 1, 2, 3, 4):
        picks(method, context(step=step, latents=latents))
        picks(method, context(step=step, round=1, need=1, rows={"0": 0}, latents=latents))
    assert asked == [[0, 1, 2, 3]] * 2
    learn(method, 4, {1: (8, 1)}, latents={"1": np.full(LATENT_SIZE, 1e9)})
    assert method.latent[:, 0].tolist() == [2, 65504, 2, 2]  # the step's own are the freshest; halves end at 65504


def test_without_neighbours_nothing_needs_latents():
    method = started(6, max_pseudo=0.0)
    learn(method, 0, {0: (8, 4), 1: (8, 1)}, latents={"0": np.ones(LATENT_SIZE)})
    assert len(picks(method, context(step=1, latents=None))) == 3 and not method.latent.size
    assert method.report()["gate"] == 0


NUM_PROMPTS, BATCH = 1000, 16


class Toy:
    """A model whose chance at a prompt is sigmoid(skill - difficulty) and whose skill grows with each mixed group.

    Difficulties have sd 3; half of their variance is a smooth function of a 16-dimensional latent.
    """

    def __init__(self, seed):
        self.seed, self.rng, self.skill = seed, np.random.default_rng(seed), -3.0
        hidden = self.rng.standard_normal((NUM_PROMPTS, 16))
        smooth = np.sin(hidden @ self.rng.standard_normal((16, 3)) / 2).sum(axis=1)
        smooth = (smooth - smooth.mean()) / smooth.std()
        self.difficulty = 3 * (smooth + self.rng.standard_normal(NUM_PROMPTS)) / np.sqrt(2)
        self.latents = np.full((NUM_PROMPTS, LATENT_SIZE), 5.0)
        self.latents[:, :16] += hidden
        self.pool = PromptPool([prompt(row) for row in range(NUM_PROMPTS)], seed)

    def step(self, method, step):
        """Share of mixed groups."""
        latents = lambda prompts: self.latents[[p.row for p in prompts]]  # noqa: E731
        ctx = context(seed=self.seed, step=step, num_prompts=NUM_PROMPTS, need=BATCH, latents=latents)
        drawn = self.pool.draw(BATCH, [("method", method.weigh(ctx, self.pool.prompts))], step)
        assert len({p.row for p in drawn}) == BATCH and self.pool.topped_up == 0
        for p in drawn:
            chance = 1 / (1 + np.exp(self.difficulty[p.row] - self.skill))
            ctx.rows[p.id], ctx.clean[p.id] = p.row, (8, int(self.rng.binomial(8, chance)))
        mixed = float(np.mean([0 < c < 8 for _, c in ctx.clean.values()]))
        self.skill += 0.02 * mixed
        method.observe(ctx, [], stats(latents={p.id: self.latents[p.row] for p in drawn}))
        return mixed


def run_toy(method, steps, seed=0, toy=None, first=0):
    method = method if toy else sized(method)
    toy = toy or Toy(seed)
    return toy, float(np.mean([toy.step(method, step) for step in range(first, steps)]))


def sized(method):
    method.start(config(BATCH), NUM_PROMPTS)
    return method


@pytest.mark.parametrize("seed", [0, 1])
def test_toy_has_more_mixed_groups(seed):
    """The share of mixed groups is .15 above that of uniform draws; without neighbours too."""
    uniform = run_toy(Method(), 120, seed)[1]
    for method in (PortfolioSampler(), PortfolioSampler(max_pseudo=0.0)):
        assert run_toy(method, 120, seed)[1] >= uniform + 0.15
        report = method.report()
        assert 0.2 <= report["share_exploit"] <= 0.8 and 0.4 < report["coverage"] < 0.8


@pytest.mark.parametrize("seed", [0, 1])
def test_shuffled_latents_close_the_gate(seed):
    """It opens where latents tell of difficulty; once they do not, it is shut before the window has passed."""
    method = PortfolioSampler(gate_window=256)
    toy, _ = run_toy(method, 100, seed)
    assert method.gate() > 0.1
    toy.latents = toy.latents[toy.rng.permutation(NUM_PROMPTS)]
    method.has_latent[:] = False  # the pool's latents are fetched anew
    run_toy(method, 200, toy=toy, first=100)
    assert method.gate() == 0


def test_a_resumed_run_draws_the_same():
    """Through JSON after 30 steps, then 10 steps on both sides."""
    method = PortfolioSampler(gate_min=16)
    toy, _ = run_toy(method, 30)
    again = sized(PortfolioSampler(gate_min=16))
    again.restore(json.loads(json.dumps(method.state())))
    assert again.state() == method.state() and again.latent.dtype == np.float16 and method.predicted.size > 16
    for step in range(30, 40):
        latents = lambda prompts: toy.latents[[p.row for p in prompts]]  # noqa: E731
        ctx = context(step=step, need=BATCH, latents=latents)
        rows = picks(method, ctx)
        assert rows == picks(again, ctx)
        for each in (method, again):
            learn(each, step, {row: (8, row % 9) for row in rows})
    assert again.state() == method.state()


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"share_low": 0.9}, r"share_low must be in \[0, share_high=0.8\], got 0.9"),
        ({"share_high": 1.5}, r"share_high must be in \[0, 1\], got 1.5"),
        ({"neighbours": 0}, r"neighbours must be >= 1, got 0 \(to run without latents set max_pseudo = 0\)"),
        ({"neighbours": 4, "max_pseudo": 0.0}, "neighbours is set but max_pseudo is 0: no neighbour is asked"),
        ({"power": 4.0, "max_pseudo": 0.0}, "power is set but max_pseudo is 0"),
        ({"gate_window": 99, "max_pseudo": 0.0}, "gate_window is set but max_pseudo is 0"),
        ({"gate_min": 99, "max_pseudo": 0.0}, "gate_min is set but max_pseudo is 0"),
        ({"max_pseudo": -1.0}, "max_pseudo must be >= 0, got -1.0"),
        ({"power": 0.0}, "power must be > 0, got 0.0"),
        ({"gate_window": 1}, "gate_window must be >= 2, got 1"),
        ({"gate_min": 600}, r"gate_min must be in \[2, gate_window=512\], got 600"),
        ({"window": 0}, "window must be >= 1, got 0"),
        ({"stale_after": 0}, "stale_after must be >= 1, got 0"),
        ({"decay": 0.0}, r"decay must be in \(0, 1\], got 0.0"),
        ({"cooldown": 0.0}, "cooldown must be > 0, got 0.0"),
        ({"score_temperature": 0.0}, "score_temperature must be > 0, got 0.0"),
        ({"uniform_share": 1.1}, r"uniform_share must be in \[0, 1\], got 1.1"),
        ({"candidates": 2}, r"candidates must be 0 \(the pool\) or >= prompts_per_step=3, got 2"),
        ({"candidates": -1}, r"candidates must be 0 \(the pool\) or >= prompts_per_step=3, got -1"),
    ],
)
def test_bad_knobs(knobs, message):
    with pytest.raises(ValueError, match=message):
        started(**knobs)


def test_groups_of_one_are_refused():
    message = "rollout.rollouts_per_prompt must be >= 2 for portfolio_sampler: one alone is never mixed, got 1"
    with pytest.raises(ValueError, match=message):
        PortfolioSampler().start(config(size=1), 6)
