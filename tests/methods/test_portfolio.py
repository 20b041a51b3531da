"""The arithmetic of the portfolio: chances, neighbours, shares and the gate, at worked values and by law."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e3fast.methods.portfolio import (
    ask_neighbours,
    directions,
    expected_informative,
    explore_beta,
    gate_of,
    informative,
    no_neighbours,
    ranks,
    rested,
    spearman,
    split,
    weigh_neighbours,
)

ONE = np.ones(1)


@pytest.mark.parametrize(
    ("alpha", "beta", "value"),
    [(1, 1, 0.777778), (0.5, 0.5, 0.607239), (2, 2, 0.890909), (1, 9, 0.470547), (4.7, 0.7, 0.507604)],
)
def test_expected_informative(alpha, beta, value):
    assert expected_informative(ONE * alpha, ONE * beta, 8)[0] == pytest.approx(value, abs=1e-6)
    assert expected_informative(ONE * beta, ONE * alpha, 8)[0] == pytest.approx(value, abs=1e-6)


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e4), st.integers(2, 64))
def test_expected_informative_is_a_chance_below_that_of_the_mean(alpha, beta, size):
    """Jensen: informative is concave in the rate."""
    u = expected_informative(ONE * alpha, ONE * beta, size)[0]
    assert -1e-9 <= u <= informative(ONE * alpha / (alpha + beta), size)[0] + 1e-9


def test_neighbours_and_the_beta_they_give():
    cosines, rates, ages = (np.array([row]) for row in ([0.9, 0.6, -0.3], [0.5, 0.0, 1.0], [10.0, 2.0, 1.0]))
    near = weigh_neighbours(cosines, rates, ages, 4, 0.98)
    assert near.weight[0] == pytest.approx(0.660549, abs=1e-6) and near.rate[0] == pytest.approx(0.405785, abs=1e-6)
    for gate, b, expected_beta, u in ((1, 0, 3.176862, 0.903517), (1, 8, 7.176862, 0.792302), (0, 0, 0.8, 0.682961)):
        alpha, beta = explore_beta(near, 0.4, 0 * ONE, b * ONE, 8, 4, gate)
        assert alpha[0] == pytest.approx(2.223138 if gate else 0.6, abs=1e-6)
        assert beta[0] == pytest.approx(expected_beta, abs=1e-6)
        assert expected_informative(alpha, beta, 8)[0] == pytest.approx(u, abs=1e-6)


def test_neighbours_that_all_point_away_say_nothing():
    near = weigh_neighbours(-ONE[None], ONE[None], ONE[None], 4, 0.98)
    assert near.weight[0] == near.rate[0] == 0
    assert no_neighbours(2).weight.tolist() == [0, 0]


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 600), st.integers(0, 40), st.integers(1, 45))
def test_neighbours_in_chunks_are_those_of_a_plain_loop(seed, num_own, num_others, count):
    """The `count` largest cosines, a prompt's own left out."""
    rng = np.random.default_rng(seed)
    unit = lambda n: directions(rng.standard_normal((n, 5)), np.zeros(5, np.float32))  # noqa: E731
    own, others, rates, ages = unit(num_own), unit(num_others), rng.random(num_others), rng.integers(1, 9, num_others)
    itself = rng.integers(-1, num_others, num_own) if num_others else np.full(num_own, -1)
    found = ask_neighbours(own, others, itself, rates, ages.astype(float), count, power=4, decay=0.9)
    for i in range(0, num_own, 97):
        allowed = [j for j in range(num_others) if j != itself[i]]
        cosines = {j: float(own[i] @ others[j]) for j in allowed}
        nearest = sorted(allowed, key=lambda j: -cosines[j])[:count]
        weights = [max(cosines[j], 0) ** 4 * 0.9 ** ages[j] for j in nearest]
        assert found.weight[i] == pytest.approx(sum(weights), abs=1e-5)
        if sum(weights) > 1e-3:
            assert found.rate[i] == pytest.approx(np.dot(weights, rates[nearest]) / sum(weights), abs=1e-3)


def test_latents_are_centred_before_their_cosine():
    raw = np.array([[101.0, 100], [99, 100], [100, 100]])
    assert directions(raw, raw.mean(axis=0).astype(np.float32)).tolist() == [[1, 0], [-1, 0], [0, 0]]


@given(st.integers(0, 64), st.floats(0, 1), st.integers(0, 80), st.integers(0, 80))
def test_split_gives_as_many_as_there_are(need, share, num_exploit, num_explore):
    exploit, explore = split(need, share, num_exploit, num_explore)
    assert 0 <= exploit <= num_exploit and 0 <= explore <= num_explore
    assert exploit + explore == min(need, num_exploit + num_explore)
    if num_explore >= need:
        assert exploit == min(round(share * need), num_exploit)


def test_cool_down():
    assert rested(np.array([1, 5, 10]), 5) == pytest.approx([0.1813, 0.6321, 0.8647], abs=5e-5)


def test_rank_correlation():
    assert ranks(np.array([3.0, 1, 3, 7])).tolist() == [2.5, 1, 2.5, 4]
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([1.0, 3, 2, 4])) == pytest.approx(0.8)
    assert spearman(np.array([1.0, 2, 2, 3]), np.array([1.0, 2, 2, 9])) == pytest.approx(1)
    assert spearman(np.ones(4), np.arange(4.0)) == 0


@pytest.mark.parametrize(
    ("order", "gate"),
    [([4, 2, 3, 1, 5], 0), ([3, 2, 1, 4], 0.5), ([4, 2, 1, 3, 5], 1), ([1, 2, 3, 4], 1), ([4, 3, 2, 1], 0)],
)
def test_gate(order, gate):
    """Rank correlations .1, .2, .3, 1, -1; closed where pairs are too few."""
    predicted, found = np.arange(1.0, len(order) + 1), np.array(order, float)
    assert gate_of(predicted, found, 2) == pytest.approx(gate)
    assert gate_of(predicted, found, len(order) + 1) == 0
