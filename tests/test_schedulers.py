"""Every restated scheduler places every sample once, and does on small inputs what its rule says."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import packing
from benchmarks import schedulers_fit as fit
from benchmarks import schedulers_kk as kk
from benchmarks.results import Row
from benchmarks.schedulers import PEERS
from e3fast.types import Coefficients

FLAT = Coefficients(c0=0.0, a=1.0, b=0.0)


@pytest.mark.parametrize("name", PEERS)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), num_ranks=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_every_sample_stands_once(name, lengths, num_ranks):
    bins = PEERS[name](np.array(lengths), num_ranks, 60, FLAT)
    assert len(bins) == num_ranks
    assert sorted(i for rank in bins for own in rank for i in own) == list(range(len(lengths)))
    if name not in ("verl", "openrlhf"):  # to them the cap is a target
        assert all(sum(lengths[i] for i in own) <= 60 for rank in bins for own in rank)


BY_HAND = [  # lengths, ranks, cap, bins
    ("verl", [9, 7, 6, 5], 2, 100, [[[0, 3]], [[1, 2]]]),
    ("verl", [7, 6, 5], 1, 10, [[[1, 2], [0]]]),  # 18 tokens need two micro-batches; one is over the cap
    ("verl-strict", [7, 6, 5], 1, 10, [[[0], [1], [2]]]),
    ("openrlhf", [9, 7, 6, 5], 2, 14, [[[0, 3]], [[1, 2]]]),
    ("openrlhf", [7, 6, 5], 1, 10, [[[0], [1], [2]]]),
    ("slime-rr", [5, 6, 4, 3], 2, 10, [[[0, 2]], [[1, 3]]]),
    ("slime-kk", [9, 7, 2, 1], 2, 9, [[[0], [3]], [[1], [2]]]),  # 9 | 7 2 | 1, the second one split
    ("prime-rl", [9, 7, 2, 1], 2, 9, [[[0], [3]], [[1], [2]]]),
    ("nemo-rl", [60, 55, 40, 20, 20], 2, 100, [[[0, 2]], [[1, 3, 4]]]),
    ("skyrl", [4, 3, 3, 9], 2, 9, [[[0, 1]], [[3], [2]]]),
    ("areal", [5, 6, 4, 3], 2, 100, [[[1, 3]], [[0, 2]]]),
    ("trl-async", [3, 3, 2, 4], 2, 5, [[[0, 2], [3]], [[1], []]]),
    ("torchtitan", [5, 6, 4, 3], 2, 10, [[[0], [3]], [[1, 2], []]]),
]


@pytest.mark.parametrize(("name", "lengths", "num_ranks", "cap", "bins"), BY_HAND)
def test_by_hand(name, lengths, num_ranks, cap, bins):
    found = PEERS[name](np.array(lengths), num_ranks, cap, FLAT)
    assert [[sorted(own) for own in rank] for rank in found] == bins


def test_every_scheduler_has_an_example():
    assert set(PEERS) == {case[0] for case in BY_HAND}


def test_largest_differencing_of_the_textbook():
    parts = kk.karmarkar_karp([8, 7, 6, 5, 4], 2, equal=False)
    assert [sum([8, 7, 6, 5, 4][i] for i in own) for own in parts] == [16, 14]  # where 15 and 15 is best


@given(costs=st.lists(st.integers(1, 99), min_size=1, max_size=9), num_parts=st.integers(1, 4), equal=st.booleans())
@settings(max_examples=150, deadline=None)
def test_largest_differencing(costs, num_parts, equal):
    parts = kk.karmarkar_karp(costs, num_parts, equal)
    totals, counts = [sum(costs[i] for i in own) for own in parts], [len(own) for own in parts]
    assert sorted(i for own in parts for i in own) == list(range(len(costs)))
    assert totals == sorted(totals, reverse=True) and totals[0] - totals[-1] <= max(costs)
    assert not equal or max(counts) - min(counts) <= (len(costs) % num_parts > 0)
    if num_parts == 2 and not equal:  # Fischetti and Martello (1987)
        halves = (sum(own) for k in range(len(costs) + 1) for own in itertools.combinations(costs, k))
        assert totals[0] <= 7 / 6 * min(max(half, sum(costs) - half) for half in halves)


def test_fits():
    lengths = np.array([5, 6, 4, 3])
    assert fit.first_fit(lengths, range(4), 10) == [[0, 2], [1, 3]]
    assert fit.deal([[0], [1], [2]], 2) == [[[0], [2]], [[1], []]]
    assert fit.split_to_multiple([[0, 1], [2, 3], [4]], [9, 1, 2, 2, 3], 2) == [[0], [2, 3], [4], [1]]
    assert fit.split_to_multiple([[0, 1, 2]], [5, 4, 2], 2) == [[0], [1, 2]]
    assert fit.move_to_multiple([[0], [1, 2, 3]], 4) == [[0], [1], [3], [2]]
    assert fit.least_loaded(np.array([6, 5, 4, 1]), range(4), 9) == [[0, 3], [1, 2]]


def test_modified_first_fit_decreasing():
    """7 | 6 4 | 5, and then 3 and 3 above a sixth: 6 takes the medium 4, 7 a small 3, which leaves it full."""
    lengths = np.array([70, 60, 40, 35, 30, 20, 10])
    assert fit.modified_first_fit_decreasing(lengths, 100) == [[0, 4], [1, 2], [3, 5, 6]]
    pair = np.array([60, 20, 19, 18])  # no medium one: the smallest, and the largest that goes with it
    assert fit.modified_first_fit_decreasing(pair, 100) == [[0, 3, 1], [2]]


def score(work):
    loads = work.sum(axis=1)
    return int(loads.max()), int(loads.max() - loads.min())


@given(num_ranks=st.integers(1, 5), slots=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_the_best_swap(num_ranks, slots, seed):
    """Against every swap of two bins."""
    work = np.random.default_rng(seed).integers(1, 30, size=(num_ranks, slots))
    best = score(work)
    for one, other in itertools.combinations(np.ndindex(work.shape), 2):
        tried = work.copy()
        tried[one], tried[other] = work[other], work[one]
        best = min(best, score(tried))
    swap = kk.best_swap(work)
    assert (swap is None) == (best == score(work))
    if swap:
        one, other = swap
        work[one], work[other] = work[other], work[one]
        assert score(work) == best and one[0] != other[0]


def test_the_judge():
    """Two ranks, two slots: (3, 2) and (1, 0) tokens of work; a cap of 2 is broken once."""
    found = packing.judge([[[0, 1], [3]], [[2], []]], np.array([1, 2, 2, 1]), 2, Coefficients(c0=0.5, a=1.0, b=0.0))
    assert found["lockstep_pct"] == pytest.approx(100 * 6 / (2 * 4))
    assert found["over_cap"] == 1 and found["num_micro_batches"] == 2
    assert found["step_over_perfect"] == pytest.approx((4 + 1.0) / (3 + 1.0))
    with pytest.raises(AssertionError, match="lost a sample"):
        packing.judge([[[0]], [[0]]], np.array([1, 2]), 9, FLAT)


def test_missed_targets_are_named():
    rows = [
        Row("4b-8k-dp8", "e3fast", "lockstep_pct", [99.6, 99.3, 99.5], "%"),
        Row("4b-8k-dp8", "e3fast", "over_cap", [0, 0, 1], ""),
        Row("7b-8k-dp64", "e3fast", "cpu_ms", [41.0], "ms"),
        Row("7b-8k-dp64", "e3fast-sharing", "cpu_ms", [41.0], "ms"),
        Row("0.6b-32k-dp8", "e3fast", "step_over_perfect", [1.021], "x"),
        Row("4b-8k-dp8", "verl", "over_cap", [5], ""),
    ]
    assert [line.split()[2] for line in packing.missed(rows)] == [
        "lockstep_pct",
        "over_cap",
        "cpu_ms",
        "step_over_perfect",
    ]
