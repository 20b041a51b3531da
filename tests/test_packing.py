"""Packing laws.

Everything once and whole, nothing over the cap, the same slots on every rank, shifts inside segments.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e3fast.packing import filler, pack
from tests.samples import make_samples

groups = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=0, max_size=9)), min_size=0, max_size=8
)


@given(groups, st.integers(1, 4), st.floats(1, 4), st.booleans(), st.sets(st.integers(0, 7)))
@settings(max_examples=120, deadline=None)
def test_laws(shape, num_ranks, stretch, sharing, zero):
    samples = make_samples(shape, zero_groups=zero)
    cap = int(stretch * max((len(s.token_ids) for s in samples), default=5))
    batch = pack(samples, [float(i + 1) for i in range(len(samples))], cap, num_ranks, sharing=sharing)
    where = {}
    for micro_batches, plan in ((batch.micro_batches, batch.plan), (batch.forward_only, batch.forward_plan)):
        assert len(micro_batches) == num_ranks and len({len(rank) for rank in micro_batches}) == 1
        laid = [micro_batch for rank in micro_batches for micro_batch in rank]
        assert sum(m.num_tokens for m in laid) == plan.num_tokens
        for m in laid:
            assert m.num_tokens <= cap
            check(m, samples, where)
    assert sorted(where) == list(range(len(samples)))
    for i, trained in where.items():
        assert trained == samples[i].has_signal
    assert batch.num_loss_tokens == sum(s.num_loss_tokens for s in samples)
    assert batch.num_groups == len({s.group for s in samples})


def check(m, samples, where):
    """Every segment holds its sample's tokens, and entry t what belongs to the token it predicts."""
    ends = m.cu_seqlens.tolist()
    assert ends[0] == 0 and ends[-1] == m.num_tokens and all(a < b for a, b in pairwise(ends))
    for name in m.__slots__[:9]:
        assert getattr(m, name).shape == (m.num_tokens,)
    for n, i in enumerate(m.sample_of.tolist()):
        at = slice(ends[n], ends[n + 1])
        if i < 0:
            assert not m.loss_weights[at].any() and not m.entropy_mask[at].any()
            continue
        assert i not in where
        where[i] = bool(m.advantages[at].any())
        s, positions = samples[i], m.position_ids[at].numpy()
        assert np.array_equal(m.token_ids[at].numpy(), s.token_ids[positions])
        prefix = int(m.prefix_of[n])
        if prefix >= 0:
            home = slice(ends[prefix], ends[prefix + 1])
            assert np.array_equal(m.token_ids[home].numpy(), s.token_ids[: positions[0]])
        asked = m.targets[at].numpy() >= 0
        assert asked.sum() == s.num_loss_tokens and not asked[-1]
        assert np.array_equal(m.targets[at].numpy()[asked], s.token_ids[s.num_prompt_tokens :])
        for name in ("advantages", "rollout_logprobs", "temperatures"):
            want = getattr(s, name)[s.num_prompt_tokens :].astype(np.float32)
            assert np.array_equal(getattr(m, name)[at].numpy()[asked], want)
        assert np.all(m.loss_weights[at].numpy()[asked] == i + 1)


def test_a_sample_over_the_cap_is_refused():
    with pytest.raises(ValueError, match=r"a sample of 9 tokens exceeds train\.tokens_per_micro_batch=8"):
        pack(make_samples([(4, [5])]), [1.0], 8, 1)


def test_no_samples_and_filler():
    batch = pack([], [], 8, 2)
    assert batch.micro_batches == ((), ()) and batch.plan.num_slots == 0
    m = filler()
    assert m.num_tokens == 1 and not m.loss_mask.any() and torch.equal(m.cu_seqlens, torch.tensor([0, 1]))
    one = pack(make_samples([(3, [4])]), [1.0], 64, 2)
    assert [rank[0].num_tokens for rank in one.micro_batches] == [7, 1]


def test_sharing_saves_the_prompts():
    samples = make_samples([(50, [5] * 8)])
    alone = pack(samples, [1.0] * 8, 1000, 1, sharing=False)
    shared = pack(samples, [1.0] * 8, 1000, 1, sharing=True)
    assert alone.plan.num_tokens == 440
    assert shared.plan.num_tokens == 49 + 8 * 6 and shared.plan.num_unshared_tokens == 440


def test_the_plan_does_not_depend_on_the_process():
    shape = [(7, [3, 9, 4]), (2, [8]), (20, [1, 1, 30])]
    first, second = (pack(make_samples(shape), [1.0] * 7, 60, 2) for _ in range(2))
    assert first.plan == second.plan
