"""Every restated scheduler places every sample once, and does on small inputs what its rule says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import packing, schedulers
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


def test_largest_differencing():
    parts = schedulers.karmarkar_karp([8, 7, 6, 5, 4], 2, equal=False)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in own) for own in parts) == [14, 16]  # the textbook's, where 15 is best
    equal = schedulers.karmarkar_karp([9, 1, 1, 1], 2, equal=True)
    assert [len(own) for own in equal] == [2, 2]
    with pytest.raises(ValueError, match="do not make"):
        schedulers.karmarkar_karp([1, 2, 3], 2, equal=True)


def test_fits():
    lengths = np.array([5, 6, 4, 3])
    assert schedulers.next_fit(lengths, 10) == [[0], [1, 2], [3]]
    assert schedulers.first_fit(lengths, range(4), 10) == [[0, 2], [1, 3]]
    assert schedulers.fewest_items(lengths, schedulers.decreasing(lengths), 100, 2) == [[1, 3], [0, 2]]
    assert schedulers.deal([[0], [1], [2]], 2) == [[[0], [2]], [[1], []]]
    assert schedulers.split_to_multiple([[0, 1], [2, 3], [4]], np.array([9, 1, 2, 2, 3]), 2) == [[0], [2, 3], [4], [1]]


def test_medium_and_small_samples_join_large_ones():
    """Modified first-fit decreasing: 5 leaves room for a medium 4 in one bin; 6 takes two small ones."""
    lengths = np.array([60, 55, 40, 20, 20])
    assert sorted(map(sorted, schedulers.modified_first_fit_decreasing(lengths, 100))) == [[0, 2], [1, 3, 4]]


def test_swaps_reduce_the_sum_of_slot_maxima():
    work = np.array([[9.0, 8.0], [2.0, 1.0]])
    ranks = [[[0], [1]], [[2], [3]]]
    assert schedulers.swap_once(ranks, work)
    assert work.max(0).sum() == 11.0 and work.sum() == 20.0


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
