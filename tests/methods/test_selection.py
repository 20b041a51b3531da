"""SkipTrivial, PosteriorSampler, FixedTemperature: rules, worked values and laws; the guards of all in selection.py."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from e3fast.config import RunConfig, TrainConfig
from e3fast.methods.base import check_methods
from e3fast.methods.e3 import EntropyTemperature
from e3fast.methods.expo import GaussianCurriculum
from e3fast.methods.lope import LoremRetry
from e3fast.methods.selection import (
    DynamicSampling,
    FixedTemperature,
    PosteriorSampler,
    SkipTrivial,
)
from e3fast.prompts import PromptPool
from e3fast.streams import stream_key, uniforms
from tests.methods.steps import clean_of, resumed, sample_step, started
from tests.records import context, prompt, request, stats


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (DynamicSampling(max_rounds=1), "max_rounds must be >= 2, got 1"),
        (DynamicSampling(margin=0.8), "margin must be >= 1, got 0.8"),
        (DynamicSampling(margin=float("nan")), "margin must be >= 1, got nan"),
        (DynamicSampling(margin=1.25, full_batches=True), "margin is set but full_batches is on"),
        (SkipTrivial(target=0), "target must be in (0, 1], got 0"),
        (SkipTrivial(q_max=1.1), "q_max must be in (0, 1], got 1.1"),
        (SkipTrivial(q_min=0.97), "q_min must be in (0, q_max=0.95], got 0.97"),
        (SkipTrivial(initial=0.01), "initial must be in [q_min=0.05, q_max=0.95], got 0.01"),
        (PosteriorSampler(lam=0), "lam must be in (0, 1], got 0"),
        (PosteriorSampler(lam=1.5), "lam must be in (0, 1], got 1.5"),
        (PosteriorSampler(pool=1), "pool must be >= 2, got 1"),
        (FixedTemperature(temperature=0), "temperature must be > 0, got 0"),
        (FixedTemperature(temperature=float("inf")), "temperature must be > 0, got inf"),
        (FixedTemperature(start_step=100), "start_step must be in [0, train.steps=100), got 100"),
        (FixedTemperature(start_step=-1), "start_step must be in [0, train.steps=100), got -1"),
    ],
)
def test_bad_knobs(method, message):
    with pytest.raises(ValueError) as error:
        started(method)
    assert str(error.value) == message


def test_order_and_owners():
    check_methods([FixedTemperature(), LoremRetry(), DynamicSampling(), SkipTrivial(), PosteriorSampler()])
    assert FixedTemperature.owns == {"temperature"} and PosteriorSampler.owns == {"selection"}
    assert (FixedTemperature.order, DynamicSampling.order) == (20, 50)
    assert SkipTrivial.order == PosteriorSampler.order == 60
    with pytest.raises(ValueError, match="EntropyTemperature and FixedTemperature both set the temperature"):
        check_methods([EntropyTemperature(), FixedTemperature()])
    with pytest.raises(ValueError, match="write LoremRetry, DynamicSampling"):
        check_methods([DynamicSampling(), LoremRetry()])


def test_rounds_are_a_knob():
    assert DynamicSampling().max_rounds == 10 and DynamicSampling(max_rounds=4).max_rounds == 4


def test_notes_at_start():
    config = RunConfig(train=TrainConfig(prompts_per_step=6, steps=2))
    assert "leaves none to refill from" in DynamicSampling().start(config, 6)[0]
    assert DynamicSampling().start(config, 7) == []
    assert SkipTrivial().start(config, 12) == []
    assert SkipTrivial().start(config, 13) == [
        "SkipTrivial: q stays 0.5, the run draws fewer prompts than the pool has"
    ]


# SkipTrivial


def test_keep_probability_by_streak():
    method = started(SkipTrivial(), 8)
    expected = [1, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.01]
    for sign in (1, -1):
        method.streak[:] = sign * np.arange(8)
        assert method.keep_probability().tolist() == expected
    method.q_easy, method.q_hard = 0.9, 0.3
    method.streak[:] = [2, -2, 0, 1, -1, 100, -100, 0]
    assert method.keep_probability() == pytest.approx([0.81, 0.09, 1, 0.9, 0.3, 0.01, 0.01, 1], abs=1e-12)


def test_streaks():
    """Only the last visits in a row count, of one kind; a step without a verdict is no visit."""
    method, seen = started(SkipTrivial()), []
    for judged, correct in [(8, 8), (8, 8), (0, 0), (8, 0), (8, 0), (8, 0), (8, 3), (8, 0), (8, 8)]:
        method.observe(clean_of({2: (judged, correct)}), [], stats())
        seen.append(int(method.streak[2]))
    assert seen == [1, 2, 2, -1, -2, -3, 0, -1, 1]
    assert method.streak[[0, 1, 3, 4, 5]].tolist() == [0] * 5


@pytest.mark.parametrize(
    ("judged", "correct", "streak"),
    [(50, 49, 1), (48, 47, 0), (100, 11, -1), (9, 1, 0), (10, 1, -1), (8, 1, 0), (8, 7, 0), (1, 1, 1), (1, 0, -1)],
)
def test_which_rates_are_trivial(judged, correct, streak):
    method = started(SkipTrivial())
    method.observe(clean_of({0: (judged, correct)}), [], stats())
    assert method.streak[0] == streak


def q_after(num_easy, num_hard, total, visits=6, **knobs):
    method = started(SkipTrivial(**knobs), total)
    outcomes = [(8, 8)] * num_easy + [(8, 0)] * num_hard + [(8, 4)] * (total - num_easy - num_hard)
    ctx = clean_of(dict(enumerate(outcomes)), visits=visits, num_prompts=6)
    method.observe(ctx, [], stats())
    return round(method.q_easy, 6), round(method.q_hard, 6)


def test_q_follows_the_targets():
    """Shares of 1/12 all-correct and 1/6 all-wrong are the targets, and at the target q falls."""
    assert q_after(1, 2, 12) == (0.49, 0.49)
    assert q_after(0, 2, 12) == (0.51, 0.49)
    assert q_after(1, 1, 12) == (0.49, 0.51)
    assert q_after(1, 2, 13) == (0.51, 0.51)
    assert q_after(4, 8, 24, target=0.5) == (0.49, 0.49)
    assert q_after(3, 7, 24, target=0.5) == (0.51, 0.51)


def test_q_stays_in_the_first_phase():
    """Up to the pool's size in visits, this step's included; and in a step without a verdict."""
    assert q_after(6, 0, 6, visits=5) == (0.5, 0.5)
    assert q_after(6, 0, 6, visits=6) == (0.49, 0.51)
    method = started(SkipTrivial())
    method.observe(clean_of({0: (0, 0)}, visits=60), [], stats())
    assert (method.q_easy, method.q_hard) == (0.5, 0.5)


def test_prompts_without_a_verdict_are_in_no_share():
    """One all-correct prompt of 12 judged is at the target; 12 failed ones beside them would make it 1/24."""
    method = started(SkipTrivial(), 24)
    outcomes = {0: (8, 8)} | {row: (8, 4) for row in range(1, 12)} | {row: (0, 0) for row in range(12, 24)}
    method.observe(clean_of(outcomes, visits=6), [], stats())
    assert method.q_easy == pytest.approx(0.49) and method.streak[12:].tolist() == [0] * 12


def test_skips_are_a_bernoulli_of_the_row():
    """Weight 1 where u_row of the step's stream is below the probability: the same in a refill, another next step."""
    method = started(SkipTrivial())
    method.streak[:] = [0, 1, 2, -1, -2, 50]
    counts = np.zeros(6)
    for step in range(4000):
        weights = method.weigh(context(step=step), [])
        counts += weights
    assert set(np.unique(weights)) <= {0.0, 1.0} and counts[0] == 4000
    assert counts / 4000 == pytest.approx([1, 0.5, 0.25, 0.5, 0.25, 0.01], abs=0.03)
    u = uniforms(stream_key(7, "skip", 3), range(6))
    wanted = (u < np.array([1, 0.5, 0.25, 0.5, 0.25, 0.01])).astype(float)
    assert method.weigh(context(step=3), []).tolist() == wanted.tolist()
    assert method.weigh(context(step=3, round=2, need=1), []).tolist() == wanted.tolist()


def test_a_skipped_prompt_has_weight_0_beside_a_curriculum():
    skip, curriculum = started(SkipTrivial()), started(GaussianCurriculum())
    skip.streak[:] = [99, 99, 99, 0, 0, 0]
    pool, ctx = PromptPool([prompt(row) for row in range(6)], 1), context(step=2)
    assert skip.weigh(ctx, [])[:3].tolist() == [0, 0, 0]
    drawn = pool.draw(3, [("a", skip.weigh(ctx, [])), ("b", curriculum.weigh(ctx, []))], 2)
    assert {p.row for p in drawn} == {3, 4, 5}


STEPS = st.lists(
    st.dictionaries(st.integers(0, 5), st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=6), max_size=30
)


def play(method, steps, first=0):
    """Observe steps of {row: (judged, correct)}; each counts as 3 visits, in a pool of 6."""
    for i, outcomes in enumerate(steps, start=first):
        counts = {row: (judged, min(correct, judged)) for row, (judged, correct) in outcomes.items()}
        method.observe(clean_of(counts, step=i, visits=3 * (i + 1)), [], stats())


@given(STEPS, st.sampled_from([0.05, 0.5, 0.95]))
def test_q_stays_in_its_limits_and_nobody_is_lost(steps, initial):
    method = started(SkipTrivial(initial=initial))
    play(method, steps)
    assert 0.05 <= method.q_easy <= 0.95 and 0.05 <= method.q_hard <= 0.95
    kept = method.keep_probability()
    assert np.all((kept >= 0.01) & (kept <= 1)) and np.all(kept[method.streak == 0] == 1)
    assert 0.01 <= method.report()["keep_share"] <= 1


@given(st.sampled_from([SkipTrivial, PosteriorSampler, DynamicSampling]), STEPS, st.integers(0, 30))
def test_a_resumed_run_goes_on_bit_for_bit(cls, steps, cut):
    """State survives JSON exactly, wherever the run is cut, and weighs alike ever after."""
    whole, early = started(cls()), started(cls())
    play(whole, steps)
    play(early, steps[:cut])
    late = resumed(early, started(cls()))
    assert late.state() == early.state() and json.dumps(late.state()) == json.dumps(early.state())
    play(late, steps[cut:], first=len(steps[:cut]))
    assert late.state() == whole.state()
    assert np.array_equal(late.weigh(context(step=40), []), whole.weigh(context(step=40), []))
    for name, value in vars(whole).items():
        assert type(getattr(late, name)) is type(value)
        assert not isinstance(value, np.ndarray) or getattr(late, name).dtype == value.dtype


# PosteriorSampler


@pytest.mark.parametrize(("lam", "after"), [(1.0, [(3, 7), (11, 7)]), (0.5, [(3, 7), (10, 4)])])
def test_posterior_after_visits(lam, after):
    method = started(PosteriorSampler(lam=lam))
    for correct, expected in zip((2, 8), after, strict=True):
        method.observe(clean_of({4: (8, correct), 5: (0, 0)}), [], stats())
        assert (method.alpha[4], method.beta[4]) == expected
    assert method.alpha[[0, 1, 2, 3, 5]].tolist() == method.beta[[0, 1, 2, 3, 5]].tolist() == [1] * 5
    report = method.report()
    assert report["visited_share"] == 1 / 6
    assert report["mean_rate"] == pytest.approx((2.5 + after[1][0] / sum(after[1])) / 6)


@given(
    st.integers(1, 60), st.integers(0, 60), st.integers(2, 16), st.integers(0, 5), st.integers(0, 3), st.integers(1, 60)
)
def test_distinct_rows_none_of_them_drawn(num_prompts, num_drawn, pool, step, round_, need):
    """`need` rows with weight 1, all of them candidates, none drawn before in the step; fewer only where too few are
    left. The same call gives the same."""
    num_drawn = min(num_drawn, num_prompts)
    drawn = {str(row): row for row in range(num_drawn)}
    method = started(PosteriorSampler(pool=pool), num_prompts)
    ctx = context(num_prompts=num_prompts, step=step, round=round_, need=need, rows=drawn)
    weights = method.weigh(ctx, [])
    assert weights.shape == (num_prompts,) and set(np.unique(weights)) <= {0.0, 1.0}
    chosen = np.flatnonzero(weights)
    assert len(chosen) == min(need, num_prompts - num_drawn) and np.all(chosen >= num_drawn)
    candidates = method.candidates(ctx)
    assert len(set(candidates.tolist())) == len(candidates) == min(pool * need, num_prompts - num_drawn)
    assert set(chosen) <= set(candidates)
    assert np.array_equal(method.weigh(ctx, []), weights)


def test_the_candidates_are_the_largest_of_the_stream():
    method = started(PosteriorSampler(pool=2), 100)
    ctx = context(need=5, step=4, rows={"a": 17, "b": 42})
    u = uniforms(stream_key(7, "candidates", 4), range(100))
    wanted = [row for row in np.argsort(-u).tolist() if row not in (17, 42)][:10]
    assert method.candidates(ctx).tolist() == wanted


def test_rates_near_a_half_are_taken():
    """With sharp posteriors the choice is that of the means: row 0..5 at .02 .3 .45 .5 .6 .97, three needed."""
    method = started(PosteriorSampler())
    means = np.array([0.02, 0.3, 0.45, 0.5, 0.6, 0.97])
    method.alpha, method.beta = 1e6 * means, 1e6 * (1 - means)
    for step in range(20):
        assert np.flatnonzero(method.weigh(context(step=step, need=3), [])).tolist() == [2, 3, 4]


def choice_shares(method, need, steps=4000):
    counts = sum(method.weigh(context(step=step, need=need), []) for step in range(steps))
    return counts / steps


def test_shares_of_the_choice():
    """Equal posteriors are chosen equally often; of Beta(3, 7) against Beta(10, 4) the chance follows from their
    draws: P(|r - 1/2| smaller)."""
    assert choice_shares(started(PosteriorSampler()), 3) == pytest.approx([0.5] * 6, abs=0.03)
    method = started(PosteriorSampler(), 2)
    method.alpha, method.beta = np.array([3.0, 10.0]), np.array([7.0, 4.0])
    rng = np.random.default_rng(0)
    a, b = rng.beta(3, 7, 200_000), rng.beta(10, 4, 200_000)
    chance = float(np.mean(np.abs(a - 0.5) < np.abs(b - 0.5)))
    shares = choice_shares(method, 1)
    assert shares == pytest.approx([chance, 1 - chance], abs=0.03) and shares.sum() == 1


def test_a_refill_asks_the_posterior_again():
    """Beta draws differ by round."""
    method = started(PosteriorSampler(), 60)
    first, second = (method.weigh(context(need=3, round=r), []).tolist() for r in (0, 1))
    assert first != second


def test_it_draws_what_it_chose_through_the_pool():
    outcomes = ["mixed"] * 20
    method = PosteriorSampler(pool=2)
    ctx, groups, _ = sample_step(outcomes, 4, method)
    chosen = PosteriorSampler(pool=2)
    started(chosen, 20)
    weights = chosen.weigh(context(seed=1, need=4), [])
    assert sorted(g.prompt.row for g in groups) == np.flatnonzero(weights).tolist() and len(ctx.rows) == 4


# FixedTemperature


def test_temperature_from_the_start_step_on():
    method, requests = (
        started(FixedTemperature(temperature=1.4, start_step=2)),
        [request(prompt(0)), request(prompt(1))],
    )
    assert method.plan(context(step=1), requests) == requests
    for step in (2, 3):
        assert [r.temperature for r in method.plan(context(step=step), requests)] == [1.4, 1.4]
    assert [r.temperature for r in requests] == [1.0, 1.0]
    assert started(FixedTemperature()).plan(context(), requests)[0].temperature == 1.2
    assert method.state() == {}
