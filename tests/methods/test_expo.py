"""AccuracyKL and GaussianCurriculum: worked values, what they read, draw frequencies, and their guards."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from e3fast.config import RunConfig
from e3fast.methods.expo import AccuracyKL, GaussianCurriculum
from e3fast.prompts import PromptPool
from e3fast.types import LossParams
from tests.records import context, prompt, stats


def started(method, num_prompts=6, **config):
    assert method.start(RunConfig(**config), num_prompts) == []
    return method


def beta_of(clean, **knobs):
    return started(AccuracyKL(**knobs)).tune(context(clean=clean), LossParams()).beta


@pytest.mark.parametrize(
    ("correct", "beta"), [(0, 0.010000), (2, 0.012449), (4, 0.014621), (6, 0.016351), (8, 0.017616)]
)
def test_weight_of_the_kl_term(correct, beta):
    assert beta_of({"a": (8, correct)}) == pytest.approx(beta, abs=1e-6)
    assert beta_of({"a": (8, correct)}, beta=0.2) == pytest.approx(10 * beta, abs=1e-5)
    assert beta_of({"a": (8, correct)}, curve="constant") == pytest.approx(0.014621, abs=1e-6)


def test_accuracy_is_the_mean_over_prompts():
    """6/12 and 1/4 give 0.375; pooled rollouts would give 0.4375. A prompt without verdict does not count."""
    assert beta_of({"a": (12, 6), "b": (4, 1), "c": (0, 0)}) == 0.02 * (math.tanh(0.375) + 1) / 2


def test_a_step_without_a_verdict_has_the_weight_of_accuracy_0():
    assert beta_of({"a": (0, 0)}) == beta_of({}) == 0.01
    assert beta_of({}, curve="constant") == pytest.approx(0.014621, abs=1e-6)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.floats(1e-4, 1))
def test_only_the_kl_weight_changes_and_it_stays_in_its_range(corrects, beta):
    """The weight lies between beta/2 and beta (tanh 1 + 1)/2, and is a function of the step alone."""
    method, loss = started(AccuracyKL(beta=beta)), LossParams(clip_high=0.28, seq_mask=2.0)
    ctx = context(clean={str(i): (8, c) for i, c in enumerate(corrects)})
    tuned = method.tune(ctx, loss)
    assert beta / 2 <= tuned.beta <= beta * (math.tanh(1) + 1) / 2 * (1 + 1e-12)
    assert tuned == LossParams(clip_high=0.28, seq_mask=2.0, beta=tuned.beta) == method.tune(ctx, loss)
    assert method.state() == {} and loss.beta == 0


def test_it_needs_the_start_model_and_owns_the_weight():
    assert AccuracyKL.needs == {"reference"} and AccuracyKL.owns == {"beta"} and AccuracyKL.order == 60


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (AccuracyKL(beta=0), "accuracy_kl needs beta > 0, got 0 (remove the method instead)"),
        (AccuracyKL(beta=-0.5), "accuracy_kl needs beta > 0, got -0.5 (remove the method instead)"),
        (AccuracyKL(beta=math.nan), "accuracy_kl needs beta > 0, got nan (remove the method instead)"),
        (GaussianCurriculum(width=0), "width must be > 0, got 0"),
        (GaussianCurriculum(width=math.inf), "width must be > 0, got inf"),
        (GaussianCurriculum(alpha=1), "alpha must be in [0, 1), got 1"),
        (GaussianCurriculum(alpha=-0.1), "alpha must be in [0, 1), got -0.1"),
        (GaussianCurriculum(center=1.5), "center must be in [0, 1], got 1.5"),
        (GaussianCurriculum(initial=-1), "initial must be in [0, 1], got -1"),
    ],
)
def test_bad_knobs(method, message):
    with pytest.raises(ValueError) as error:
        method.start(RunConfig(), 6)
    assert str(error.value) == message


def visit(method, row, judged, correct):
    method.observe(context(clean={str(row): (judged, correct)}, rows={str(row): row}), [], stats())


def test_weights_of_the_curriculum():
    method = started(GaussianCurriculum())
    method.p[:] = [0, 0.125, 0.25, 0.5, 0.75, 1]
    weights = method.weigh(context(), [])
    exact = [math.exp(-((p - 0.5) ** 2) / (2 * 0.35**2)) for p in method.p]
    assert weights == pytest.approx(exact, abs=1e-12)
    assert weights == pytest.approx([0.3604, 0.5633, 0.7748, 1, 0.7748, 0.3604], abs=5e-5)


def test_chain_of_rates():
    method = started(GaussianCurriculum())
    visit(method, 2, 8, 0)
    assert method.p[2] == pytest.approx(0.45, abs=1e-6)
    visit(method, 2, 8, 2)
    assert method.p[2] == pytest.approx(0.43, abs=1e-6)
    assert method.p[[0, 1, 3, 4, 5]].tolist() == [0.5] * 5


def test_a_prompt_that_always_fails_keeps_much_of_its_weight():
    method, weights = started(GaussianCurriculum()), {}
    for count in range(1, 31):
        visit(method, 0, 8, 0)
        weights[count] = method.weigh(context(), [])[0]
    assert [weights[n] for n in (5, 10, 15, 30)] == pytest.approx([0.84, 0.65, 0.53, 0.39], abs=5e-3)


def test_prompts_without_a_verdict_keep_their_rate():
    method = started(GaussianCurriculum(initial=0.3))
    visit(method, 1, 0, 0)
    assert method.p.tolist() == [0.3] * 6


def test_draw_frequencies():
    """20,000 draws of one prompt follow w/sum(w), through the pool."""
    method = started(GaussianCurriculum(), num_prompts=4)
    method.p[:] = [0, 0.25, 0.5, 1]
    pool, counts = PromptPool([prompt(row) for row in range(4)], seed=3), np.zeros(4)
    for step in range(20000):
        (drawn,) = pool.draw(1, [("GaussianCurriculum", method.weigh(context(), []))], step)
        counts[drawn.row] += 1
    assert counts / 20000 == pytest.approx([0.1444, 0.3105, 0.4007, 0.1444], abs=0.01)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.floats(0, 1)), max_size=20),
    st.floats(0, 0.99),
    st.floats(0, 1),
)
def test_rates_stay_rates_and_survive_a_checkpoint(visits, alpha, initial):
    """p stays in [0, 1], weights in (0, 1]; state through JSON is the same bit for bit."""
    method = started(GaussianCurriculum(alpha=alpha, initial=initial))
    for row, judged, share in visits:
        visit(method, row, judged, round(share * judged))
    assert np.all((method.p >= 0) & (method.p <= 1 + 1e-12))
    weights = method.weigh(context(), [])
    assert np.all((weights > 0) & (weights <= 1))
    again = started(GaussianCurriculum(alpha=alpha, initial=initial))
    again.restore(json.loads(json.dumps(method.state())))
    assert np.array_equal(again.p, method.p) and again.p.dtype == method.p.dtype
    assert np.array_equal(again.weigh(context(), []), weights)


def test_report():
    method = started(GaussianCurriculum())
    assert method.report() == {"mean_rate": 0.5, "mean_weight": 1.0}
