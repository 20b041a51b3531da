"""Credit: worked values, exact zeros, and failed rollouts kept out."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from e3fast.advantages import group_advantages, left_over_samples, make_samples
from tests.records import group, prompt


@pytest.mark.parametrize(("n", "success", "failure"), [(4, 1.5, -0.5), (8, 2.4749, -0.3536), (12, 3.1754, -0.2887)])
def test_one_success(n, success, failure):
    got = group_advantages(torch.tensor([1.0] + [0.0] * (n - 1)), torch.zeros(n, dtype=torch.int64))
    assert got.tolist() == pytest.approx([success] + [failure] * (n - 1), abs=5e-5)


@given(st.floats(-10, 10), st.integers(1, 64), st.sampled_from(["grpo", "dr_grpo", "rloo"]))
@example(0.1, 3, "dr_grpo")
@example(1 / 3, 11, "rloo")
def test_equal_rewards_and_lone_rollouts_give_exactly_zero(reward, n, kind):
    """trl#5773: a rounded mean left a residue that the deviation blew up to 4,000."""
    rewards = torch.full((n,), reward, dtype=torch.float64)
    got = group_advantages(rewards, torch.zeros(n, dtype=torch.int64), kind=kind)
    assert torch.equal(got, torch.zeros_like(rewards))


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.1, 1.0])), max_size=40), st.randoms())
def test_groups_do_not_see_each_other(pairs, random):
    rewards, ids = (torch.tensor([p[1] for p in pairs]), torch.tensor([p[0] for p in pairs], dtype=torch.int64))
    whole = group_advantages(rewards, ids)
    for i in set(ids.tolist()):
        own = ids == i
        assert torch.equal(whole[own], group_advantages(rewards[own], ids[own]))


def test_kinds():
    rewards, ids = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0])
    assert group_advantages(rewards, ids, kind="dr_grpo").tolist() == [0.5, -0.5, -0.5, 0.5]
    assert group_advantages(rewards, ids, kind="rloo").tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    with pytest.raises(ValueError, match="kind must be one of"):
        group_advantages(rewards, ids, kind="ppo")
    with pytest.raises(ValueError, match="rewards and group_ids"):
        group_advantages(rewards, ids[:2])


def test_failed_rollouts_are_neither_counted_nor_trained_on():
    samples = make_samples([group(verdicts=["correct", "failed", "wrong", "truncated", "unparsable"])], "grpo")
    assert len(samples) == 4
    assert samples[0].advantages[-1] == pytest.approx(1.5, abs=1e-5)
    assert make_samples([group(verdicts=["failed", "failed"])], "grpo") == []


def test_a_sample_is_aligned_and_carries_its_temperature():
    (sample,) = make_samples([group(prompt(0, (5, 6, 7)), verdicts=["correct"], lengths=[2], temperature=0.7)], "grpo")
    assert sample.token_ids.tolist() == [5, 6, 7, 10, 11]
    assert sample.loss_mask.tolist() == [False] * 3 + [True] * 2
    assert set(sample.temperatures.tolist()) == {0.7} and not sample.has_signal


def test_a_nan_logprob_costs_its_token_only():
    """trl#6166: NaN or None log-probs from an engine at low entropy."""
    plain = group(verdicts=["correct", "wrong"])
    broken = dataclasses.replace(plain.rollouts[0], rollout_logprobs=(-0.5, math.nan, -0.5))
    samples = make_samples([dataclasses.replace(plain, rollouts=(broken, plain.rollouts[1]))], "grpo")
    assert [s.num_loss_tokens for s in samples] == [2, 3]
    assert samples[0].entropy_mask.tolist() == samples[0].loss_mask.tolist()  # else entropy would hang on the signal


def test_stats_rewards_replace_the_groups_own():
    """LoPE (arXiv 2605.05566): 1 of 24 rescued, group of 8, statistics over all 32."""
    shaped = dataclasses.replace(group(rewards=[1.0] + [0.0] * 7), stats_rewards=(1.0,) + (0.0,) * 31)
    samples = make_samples([shaped], "grpo")
    assert [s.advantages[-1] for s in samples[:2]] == pytest.approx([5.4801, -0.1768], abs=1e-4)


def test_left_over_rollouts_count_in_the_entropy_and_in_nothing_else():
    """First rollouts that no kept group holds; not the failed ones, nor those of retries."""
    kept = group(prompt(0), verdicts=["correct", "wrong"], id=0)
    dropped = group(prompt(1), verdicts=["correct", "failed", "truncated"], id=1, draw=2)
    retried = group(prompt(1), verdicts=["correct"], id=2, kind="extra")
    found = left_over_samples([kept, dropped, retried], [kept])
    assert [(s.group, s.prompt_id, s.route, s.draw) for s in found] == [(1, "1", "draw", 2)] * 2
    for sample in found:
        assert not sample.loss_mask.any() and not sample.advantages.any() and not sample.has_signal
        assert np.array_equal(sample.entropy_mask, np.arange(6) >= 3)
    assert left_over_samples([kept, dropped], [kept, dropped]) == []


def test_a_rollout_that_a_merge_replaced_is_left_over_too():
    first, extra = group(verdicts=["wrong"] * 3), group(verdicts=["correct"], id=1, kind="extra")
    merged = dataclasses.replace(
        first, rollouts=extra.rollouts + first.rollouts[1:], scores=extra.scores + first.scores[1:]
    )
    samples = make_samples([merged], "grpo") + left_over_samples([first, extra], [merged])
    assert [s.route for s in samples] == ["rescue", "plain", "plain", "plain"]
    assert [bool(s.loss_mask.any()) for s in samples] == [True, True, True, False]
    assert [bool(s.entropy_mask.any()) for s in samples] == [False, True, True, True]


def test_a_rescue_is_scored_behind_the_plain_prompt():
    asked = group(prompt(0, (5, 6, 7)), verdicts=["correct"], kind="extra", prefixed_ids=(1, 2, 5, 6, 7), draw=1)
    (sample,) = make_samples([asked], "grpo")
    assert sample.token_ids.tolist() == [5, 6, 7, 10, 11, 12] and sample.num_prompt_tokens == 3
    assert (sample.route, sample.draw) == ("rescue", 1) and not sample.entropy_mask.any()
