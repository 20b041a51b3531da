"""Weights of every aggregation, and what they sum to."""

from collections import defaultdict

import pytest

from e3fast.objective import loss_weights
from e3fast.types import LossParams
from tests.samples import make_samples

SAMPLES = make_samples([(3, [4] * 4), (3, [4] * 8), (3, [4] * 12)])


def by_group(weights):
    total = defaultdict(float)
    for sample, weight in zip(SAMPLES, weights, strict=True):
        total[sample.group] += weight * sample.num_loss_tokens
    return [total[g] for g in range(3)]


def test_prompt_weights_vector():
    """Groups of 4, 8, 12 have w = 2, 1, 0.667, so each prompt weighs the same at equal lengths."""
    weights = loss_weights(SAMPLES, LossParams(group_weight="prompt"), 16)
    assert [weights[0] / weights[4], weights[12] / weights[4]] == pytest.approx([2, 2 / 3])
    assert by_group(weights) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(
    ("loss", "shares"),
    [
        (LossParams(), [4 / 24, 8 / 24, 12 / 24]),
        (LossParams(aggregation="sequence"), [4 / 24, 8 / 24, 12 / 24]),
        (LossParams(aggregation="group"), [1 / 3] * 3),
        (LossParams(aggregation="constant"), [4 / 24 / 4, 8 / 24 / 4, 12 / 24 / 4]),
    ],
)
def test_share_of_each_group(loss, shares):
    assert by_group(loss_weights(SAMPLES, loss, 16)) == pytest.approx(shares)


def test_nothing_to_weigh():
    assert loss_weights([], LossParams(), 16) == []


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"aggregation": "mean"}, "loss.aggregation must be one of token, sequence, group, constant; got 'mean'"),
        (
            {"group_weight": "prompt", "aggregation": "group"},
            "loss.group_weight 'prompt' needs loss.aggregation 'token'",
        ),
        ({"clip_low": 1.5}, "loss.clip_low must be in (0, 1.0], got 1.5"),
    ],
)
def test_bad_knobs(knobs, message):
    with pytest.raises(ValueError) as error:
        LossParams(**knobs)
    assert message in str(error.value)
