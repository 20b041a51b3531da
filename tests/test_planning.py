"""Laws of a plan, whatever the lengths: everything once, nothing over the cap, costs as counted, slots dealt best.

Costs and tokens are counted here once more from the plan's fragments, by the formulas and not by the code.
"""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e3fast import planning
from e3fast.placement import Items, make_unit, place_longest_first, stripe
from e3fast.planning import describe_plan, plan_metrics, plan_packing
from e3fast.types import Coefficients

KIND = st.sampled_from(["mixed", "mixed", "mixed", "equal", "giant", "long prompts", "tiny"])


@st.composite
def cases(draw):
    """Lengths, groups, ranks, cap, costs: the cap from the longest sample to four times that, c0 up to a tenth."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind, num_groups = draw(KIND), draw(st.integers(0, 40))
    few = rng.random(num_groups) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    groups = np.repeat(
        np.arange(num_groups), np.where(few, rng.integers(0, 3, num_groups), rng.integers(0, 25, num_groups))
    )
    prompts = np.full(40, 30) if kind == "equal" else rng.integers(1, 400, 40)
    completions = np.full(len(groups), 70) if kind == "equal" else rng.integers(1, 800, len(groups))
    if kind == "giant" and len(groups):
        completions //= 20
        completions += 1
        completions[rng.integers(len(groups))] = 6000
    if kind == "tiny":  # bins that are full to the last token
        prompts, completions = prompts % 4 + 1, completions % 8 + 1
    if kind == "long prompts":
        prompts, completions = prompts * 5 + 100, completions // 10 + 1
    lengths = np.stack([prompts[groups], completions], axis=1).astype(int)
    cap = int(lengths.sum(axis=1).max(initial=5) * draw(st.floats(1, 4)))
    window = draw(st.sampled_from([0, 0, 50]))
    plain = Coefficients(0.0, 3.0, draw(st.floats(0, 0.01)), head=draw(st.sampled_from([0.0, 1.5])))
    plain = replace(plain, window_b=0.002 if window else 0.0, window=window)
    full = plain.a * cap + plain.head * cap + plain.b * cap**2
    return lengths, groups, draw(st.integers(1, 9)), cap, replace(plain, c0=draw(st.floats(0, 0.1)) * full)


def tokens_of(fragments, lengths):
    """The prompt less its last token once a fragment, and for each member that token and the completion."""
    return sum(lengths[own[0]][0] - 1 + sum(1 + lengths[i][1] for i in own) for own in fragments)


def cost_of(fragments, lengths, c):
    def attention(length):
        windowed = length**2 if not c.window or length <= c.window else 2 * length * c.window - c.window**2
        return c.b * length**2 + c.window_b * windowed

    total = c.a * tokens_of(fragments, lengths) + c.head * sum(lengths[i][1] for own in fragments for i in own)
    for own in fragments:
        q = lengths[own[0]][0] - 1
        total += attention(q) + sum(attention(q + 1 + lengths[i][1]) - attention(q) for i in own)
    return total


def slots_of(plan):
    return list(zip(*plan.costs, strict=True))


def step_time(plan):
    return sum(map(max, slots_of(plan))) + plan.coefficients.c0 * plan.num_slots


def check(plan, lengths, groups, sharing, hard_cap=0):
    lengths = lengths.tolist()
    placed = sorted(i for rank in plan.bins for kept in rank for own in kept for i in own)
    assert placed == list(range(len(lengths)))
    assert len({len(rank) for rank in plan.bins}) == 1 and len(plan.bins) == plan.num_ranks
    assert bool(plan.num_slots) == bool(lengths)
    for rank, rank_tokens, rank_costs in zip(plan.bins, plan.tokens, plan.costs, strict=True):
        for fragments, tokens, cost in zip(rank, rank_tokens, rank_costs, strict=True):
            for own in fragments:
                assert len({groups[i] for i in own}) == 1
                assert len(own) == 1 or (sharing and lengths[own[0]][0] > 1)
            if fragments:
                assert tokens == tokens_of(fragments, lengths)
                assert cost == pytest.approx(cost_of(fragments, lengths, plan.coefficients), rel=1e-9)
            else:
                c = plan.coefficients
                assert tokens == 1 and cost == pytest.approx(c.a + c.b + c.window_b)
            if tokens > plan.cap:
                assert tokens <= hard_cap and [len(own) for own in fragments] == [1]
    check_slots(plan)


def check_slots(plan):
    """Striped, heaviest slot first; what is lost to waiting is at most heaviest less lightest bin."""
    slots = slots_of(plan)
    assert all(min(one) >= max(two) for one, two in itertools.pairwise(slots))
    bins = [cost for slot in slots for cost in slot]
    if bins:
        waste = sum(map(max, slots)) - sum(bins) / plan.num_ranks
        assert waste <= (max(bins) - min(bins)) + 1e-9 * sum(bins)


@given(cases(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_every_plan_keeps_the_laws(case, sharing):
    lengths, groups, num_ranks, cap, coefficients = case
    plan = plan_packing(lengths, groups, num_ranks, cap, coefficients, sharing=sharing)
    check(plan, lengths, groups, sharing)
    assert plan.unshared_tokens == lengths.sum() + plan_metrics(plan)["filler"]


@given(cases(), st.booleans(), st.floats(0.3, 1))
@settings(max_examples=100, deadline=None)
def test_samples_over_the_cap_have_a_bin_to_themselves(case, sharing, share):
    lengths, groups, num_ranks, hard_cap, coefficients = case
    cap = max(2, int(share * hard_cap / 2))
    plan = plan_packing(lengths, groups, num_ranks, cap, coefficients, sharing=sharing, hard_cap=hard_cap)
    check(plan, lengths, groups, sharing, hard_cap)
    assert plan_metrics(plan)["own_bins"] == (lengths.sum(axis=1) > cap).sum()


@given(cases())
@settings(max_examples=100, deadline=None)
def test_sharing_is_never_predicted_slower(case):
    alone, shared = (plan_packing(*case, sharing=sharing) for sharing in (False, True))
    assert step_time(shared) <= step_time(alone)


def best_fit_decreasing(lengths, cap):
    rooms = []
    for length in sorted(lengths, reverse=True):
        takers = [b for b, room in enumerate(rooms) if room >= length]
        if takers:
            rooms[min(takers, key=rooms.__getitem__)] -= length
        else:
            rooms.append(cap - length)
    return len(rooms)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_one_rank_needs_no_more_than_best_fit(case):
    lengths, groups, _, cap, coefficients = case
    plan = plan_packing(lengths, groups, 1, cap, coefficients, sharing=False)
    assert plan.num_slots == best_fit_decreasing(lengths.sum(axis=1).tolist(), cap)


@given(cases(), st.booleans(), st.integers(-40, 40))
@settings(max_examples=100, deadline=None)
def test_the_unit_of_costs_changes_nothing(case, sharing, power):
    """A power of two scales every sum exactly."""
    lengths, groups, num_ranks, cap, c = case
    factor = 2.0**power
    scaled = Coefficients(c.c0 * factor, c.a * factor, c.b * factor, c.head * factor, c.window_b * factor, c.window)
    one, two = (plan_packing(lengths, groups, num_ranks, cap, x, sharing=sharing) for x in (c, scaled))
    assert one.bins == two.bins and one.tokens == two.tokens


@given(st.integers(1, 3), st.integers(1, 3), st.data())
@settings(max_examples=100, deadline=None)
def test_striping_is_the_best_way_to_deal(num_ranks, num_slots, data):
    num_slots = min(num_slots, 6 // num_ranks)
    n = num_ranks * num_slots
    costs = data.draw(st.lists(st.floats(0, 10), min_size=n, max_size=n))
    ranks = stripe(costs, num_ranks)
    assert sorted(b for rank in ranks for b in rank) == list(range(n))

    def total(order):
        return sum(max(costs[b] for b in order[k : k + num_ranks]) for k in range(0, n, num_ranks))

    found = total([rank[k] for k in range(num_slots) for rank in ranks])
    assert found <= min(map(total, itertools.permutations(range(n)))) * (1 + 1e-12)


def test_striping_evens_ranks():
    assert stripe([9.0, 1.0, 8.0, 2.0], 2) == [[0, 1], [2, 3]]  # 9 + 1 and 8 + 2, not 9 + 2 and 8 + 1


PLAN_IN_A_PROCESS = """
import json, sys
from e3fast.planning import plan_packing
from e3fast.types import Coefficients
lengths, groups, num_ranks, cap, coefficients = json.load(sys.stdin)
plan = plan_packing(lengths, groups, num_ranks, cap, Coefficients(*coefficients))
print(plan.digest, "torch" in sys.modules)
"""


def test_another_process_makes_the_same_plan_and_needs_no_torch():
    case = trace(260, 0.35, 0.40, (16, 1024), prompts=40, size=8, seed=5)
    args = (*case, 3, 4096, Coefficients(1e3, 2.0, 1e-3))
    digests = {plan_packing(*args).digest for _ in range(2)}
    given_to = json.dumps([case[0].tolist(), case[1].tolist(), 3, 4096, astuple(args[4])])
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PLAN_IN_A_PROCESS]
        said = subprocess.run(command, input=given_to, env=env, capture_output=True, text=True, check=True).stdout
        digest, has_torch = said.split()
        digests.add(digest)
        assert has_torch == "False"
    assert len(digests) == 1


def test_the_digest_tells_inputs_apart():
    lengths, groups = [(3, 4), (3, 5), (2, 6)], [0, 0, 1]
    c = Coefficients(0.0, 1.0, 0.0)
    others = [
        plan_packing([(3, 4), (3, 5), (2, 7)], groups, 1, 20, c),
        plan_packing(lengths, [0, 1, 2], 1, 20, c),
        plan_packing(lengths, groups, 2, 20, c),
        plan_packing(lengths, groups, 1, 21, c),
        plan_packing(lengths, groups, 1, 20, replace(c, a=2.0)),
        plan_packing(lengths, groups, 1, 20, c, sharing=False),
    ]
    assert len({plan.digest for plan in [plan_packing(lengths, groups, 1, 20, c), *others]}) == 7


def trace(completion, between, within, bounds, prompts, size, seed, prompt=140, spread=0.45, prompt_bounds=(20, 1024)):
    """Lengths as rollouts have them: log-normal prompts, and groups of log-normal completions around their own mean."""
    rng = np.random.default_rng(seed)
    lengths = []
    for _ in range(prompts):
        p = int(np.clip(rng.lognormal(np.log(prompt), spread), *prompt_bounds))
        mean = rng.normal(np.log(completion), between)
        lengths += [(p, int(c)) for c in np.clip(rng.lognormal(mean, within, size=size), *bounds)]
    return np.array(lengths), np.repeat(np.arange(prompts), size)


def costs(a, b, cap):
    return Coefficients(0.03 * (a * cap + b * cap**2), a, b)


QWEN_06B, QWEN_4B, QWEN_7B = (1.191968768e9, 114688), (8.044544e9, 294912), (14.140571648e9, 200704)
SHORT = {"completion": 260, "between": 0.35, "within": 0.4, "bounds": (16, 1024), "prompt": 110}
LONG_8K = {"completion": 1500, "between": 0.6, "within": 0.55, "bounds": (64, 7168)}
LONG_32K = {"completion": 5000, "between": 0.7, "within": 0.6, "bounds": (128, 31744)}
RAG = {"completion": 500, "between": 0.4, "within": 0.5, "bounds": (16, 1024), "prompt": 2500, "spread": 0.6}


@pytest.mark.parametrize(
    ("model", "lengths", "prompts", "size", "num_ranks", "cap", "lockstep", "over"),
    [
        (QWEN_4B, LONG_8K, 64, 8, 8, 16384, 0.995, 1.005),
        (QWEN_06B, LONG_32K, 64, 16, 8, 32768, 0.99, 1.012),
        (QWEN_7B, SHORT | {"prompt_bounds": (20, 512)}, 128, 8, 8, 8192, 0.995, 1.005),
        (QWEN_7B, LONG_8K, 512, 8, 64, 16384, 0.995, 1.005),
    ],
)
def test_ranks_hardly_wait(model, lengths, prompts, size, num_ranks, cap, lockstep, over):
    case = trace(**lengths, prompts=prompts, size=size, seed=0)
    plan = plan_packing(*case, num_ranks, cap, costs(*model, cap), sharing=False)
    metrics = plan_metrics(plan)
    assert metrics["lockstep_efficiency"] >= lockstep and metrics["step_over_perfect"] <= over
    assert metrics["max_bin_tokens"] <= cap


def test_long_prompts_are_computed_few_times():
    case = trace(**RAG, prompt_bounds=(256, 7000), prompts=64, size=16, seed=0)
    alone, shared = (plan_packing(*case, 8, 16384, costs(*QWEN_7B, 16384), sharing=s) for s in (False, True))
    assert step_time(alone) >= 3.9 * step_time(shared)
    assert plan_metrics(shared)["prompt_work_saved"] >= 0.7 and not plan_metrics(alone)["sharing_active"]


@pytest.fixture
def packings(monkeypatch):
    """Numbers of bins that were packed into."""
    tried = []

    def count(units, items, starts, cap):
        tried.append(len(starts))
        return place_longest_first(units, items, starts, cap)

    monkeypatch.setattr(planning, "place_longest_first", count)
    return tried


def test_a_plan_near_the_bound_ends_the_search(packings):
    case = trace(**LONG_8K, prompts=64, size=8, seed=0)
    assert plan_packing(*case, 8, 16384, costs(*QWEN_4B, 16384), sharing=False).num_slots == 9
    assert packings == [72]


def test_hard_cases_end_soon(packings):
    """Lengths just over half the cap make every count of bins below one a sample fail; one group is one big unit."""
    halves = np.tile([[1, 60]], (1000, 1))
    assert plan_packing(halves, np.arange(1000), 1, 120, Coefficients(0.0, 1.0, 0.0)).num_slots == 1000
    assert plan_packing(halves, np.arange(1000), 8, 120, Coefficients(0.0, 1.0, 0.0)).num_slots == 125
    assert len(packings) <= 5
    one = np.tile([[50, 40]], (1000, 1))
    plan = plan_packing(one, np.zeros(1000, int), 4, 200, Coefficients(9.0, 1.0, 0.0))
    check(plan, one, np.zeros(1000, int), True)
    assert 84 <= plan.num_slots <= 86  # three of a prompt to a bin


def test_members_that_meet_pay_their_prefix_once():
    tokens, prefixes = [5, 5, 4, 4, 25, 5, 4], [10, 10, 10, 10, 0, 0, 0]
    items = Items([0, 0, 0, 0, 1, 2, 3], tokens, list(map(float, tokens)), prefixes, list(map(float, prefixes)))
    units = [make_unit(members, items) for members in ([0, 1], [2, 3], [4], [5], [6])]
    # 25 | 20, then 18 of the second's key for 8, then 5 beside 25 and 4 beside 28
    assert place_longest_first(units, items, [0.0, 0.0], 99) == [{1: [4], 2: [5]}, {0: [0, 1, 2, 3], 3: [6]}]
    assert place_longest_first(units[:2] + units[4:], items, [0.0], 38) == [{0: [0, 1, 2, 3], 3: [6]}]


def test_few_groups_on_many_ranks_are_cut():
    lengths, groups = np.tile([[100, 100]], (32, 1)), np.arange(32) // 8
    for cap in (1020, 2040):  # cut to half of it, to a quarter
        plan = plan_packing(lengths, groups, 8, cap, Coefficients(50.0, 1.0, 0.0))
        assert set(itertools.chain.from_iterable(plan.tokens)) == {99 + 4 * 101}


def test_dear_micro_batches_are_fewer():
    """A second slot evens the ranks out; it is taken where that saves more than a slot costs."""
    lengths = [(1, 7), (1, 8), (1, 10), (1, 3), (1, 3), (1, 8)]
    plans = [plan_packing(lengths, range(6), 2, 23, Coefficients(c0, 1.0, 0.5)) for c0 in (0.0, 1.5, 50.0)]
    assert [plan.num_slots for plan in plans] == [2, 1, 1]


@pytest.mark.parametrize(("a", "num_samples"), [(1.1, 24), (1.3, 12)])
def test_rounding_does_not_pay_for_a_micro_batch(a, num_samples):
    plan = plan_packing([(1, 6)] * num_samples, range(num_samples), 2, 1000, Coefficients(0.0, a, 0.0))
    assert plan.num_slots == 1


def test_one_rank_fills_its_bins():
    plan = plan_packing([(1, 5), (1, 3), (1, 1), (1, 1)], range(4), 1, 10, Coefficients(0.0, 1.0, 0.0))
    assert plan.tokens == ((10, 4),)


def test_few_samples_and_none():
    c = Coefficients(1.0, 1.0, 0.5)
    assert plan_packing([], [], 3, 8, c).bins == ((), (), ())
    assert describe_plan(plan_packing([], [], 3, 8, c)) == "no micro-batches"
    plan = plan_packing([(3, 4), (1, 1)], [7, -2], 4, 8, c)
    assert plan.bins == ((((0,),),), (((1,),),), ((),), ((),))
    assert plan.tokens == ((7,), (2,), (1,), (1,)) and plan.costs == ((7 + 24.5,), (2 + 2.0,), (1.5,), (1.5,))


def test_metrics_of_a_plan_by_hand():
    c = Coefficients(c0=2.0, a=1.0, b=0.0)
    plan = plan_packing([(5, 4), (5, 2), (1, 6)], [0, 0, 1], 2, 12, c)
    assert plan.bins == ((((0, 1),),), (((2,),),))  # 4 + 5 + 3 tokens beside 7
    metrics = plan_metrics(plan)
    assert metrics == {
        "num_micro_batches": 1,
        "fewest_micro_batches": 1,
        "lockstep_efficiency": pytest.approx(19 / 24),
        "barrier_efficiency": pytest.approx(19 / 24),
        "fill": pytest.approx(19 / 24),
        "step_over_perfect": pytest.approx(14 / 11.5),
        "balance": pytest.approx(12 / 9.5),
        "prompt_work_saved": pytest.approx(4 / 23),
        "sharing_active": True,
        "fragments": 2,
        "filler": 0,
        "own_bins": 0,
        "max_bin_tokens": 12,
    }
    assert describe_plan(plan) == "1 micro-batch, 79 % full, 79.2 % balanced, prompt work saved 17 %"


GOOD = {"lengths": [(3, 4)], "groups": [0], "num_ranks": 1, "cap": 8, "coefficients": Coefficients(0.0, 1.0, 0.0)}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"lengths": [(3, float("nan"))]}, "lengths must be whole numbers"),
        ({"lengths": [(3, 1.5)]}, "lengths must be whole numbers"),
        ({"lengths": [("a", "b")]}, "lengths must be whole numbers"),
        ({"lengths": [(3, 0)]}, "a prompt and a completion token; lengths hold 0"),
        ({"lengths": [(-3, 9)]}, "lengths hold -3"),
        ({"lengths": [(3, 4, 5)]}, r"lengths must be \(n, 2\)"),
        ({"lengths": [3, 4]}, r"lengths must be \(n, 2\)"),
        ({"groups": [0, 1]}, r"groups \(n,\)"),
        ({"groups": [0.5]}, "groups must be whole numbers"),
        ({"lengths": [(3, 4), (2, 4)], "groups": [5, 5]}, "samples of group 5 have prompts of different lengths"),
        ({"cap": 0}, "cap must be a whole number of at least 1, got 0"),
        ({"cap": 8.5}, "cap must be a whole number"),
        ({"num_ranks": 0}, "num_ranks must be a whole number of at least 1"),
        ({"hard_cap": 7}, "hard_cap must be a whole number of at least 8, got 7"),
        ({"coefficients": Coefficients(0.0, float("inf"), 0.0)}, r"coefficients\.a must be finite"),
        ({"coefficients": Coefficients(0.0, 1.0, -1.0)}, r"coefficients\.b must be finite and at least 0"),
        ({"coefficients": Coefficients(5.0, 0.0, 0.0)}, "must be above 0"),
        ({"cap": 6}, r"a sample of 7 tokens exceeds train\.tokens_per_micro_batch=6$"),
        ({"cap": 4, "hard_cap": 6}, r"a sample of 7 tokens exceeds train\.hard_cap=6$"),
    ],
)
def test_what_no_plan_can_hold_is_refused(bad, words):
    with pytest.raises(ValueError, match=words) as error:
        plan_packing(**(GOOD | bad))
    assert "\n" not in str(error.value)
