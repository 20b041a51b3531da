"""Traces are the recipe's, number for number."""

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.traces import CASES, COSTS, draw_lengths, draw_real, load_pool

BY_NAME = {case.name: case for case in CASES}
FACTS = {  # sum, longest, first five lengths of seed 0
    "4b-8k-dp8": (1_080_647, 7_364, [2118, 1615, 1180, 1838, 2986]),
    "0.6b-32k-dp8": (7_154_389, 31_935, [6842, 5002, 3453, 5810, 10115]),
    "7b-1k-dp8": (413_866, 1_262, [436, 374, 316, 402, 534]),
    "7b-8k-dp64": (9_073_621, 7_554, [2118, 1615, 1180, 1838, 2986]),
}


@pytest.mark.parametrize("name", FACTS)
def test_made_up_lengths(name):
    sizes, groups = draw_lengths(BY_NAME[name], 0, load_pool(None))
    lengths = sizes.sum(axis=1)
    assert (lengths.sum(), lengths.max(), lengths[:5].tolist()) == FACTS[name]
    assert np.all(np.bincount(groups) == BY_NAME[name].group_size)


def test_costs_are_those_of_the_models():
    """Qwen3-0.6B by hand: 28 layers of 16 + 8 heads of 128, hidden 1024, MLP 3072, vocabulary 151936."""
    layer = 4 * 1024 * 128 * (16 + 8) + 6 * 1024 * 3072
    assert COSTS["Qwen3-0.6B"].a == 28 * layer + 2 * 1024 * 151_936
    assert COSTS["Qwen3-0.6B"].b == 2 * 28 * 16 * 128


def test_harder_questions_get_more_samples():
    pool = load_pool(None)
    assert pool.shape == (200, 3)
    sizes, groups = draw_real(pool, 64, 8, 0)
    counts = np.bincount(groups)
    assert counts.min() == 4 and counts.max() == 12 and abs(counts.mean() - 8) < 0.2 and len(sizes) == counts.sum()
    chosen = pool[np.random.default_rng(0).choice(200, 64, replace=False)]
    assert np.corrcoef(chosen[:, 0], counts)[0, 1] > 0.9


def test_real_lengths():
    path = Path(os.environ.get("E3_POOL", ""))
    if not path.is_file():
        pytest.skip("E3_POOL does not name all_data.parquet")
    sizes, _ = draw_lengths(BY_NAME["real-lengths"], 0, load_pool(path))
    assert (
        len(sizes) == 4_096 and sizes.sum() == 4_665_611 and sizes[:3].tolist() == [[151, 751], [151, 1305], [151, 483]]
    )
