"""RolloutBudget: worked values of every estimator, mode and tie rule, and its laws."""

import dataclasses
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from e3fast.config import RolloutConfig, RunConfig, TrainConfig
from e3fast.methods import RolloutBudget
from e3fast.methods.budget import (
    allocate_faithful,
    allocate_fixed,
    allocate_greedy,
    allocate_sera,
    bounds,
    knapsack_gain,
    variance_gain,
)
from tests.records import context, group, prompt, request, stats

UNKNOWN = [None] * 4
VECTORS = [  # k, G, (lo, hi), faithful, fixed, fixed with remainder
    ([0, 0.25, 0.5, 0.75], 8, (4, 12), [4, 6, 10, 12], [4, 6, 10, 12], [4, 7, 9, 12]),
    ([0.1, 0.2, 0.3, 0.4], 8, (6, 10), [6, 7, 9, 10], [6, 7, 9, 10], [7, 8, 8, 9]),
    (
        [i / 10 for i in range(10)],
        8,
        (4, 12),
        [4, 4, 5, 6, 7, 8, 10, 12, 12, 12],
        [4, 4, 5, 6, 7, 8, 10, 12, 12, 12],
        [4, 5, 6, 7, 8, 8, 9, 10, 11, 12],
    ),
    (UNKNOWN, 8, (8, 8), [8] * 4, [8] * 4, [8] * 4),
    (UNKNOWN, 8, (4, 12), [12, 12, 4, 4], [8] * 4, [8] * 4),
    ([0, 0, 0, 0], 8, (4, 12), [12, 12, 4, 4], [8] * 4, [8] * 4),
    ([0.3, 0.9], 4, (2, 16), [2, 6], [3, 5], [3, 5]),
    ([0.05, 0.05, 0.05, 0.95], 8, (4, 12), [7, 4, 4, 17], [7, 7, 6, 12], [7, 7, 6, 12]),
    ([0.5] * 4, 8, (4, 12), [11, 7, 7, 7], [8] * 4, [8] * 4),
    ([0.5] * 3, 8, (4, 12), [10, 7, 7], [8] * 3, [8] * 3),
    ([0.9, 0.9, 0.9, 0], 8, (4, 12), [10, 9, 9, 4], [10, 9, 9, 4], [10, 9, 9, 4]),
    ([0.5, 0.8, 0.2], 5, (2, 9), [4, 8, 3], [5, 7, 3], [5, 7, 3]),
    ([0.7], 8, (4, 12), [8], [8], [8]),
]


def integer_weights(k):
    """2 N k for an N that makes it whole; unknown is the middle, and all alike."""
    return [int(Fraction(str(1 if x is None else x)) * 200) for x in k]


@pytest.mark.parametrize(("k", "group_size", "limits", "faithful", "fixed", "remainder"), VECTORS)
def test_allocation_vectors(k, group_size, limits, faithful, fixed, remainder):
    total, order = group_size * len(k), list(range(len(k)))
    assert allocate_faithful(k, total, *limits) == faithful
    assert allocate_fixed(integer_weights(k), total, *limits, "hardest", order) == fixed
    assert allocate_fixed(integer_weights(k), total, *limits, "remainder", order) == remainder


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=40),
    st.integers(1, 16),
    st.integers(0, 15),
    st.integers(0, 60),
    st.sampled_from(["hardest", "remainder"]),
)
def test_fixed_conserves_caps_and_follows_difficulty(weights, group_size, below, above, leftover):
    low, high, total = max(group_size - below, 1), group_size + above, group_size * len(weights)
    counts = allocate_fixed(weights, total, low, high, leftover, list(range(len(weights))))
    assert sum(counts) == total and min(counts) >= low and max(counts) <= high
    hardest = sorted(zip(weights, counts, strict=True))
    for (w, n), (v, m) in pairwise(hardest):
        assert w == v or n <= m


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 0.999)), min_size=1, max_size=40), st.integers(1, 16), st.integers(0, 8)
)
def test_faithful_conserves(k, group_size, spread):
    low, high = max(group_size - spread, 1), group_size + spread
    assert sum(allocate_faithful(k, group_size * len(k), low, high)) == group_size * len(k)


def test_bounds_widen_phase_by_phase():
    assert [bounds(e, 8, 4, 12, 2) for e in range(4)] == [(8, 8), (6, 10), (4, 12), (4, 12)]


RATES = [0.05, 0.25, 0.5, 0.75, 0.95]


@pytest.mark.parametrize(
    ("limits", "rloo", "drgrpo", "knapsack", "sera", "s"),
    [
        ((4, 12), [5, 10, 11, 9, 5], [4, 10, 12, 10, 4], [9, 12, 7, 8, 4], [12, 12, 8, 4, 4], 4.6210),
        ((2, 16), [5, 10, 11, 9, 5], None, [11, 12, 7, 8, 2], [16, 12, 6, 4, 2], 3.3479),
    ],
)
def test_other_estimators(limits, rloo, drgrpo, knapsack, sera, s):
    order, sizes = list(range(5)), range(*limits)
    variance = lambda form: [[variance_gain(p, n, form) for n in sizes] for p in RATES]  # noqa: E731
    assert allocate_greedy(variance("rloo"), RATES, 40, *limits, order) == rloo
    if drgrpo:
        assert allocate_greedy(variance("drgrpo"), RATES, 40, *limits, order) == drgrpo
    worth = [[knapsack_gain(p, n) for n in sizes] for p in RATES]
    assert allocate_greedy(worth, RATES, 40, *limits, order) == knapsack
    counts, found = allocate_sera(RATES, 40, *limits, order)
    assert counts == sera and found == pytest.approx(s, abs=5e-5)


def test_estimators_by_rank_on_the_same_rates():
    k = [0.8, 0.6, 0.4, 0.2, 0.0]
    assert allocate_fixed(integer_weights(k), 40, 4, 12, "hardest", range(5)) == [12, 10, 8, 6, 4]
    assert allocate_faithful(k, 40, 4, 12) == [12, 12, 7, 5, 4]
    assert allocate_fixed(integer_weights(k), 40, 2, 16, "hardest", range(5)) == [14, 11, 8, 5, 2]
    assert allocate_faithful(k, 40, 2, 16) == [16, 11, 7, 4, 2]


def started(num_prompts=6, batch=3, **knobs):
    config = RunConfig(rollout=RolloutConfig(rollouts_per_prompt=8), train=TrainConfig(prompts_per_step=batch))
    method = RolloutBudget(**knobs)
    method.start(config, num_prompts)
    return method


def see(method, seen, visits=6, seed=7):
    ctx = context(seed=seed, visits=visits, num_prompts=6)
    for row, counts in seen.items():
        ctx.clean[str(row)], ctx.rows[str(row)] = counts, row
    method.observe(ctx, [], stats())


SEEN = {0: (8, 8), 1: (8, 4), 2: (8, 0), 3: (12, 0), 4: (8, 6)}


@pytest.mark.parametrize(
    ("knobs", "k", "counts"),
    [
        ({"mode": "faithful"}, [0, 2 / 6, 3 / 6, 4 / 6, 1 / 6, 5 / 6], [4, 7, 8, 12, 5, 12]),
        ({}, [0, 2 / 5, 4 / 5, 3 / 5, 1 / 5, 1 / 2], [4, 7, 12, 12, 5, 8]),
        ({"ties": "mean"}, [0, 2 / 5, 7 / 10, 7 / 10, 1 / 5, 1 / 2], [4, 7, 12, 12, 5, 8]),
    ],
)
def test_ranks_and_counts_with_ties_and_an_unseen_prompt(knobs, k, counts):
    method = started(**knobs)
    see(method, SEEN)
    assert [method.difficulty(row) for row in range(6)] == pytest.approx(k)
    assert method.allocate(7, list(range(6)), 48, 4, 12) == counts


def test_decay_vector():
    method = started(decay=0.75, estimator="variance")
    see(method, {0: (8, 1)}, visits=5)
    see(method, {0: (12, 3)}, visits=5)
    method.succ[0], method.count[0] = 0.75 * 1 + 3, 0.75 * 8 + 12
    assert (method.succ[0], method.count[0]) == (3.75, 18)
    method.rank(7)
    assert method.rate[0] == pytest.approx(0.223684, abs=5e-7)


def test_ranks_are_frozen_inside_a_phase_and_phase_0_is_uniform():
    method = started()
    requests = [request(prompt(row)) for row in range(3)]
    assert [r.num_rollouts for r in method.plan(context(rollouts_per_prompt=8), requests)] == [8, 8, 8]
    see(method, SEEN, visits=3)
    assert method.difficulty(2) is None
    see(method, SEEN, visits=6)
    before = [method.difficulty(row) for row in range(6)]
    see(method, {0: (8, 0)}, visits=9)
    assert [method.difficulty(row) for row in range(6)] == before and method.phase == 1


def test_counts_fall_with_pass_rate_in_a_toy_run():
    method, rng = started(num_prompts=30, batch=10), np.random.default_rng(0)
    rate, visits = np.linspace(0, 1, 30), 0
    for _ in range(9):
        rows = rng.permutation(30)[:10]
        visits += 10
        planned = method.plan(context(rollouts_per_prompt=8, visits=visits), [request(prompt(r)) for r in rows])
        assert sum(r.num_rollouts for r in planned) == 80
        ctx = context(visits=visits)
        for asked in planned:
            ctx.rows[asked.prompt.id] = asked.prompt.row
            n = asked.num_rollouts
            ctx.clean[asked.prompt.id] = (n, int(rng.binomial(n, rate[asked.prompt.row])))
        method.observe(ctx, [], stats())
    sizes = [r.num_rollouts for r in planned]
    assert np.corrcoef(sizes, [rate[r.prompt.row] for r in planned])[0, 1] < -0.8


def test_length_shaping_touches_only_correct_answers_to_easy_prompts():
    method = started(length_mu=0.001, length_share=0.5)
    see(method, SEEN)
    easy = group(prompt(0), lengths=[250, 1000, 4000], verdicts=["correct", "correct", "wrong"])
    hard = group(prompt(2), lengths=[250], verdicts=["correct"])
    shaped = method.regroup(context(), [easy, hard])
    assert [s.value for s in shaped[0].scores] == pytest.approx([0.8, 0.5, 0.0])
    assert shaped[1] is hard and shaped[0].counts == easy.counts


def test_group_weight_follows_the_estimator():
    loss = RunConfig().loss
    assert started().tune(context(), loss).group_weight == "token"
    assert started(estimator="sera").tune(context(), loss).group_weight == "prompt"
    assert started(group_weight="prompt").tune(context(), loss).group_weight == "prompt"


def test_notes():
    config = RunConfig(rollout=RolloutConfig(rollouts_per_prompt=8), train=TrainConfig(prompts_per_step=10, steps=15))
    notes = RolloutBudget(min_group=1).start(config, 100)
    assert notes == [
        "rollout budget stays uniform for the first 10 of 15 steps",
        "min_group = 1: groups of one rollout give no gradient (got 1)",
    ]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"min_group": 9}, "min_group must be in [1, rollouts_per_prompt=8], got 9"),
        ({"max_group": 6}, "max_group must be at least rollouts_per_prompt=8, got 6"),
        (
            {"estimator": "variance", "variance_form": "drgrpo", "min_group": 2},
            "variance with form drgrpo needs min_group >= 3, got 2",
        ),
        ({"decay": 0.0}, "decay must be in (0, 1], got 0"),
        ({"length_share": 0.1}, "length_share is set but length_mu is 0: set both or neither"),
        (
            {"mode": "faithful", "ties": "random"},
            "mode 'faithful' fixes ties to 'index'; remove ties='random' or use mode 'fixed'",
        ),
        ({"phase_prompts": 2}, "phase_prompts must be >= prompts_per_step=3, got 2"),
        ({"estimator": "sera", "ties": "mean"}, "ties is set but estimator is 'sera'"),
        ({"variance_form": "rloo"}, "variance_form is set but estimator is 'rank'"),
        ({"prior": 1.0}, "prior is set but estimator is 'rank'"),
    ],
)
def test_bad_knobs(knobs, message):
    with pytest.raises(ValueError) as error:
        started(**knobs)
    assert message in str(error.value)


def test_resumed_method_goes_on_alike():
    method = started()
    see(method, SEEN)
    again = started()
    again.restore(method.state())
    for a in dataclasses.fields(method):
        assert np.array_equal(getattr(method, a.name), getattr(again, a.name))
