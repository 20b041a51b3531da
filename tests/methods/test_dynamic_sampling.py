"""DynamicSampling: which groups stay, how many prompts a refill asks for, and whole steps of rounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e3fast.methods import DynamicSampling, LoremRetry, PosteriorSampler, RolloutBudget
from e3fast.methods.selection import mixed_prompts
from tests.methods.steps import sample_step, started
from tests.records import context, group, prompt, request

MIXED, RIGHT, WRONG, LOST = ["correct", "wrong"], ["correct"] * 2, ["wrong", "truncated"], ["failed"] * 2


def test_accuracy_decides_over_all_groups_of_a_prompt():
    """Shaped rewards say nothing, failed rollouts neither; two uniform groups of one prompt can be mixed together."""
    shaped = group(prompt(0), verdicts=RIGHT, rewards=[1.0, 0.5])
    halves = [group(prompt(1), verdicts=RIGHT), group(prompt(1), verdicts=WRONG)]
    hung = group(prompt(2), verdicts=["correct", "failed"])
    groups = [
        shaped,
        *halves,
        hung,
        group(prompt(3), verdicts=LOST),
        group(prompt(4), verdicts=["unparsable", "correct"]),
    ]
    assert mixed_prompts(groups) == ["1", "4"]
    assert [g.prompt.id for g in DynamicSampling().regroup(context(), groups)] == ["1", "1", "4"]


def test_the_first_prompts_in_draw_order_stay():
    groups = [group(prompt(row), verdicts=MIXED if row % 2 else RIGHT) for row in (5, 4, 3, 2, 1, 0, 7)]
    assert [g.prompt.row for g in DynamicSampling().regroup(context(prompts_per_step=3), groups)] == [5, 3, 1]


def test_a_merged_group_counts_as_it_stands():
    """A rescued prompt is kept: LoremRetry has put a right rollout in, which the preview shows."""
    rescued = [group(prompt(0), verdicts=["wrong"] * 4), group(prompt(0), verdicts=["correct"], kind="extra")]
    groups = [rescued[0], group(prompt(1), verdicts=WRONG), rescued[1]]
    retry, method, ctx = LoremRetry(), DynamicSampling(), context()
    (kept,) = method.regroup(ctx, retry.regroup(ctx, groups))
    assert kept.counts == (4, 1)
    asked = []
    ctx = context(
        round=2,
        prompts_per_step=2,
        rows={"0": 0, "1": 1},
        refill=lambda n: asked.append(n) or [],
        regrouped=lambda groups: method.regroup(ctx, retry.regroup(ctx, groups)),
    )
    method.retry(ctx, groups)
    assert asked == [2]  # ceil(1.25 * 1 missing / half kept) = 3, at most B


@given(st.lists(st.tuples(st.integers(0, 8), st.sampled_from([MIXED, RIGHT, WRONG, LOST]))), st.integers(1, 5))
def test_regroup_is_pure_and_keeps_no_trivial_prompt(given_groups, batch):
    """The first B informative prompts by first appearance, each with all of its groups; asked twice it is the same."""
    groups = [group(prompt(row), verdicts=verdicts, id=i) for i, (row, verdicts) in enumerate(given_groups)]
    method, ctx, before = DynamicSampling(), context(prompts_per_step=batch), list(groups)
    kept = method.regroup(ctx, groups)
    assert groups == before and method.regroup(ctx, groups) == kept == method.regroup(ctx, kept)
    verdicts = {}
    for g in groups:
        verdicts.setdefault(g.prompt.row, set()).update(s.verdict for s in g.scores)
    wanted = [row for row, seen in verdicts.items() if "correct" in seen and seen & {"wrong", "truncated"}][:batch]
    assert kept == [g for g in groups if g.prompt.row in wanted]


def refill_of(num_mixed, num_trivial, batch=8, num_prompts=1000, trivial=WRONG, changes=None, **knobs):
    """How many prompts are asked for behind so many groups; None where refill is not called."""
    rows = range(num_mixed + num_trivial)
    groups = [group(prompt(row), verdicts=MIXED if row < num_mixed else trivial) for row in rows]
    asked = []
    fields = dict(prompts_per_step=batch, num_prompts=num_prompts, round=1, rows={str(row): row for row in rows})
    fields |= dict(refill=lambda n: asked.append(n) or [request(prompt(500 + i)) for i in range(n)]) | (changes or {})
    requests = started(DynamicSampling(**knobs), num_prompts).retry(context(**fields), groups)
    assert len(requests) == sum(asked) and len(asked) <= 1
    return asked[0] if asked else None


@pytest.mark.parametrize(
    ("num_mixed", "num_trivial", "knobs", "size"),
    [
        (6, 2, {}, 4),  # 2 missing, a quarter dropped: 1.25 * 2 / 0.75 = 3.33
        (6, 2, {"margin": 1.0}, 3),
        (6, 2, {"margin": 3.0}, 8),
        (6, 2, {"full_batches": True}, 8),
        (4, 4, {"margin": 1.0}, 8),
        (7, 1, {}, 2),  # 1.25 * 8/7 = 1.43
        (7, 7, {}, 3),
        (1, 7, {}, 8),
        (0, 8, {}, 8),
        (8, 0, {}, None),
        (9, 4, {}, None),
        (8, 0, {"full_batches": True}, None),
    ],
)
def test_size_of_a_refill(num_mixed, num_trivial, knobs, size):
    assert refill_of(num_mixed, num_trivial, **knobs) == size


def test_prompts_without_a_verdict_are_refilled():
    """A prompt of which every rollout failed is dropped like any other."""
    assert refill_of(6, 2, trivial=LOST) == refill_of(6, 2)


def test_no_refill_while_others_ask_or_rounds_are_over():
    assert refill_of(6, 2, changes={"pending": 1}) is None
    assert refill_of(6, 2, changes={"round": 3}, max_rounds=3) is None
    assert refill_of(6, 2, changes={"round": 2}, max_rounds=3) == 4


def test_a_refill_takes_no_more_than_the_pool_has_left():
    assert refill_of(0, 8, num_prompts=11) == 3
    assert refill_of(0, 8, num_prompts=11, full_batches=True) == 3
    assert refill_of(6, 2, num_prompts=8) is None


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["right", "wrong", "mixed"]), min_size=4, max_size=40), st.integers(2, 5), st.booleans()
)
def test_a_whole_step(outcomes, rounds, full_batches):
    """No prompt is drawn twice; what is left are the first B informative ones of the draw, fewer only where rounds or
    pool are used up."""
    method = DynamicSampling(max_rounds=rounds, full_batches=full_batches)
    ctx, groups, kept = sample_step(outcomes, 4, method)
    drawn = [g.prompt.row for g in groups]
    assert len(set(drawn)) == len(drawn) == len(ctx.rows) == len(ctx.clean) and list(ctx.rows.values()) == drawn
    mixed = [row for row in drawn if outcomes[row] == "mixed"]
    assert [g.prompt.row for g in kept] == mixed[:4] and 1 <= ctx.round <= rounds
    if len(mixed) < 4:
        assert ctx.round == rounds or len(drawn) == len(outcomes)
    assert method.report() == {"kept_share": min(len(mixed), 4) / len(drawn), "short_steps": int(len(mixed) < 4)}


def test_a_pool_without_signal_gives_an_empty_step():
    method = DynamicSampling(max_rounds=3)
    ctx, groups, kept = sample_step(["wrong"] * 20, 4, method)
    assert kept == [] and len(groups) == 12 and ctx.round == 3
    assert method.report() == {"kept_share": 0.0, "short_steps": 1}


def test_refills_are_budgeted_by_themselves():
    """Every batch of RolloutBudget's has its own total: 4 rollouts a prompt on average."""
    methods = RolloutBudget(min_group=2, max_group=6), DynamicSampling(full_batches=True)
    _, groups, _ = sample_step(["wrong"] * 30, 4, *methods)
    sizes = [len(g.rollouts) for g in groups]
    assert len(sizes) == 30 and all(sum(sizes[i : i + 4]) == 16 for i in range(0, 28, 4)) and sum(sizes) == 120


def test_rescues_come_before_refills():
    """LoremRetry has round 2 to itself; refilled prompts are not rescued."""
    methods = LoremRetry(prefix="none", num_prefixes=1, rollouts_per_prefix=2), DynamicSampling(max_rounds=4)
    ctx, groups, _ = sample_step(["wrong"] * 20, 4, *methods)
    kinds = [g.request.kind for g in groups]
    assert kinds == ["first"] * 4 + ["extra"] * 4 + ["first"] * 8 and ctx.round == 4


def test_nothing_to_report_before_a_step():
    assert np.isnan(DynamicSampling().report()["kept_share"])


def test_refills_of_a_selected_step():
    """DynamicSampling's refills ask it again, for as many as they need."""
    method = PosteriorSampler(pool=2)
    ctx, groups, kept = sample_step(["wrong", "mixed"] * 20, 4, DynamicSampling(), method)
    assert len(kept) == 4 and len({g.prompt.row for g in groups}) == len(groups) == len(ctx.rows)
