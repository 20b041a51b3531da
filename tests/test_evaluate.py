"""pass@k is the unbiased estimate (arXiv 2107.03374)."""

import itertools
import math

import pytest

from e3fast.evaluate import pass_at_k


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [(16, 3, 8, 0.9), (16, 1, 16, 1), (8, 2, 4, 0.785714), (12, 2, 4, 0.575758), (4, 0, 4, 0), (16, 3, 1, 0.1875)],
)
def test_vectors(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=5e-7)


def test_it_is_the_mean_over_all_subsets():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c <= n and k <= n:
            hits = sum(any(i < c for i in subset) for subset in itertools.combinations(range(n), k))
            assert pass_at_k(n, c, k) == pytest.approx(hits / math.comb(n, k))


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="k <= n"):
        pass_at_k(3, 1, 4)
