"""Packing laws.

Everything once and whole, nothing over the cap, the same slots on every rank, shifts inside segments.
"""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e3fast.packing import cut_overlong, filler, pack
from e3fast.types import ROUTES, Coefficients
from tests.samples import make_samples

groups = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=0, max_size=9)), min_size=0, max_size=8
)


costs = st.builds(Coefficients, c0=st.floats(0, 50), a=st.just(1.0), b=st.floats(0, 0.1), head=st.floats(0, 1))


@given(
    groups, st.integers(1, 4), st.floats(0.5, 4), costs, st.booleans(), st.sets(st.integers(0, 7)), st.floats(0.5, 2)
)
@settings(max_examples=120, deadline=None)
def test_laws(shape, num_ranks, stretch, coefficients, sharing, zero, wider):
    samples = make_samples(shape, zero_groups=zero)
    longest = max((len(s.token_ids) for s in samples), default=5)
    caps = max(2, int(stretch * longest)), max(2, int(stretch * wider * longest))
    hard_cap = max(longest, caps[0])
    batch = pack(
        samples,
        [float(i + 1) for i in range(len(samples))],
        caps[0],
        num_ranks,
        coefficients=coefficients,
        sharing=sharing,
        forward_cap=caps[1],
        hard_cap=hard_cap,
    )
    where = {}
    sides = (batch.micro_batches, batch.plan, caps[0]), (batch.forward_only, batch.forward_plan, caps[1])
    for micro_batches, plan, cap in sides:
        assert plan.cap == cap and len(micro_batches) == num_ranks and len({len(rank) for rank in micro_batches}) == 1
        assert [[m.num_tokens for m in rank] for rank in micro_batches] == list(map(list, plan.tokens))
        for rank, planned in zip(micro_batches, plan.bins, strict=True):
            for m, fragments in zip(rank, planned, strict=True):
                assert [i for i in m.sample_of.tolist() if i >= 0] == [i for own in fragments for i in own]
                assert m.num_tokens <= cap or (m.num_tokens <= hard_cap and len(m.sample_of) == 1)
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
    samples = make_samples([(4, [5])])
    with pytest.raises(ValueError, match=r"a sample of 9 tokens exceeds train\.tokens_per_micro_batch=8"):
        pack(samples, [1.0], 8, 1)
    with pytest.raises(ValueError, match=r"a sample of 9 tokens exceeds train\.hard_cap=8"):
        pack(samples, [1.0], 6, 1, hard_cap=8)
    with pytest.raises(ValueError, match="a sample of 9 tokens exceeds"):
        pack(make_samples([(4, [5])], zero_groups={0}), [1.0], 8, 1)


def test_the_tail_of_a_completion_is_cut():
    samples = make_samples([(4, [5, 2]), (3, [9])])
    cut, num_cut = cut_overlong(samples, 8)
    assert num_cut == 2 and [len(s.token_ids) for s in cut] == [8, 6, 8] and cut[1] is samples[1]
    for before, after in zip(samples, cut, strict=True):
        kept = len(after.token_ids)
        assert after.group == before.group and after.num_prompt_tokens == before.num_prompt_tokens
        for name in ("token_ids", "loss_mask", "entropy_mask", "advantages", "rollout_logprobs", "temperatures"):
            assert np.array_equal(getattr(after, name), getattr(before, name)[:kept])
    assert cut_overlong(samples, 12) == (samples, 0)
    assert pack(cut, [1.0] * 3, 8, 1, sharing=False).plan.num_tokens == 22


def test_a_prompt_that_leaves_no_room_is_refused():
    with pytest.raises(ValueError, match=r"a prompt of 4 tokens leaves no room .*tokens_per_micro_batch=4"):
        cut_overlong(make_samples([(4, [1])]), 4)


def test_only_equal_prompts_are_shared():
    """A group is one prompt; where it is not, its samples do not stand behind the wrong one."""
    one, two = make_samples([(30, [4, 4])]), make_samples([(30, [4, 4])], seed=1)
    plan = pack([one[0], two[0], one[1], two[1]], [1.0] * 4, 200, 1).plan
    assert plan.bins == ((((0, 2), (1, 3)),),)


def test_costs_of_the_two_sides_are_their_own():
    samples = make_samples([(5, [6]), (5, [7])], zero_groups={1})
    batch = pack(samples, [1.0] * 2, 50, 1, coefficients=Coefficients(0.0, 2.0, 0.0))
    assert (batch.plan.costs, batch.forward_plan.costs) == (((22.0,),), ((24.0,),))
    dear = Coefficients(0.0, 5.0, 0.0)
    batch = pack(samples, [1.0] * 2, 50, 1, forward_coefficients=dear)
    assert (batch.plan.costs, batch.forward_plan.costs) == (((11.0,),), ((60.0,),))


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
    assert shared.plan.num_tokens == 49 + 8 * 6 and shared.plan.unshared_tokens == 440


def test_the_plan_does_not_depend_on_the_process():
    shape = [(7, [3, 9, 4]), (2, [8]), (20, [1, 1, 30])]
    first, second = (pack(make_samples(shape), [1.0] * 7, 60, 2) for _ in range(2))
    assert first.plan == second.plan


def of_draws(shape, draws=(1, 2), zero_groups=()):
    """Samples of each group in turn from the draws; one rescue from the policy's own weights stands last."""
    samples = make_samples(shape, zero_groups=zero_groups)
    samples = [
        dataclasses.replace(s, route="draw", draw=draws[i % len(draws)]) for i, s in enumerate(samples[:-1])
    ] + samples[-1:]
    bare = np.zeros_like(samples[-1].entropy_mask)
    return [*samples[:-1], dataclasses.replace(samples[-1], route="rescue", entropy_mask=bare)]


def entropy_only(sample):
    return dataclasses.replace(sample, loss_mask=np.zeros_like(sample.loss_mask))


SHAPE = [(6, [3, 9, 4]), (2, [7, 7]), (11, [2, 5, 8, 1]), (4, [6, 12])]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("cap", [24, 60, 500])
def test_micro_batches_at_draws_hold_one_draw_each_and_everything_once(num_ranks, cap):
    samples = of_draws(SHAPE, zero_groups={2})
    batch = pack(samples, [1.0] * len(samples), cap, num_ranks, at_draws=True)
    seen = []
    for micro_batches, plan in ((batch.micro_batches, batch.plan), (batch.forward_only, batch.forward_plan)):
        assert plan.num_slots == len(micro_batches[0]) and plan.num_ranks == num_ranks
        assert [[m.num_tokens for m in rank] for rank in micro_batches] == list(map(list, plan.tokens))
        assert all(tokens <= cap for rank in plan.tokens for tokens in rank)
        for slot in zip(*micro_batches, strict=True):
            assert len({m.draw for m in slot}) == 1, "ranks load draws together"
        for rank, planned in zip(micro_batches, plan.bins, strict=True):
            assert [m.draw for m in rank] == sorted(m.draw for m in rank), "each draw is loaded once"
            for m, fragments in zip(rank, planned, strict=True):
                own = [i for i in m.sample_of.tolist() if i >= 0]
                assert own == [i for fragment in fragments for i in fragment]
                assert all(samples[i].draw == m.draw for i in own)
                seen += own
    assert sorted(seen) == list(range(len(samples)))


def test_a_joined_plan_adds_up():
    samples = of_draws(SHAPE)
    joined = pack(samples, [1.0] * len(samples), 40, 2, at_draws=True).plan
    parts = []
    for draw in (0, 1, 2):
        own = [s for s in samples if s.draw == draw]
        parts.append(pack(own, [1.0] * len(own), 40, 2).plan)
    assert joined.num_tokens == sum(plan.num_tokens for plan in parts)
    assert joined.unshared_tokens == sum(plan.unshared_tokens for plan in parts)
    assert joined.unshared_cost == pytest.approx(sum(plan.unshared_cost for plan in parts))
    for rank in range(2):
        assert joined.tokens[rank] == sum((plan.tokens[rank] for plan in parts), ())
        assert joined.costs[rank] == sum((plan.costs[rank] for plan in parts), ())
    assert joined.digest not in {plan.digest for plan in parts}
    assert joined.digest == pack(samples, [1.0] * len(samples), 40, 2, at_draws=True).plan.digest


def test_without_at_draws_all_stand_together_at_the_policys_own_weights():
    samples = of_draws(SHAPE)
    (m,) = pack(samples, [1.0] * len(samples), 500, 1).micro_batches[0]
    assert m.draw == 0 and filler(3).draw == 3
    ends = m.cu_seqlens.tolist()
    for n, i in enumerate(m.sample_of.tolist()):
        routes = {ROUTES[r] for r in m.routes[ends[n] : ends[n + 1]].tolist()}
        assert i < 0 or routes == {samples[i].route}


def sides(batch):
    return [
        sorted(i for m in side[0] for i in m.sample_of.tolist() if i >= 0)
        for side in (batch.micro_batches, batch.forward_only)
    ]


def test_who_gets_a_backward_pass():
    """Rows that count for their entropy alone never do; rows without signal do where the loss has more terms."""
    samples = make_samples([(4, [3, 5]), (3, [2, 6]), (5, [4])], zero_groups={1})
    samples[0] = entropy_only(samples[0])
    silent = entropy_only(dataclasses.replace(samples[4], entropy_mask=np.zeros(9, bool)))
    samples.append(silent)  # asks for nothing at all
    pack_as = lambda **knobs: sides(pack(samples, [1.0] * 6, 100, 1, **knobs))  # noqa: E731
    assert pack_as() == [[1, 4], [0, 2, 3]]
    assert pack_as(backward="all") == [[1, 2, 3, 4], [0]]
    assert pack_as(backward="none") == [[], [0, 1, 2, 3, 4]]
    assert pack_as(score_all=False) == [[1, 4], []]
    batch = pack(samples, [1.0] * 6, 100, 1)
    assert (batch.num_loss_tokens, batch.num_sequences, batch.num_groups) == (5 + 2 + 6 + 4, 4, 3)


def test_entropy_only_rows_are_targets_without_loss():
    sample = make_samples([(4, [3])])[0]
    (m,) = pack([entropy_only(sample)], [1.0], 100, 1).forward_only[0]
    assert m.targets[3:6].tolist() == sample.token_ids[4:].tolist() and bool((m.targets >= 0).sum() == 3)
    assert m.entropy_mask.tolist() == [False] * 3 + [True] * 3 + [False]
    assert not m.loss_mask.any() and not m.loss_weights.any() and not m.advantages.any()


def test_loss_and_entropy_tokens_may_differ():
    """A token without a behaviour log-prob leaves the loss and stays in the entropy; a rescue is the other way."""
    sample = make_samples([(4, [3])])[0]
    holed = sample.loss_mask.copy()
    holed[5] = False
    (m,) = pack([dataclasses.replace(sample, loss_mask=holed)], [1.0], 100, 1).micro_batches[0]
    assert m.loss_mask.tolist() == [False] * 3 + [True, False, True, False]
    assert m.entropy_mask.tolist() == [False] * 3 + [True] * 3 + [False] and int((m.targets >= 0).sum()) == 3
    (m,) = pack([dataclasses.replace(sample, entropy_mask=np.zeros(7, bool))], [1.0], 100, 1).micro_batches[0]
    assert not m.entropy_mask.any() and int(m.loss_mask.sum()) == 3
