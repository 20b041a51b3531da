"""Noise is the published generator's, the same in any piece of a tensor, and normal."""

import numpy as np
import pytest
import torch

from e3fast.noise import CHUNK, gaussian, philox
from e3fast.streams import stream_key

LABELS = (7, "noise", 3, 1, "model.layers.0.mlp.down_proj.weight")


def test_words_of_the_published_check():
    words = [int(x) for x in philox(0, torch.zeros(1, dtype=torch.int64))]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_first_entries_of_a_named_stream():
    key = stream_key(*LABELS)
    assert key == 14595938794160099232
    expected = [1.961006, -1.193857, -0.025179, -1.780443, -0.735149, -0.821616, 0.125134, 0.301812]
    assert gaussian(key, 8).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("num", [1, 5, 4 * CHUNK + 3])
def test_an_entry_does_not_depend_on_how_many_are_asked_for(num):
    whole = gaussian(3, 4 * CHUNK + 8)
    assert torch.equal(gaussian(3, num), whole[:num])


def test_moments_and_independence_of_draws():
    a, b = (gaussian(stream_key(7, "noise", 0, d, "w"), 200_000) for d in (1, 2))
    assert abs(float(a.mean())) < 0.01 and abs(float(a.std()) - 1) < 0.01 and float(a.abs().max()) <= 5.78
    assert abs(float(np.corrcoef(a, b)[0, 1])) < 0.01
