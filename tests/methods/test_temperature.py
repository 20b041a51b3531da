"""EntropyTemperature: worked values, its guards, and resume."""

import math

import pytest

from e3fast.config import RunConfig
from e3fast.methods import EntropyTemperature
from e3fast.methods.e3 import width_spread
from tests.records import context, request, stats

V = 151936


def started(tau=1.0, spread=V, **knobs):
    method = EntropyTemperature(**knobs)
    method.start(RunConfig(), 10)
    method.tau, method.spread = tau, width_spread(spread)
    return method


@pytest.mark.parametrize(
    ("width", "value"), [(32000, 12.7127), (50257, 13.2068), (128256, 14.2266), (V, 14.4104), (152064, 14.4113)]
)
def test_spread_of_the_vocabulary(width, value):
    assert width_spread(width) == pytest.approx(value, abs=5e-5)


@pytest.mark.parametrize(
    ("tau", "entropy", "expected"),
    [(1, 0.70, 1.005707), (1, 0.84, 0.993055), (1, 0.38, 1.048101), (1.1, 0.70, 1.106905)],
)
def test_one_step(tau, entropy, expected):
    method = started(tau, target=0.76, anneal=False)
    method.learn(2, 100, entropy)
    assert method.tau == pytest.approx(expected, abs=1e-6)


def test_the_first_steps_only_measure():
    method, taus = started(anneal=False), []
    for step, entropy in enumerate([0.76, 0.70, 0.72, 0.78], start=1):
        taus.append(method.plan(context(), [request()])[0].temperature)
        method.observe(context(step=step - 1, max_steps=100), [], stats(entropy, V))
    assert [*taus, method.tau] == pytest.approx([1, 1, 1.005707, 1.009502, 1.007665], abs=1e-6)


def test_annealing():
    method = started()
    expected = {288: 1, 289: 0.999993, 336: 0.985355, 384: 0.95, 432: 0.914645, 480: 0.9}
    assert {t: method.anneal_share(t, 480) for t in expected} == pytest.approx(expected, abs=1e-6)
    for steps, start in ((100, 60), (333, 200)):
        assert method.anneal_share(start, steps) == 1 and method.anneal_share(start + 1, steps) < 1
    late = started(anneal_lag=1)
    assert late.anneal_share(289, 480) == method.anneal_share(288, 480)


def plant(method, steps=480, drift=5e-4, elasticity=1.5):
    """A policy that loses entropy by itself and answers the temperature with a fixed elasticity."""
    taus, entropies = [], []
    for t in range(1, steps + 1):
        taus.append(method.tau)
        entropies.append(0.76 * math.exp(-drift * (t - 1)) * method.tau**elasticity)
        method.learn(t, steps, entropies[-1])
    return taus, entropies


def test_plant_is_held():
    taus, entropies = plant(started(anneal=False))
    assert [taus[99], taus[239], taus[479]] == pytest.approx([1.0303, 1.0797, 1.169904], abs=5e-5)
    assert max(abs(h / 0.76 - 1) for h in entropies) == pytest.approx(0.0047, abs=5e-5)


def test_plant_with_annealing():
    taus, entropies = plant(started())
    assert taus[287] == pytest.approx(1.0972, abs=5e-5)
    assert taus[479] == pytest.approx(1.091114, abs=5e-7) and entropies[479] == pytest.approx(0.681719, abs=5e-7)


def test_a_stiff_plant_stays_finite():
    taus, _ = plant(started(anneal=False), elasticity=29.5)
    assert all(0.5 <= tau <= 2.0 for tau in taus)
    _, entropies = plant(started(anneal=False), elasticity=28.0, drift=0.0)
    assert abs(entropies[-1] / 0.76 - 1) < 1e-3


@pytest.mark.parametrize("entropy", [0.0, math.nan, 1e-7])
def test_an_unusable_entropy_keeps_the_temperature(entropy):
    method = started(1.1, target=0.76)
    method.learn(5, 100, entropy)
    assert method.tau == 1.1 and method.skipped == 1


def test_clips():
    method = started(target=1.0, anneal=False)
    method.learn(2, 100, 1e-5)
    assert method.tau == pytest.approx(1.1)
    for step in range(50):
        method.learn(step + 2, 100, 1e-5)
    assert method.tau == 2.0


def test_a_start_outside_the_range_is_refused():
    from e3fast.config import RolloutConfig

    with pytest.raises(ValueError, match=r"rollout.temperature must be in \[tau_min=0.5, tau_max=2.0\], got 0.3"):
        EntropyTemperature().start(RunConfig(rollout=RolloutConfig(temperature=0.3)), 10)


def test_resume_continues_bit_for_bit():
    method, again = started(), started()
    for step in range(1, 20):
        method.learn(step, 40, 0.7 + 0.01 * (step % 3))
    again.restore(method.state())
    for step in range(20, 41):
        method.learn(step, 40, 0.7)
        again.learn(step, 40, 0.7)
    assert method.state() == again.state()


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"target": 0.0}, 'target entropy must be "first" or > 0, got 0'),
        ({"target": "last"}, 'target entropy must be "first" or > 0, got last'),
        ({"anneal_factor": 1.2}, "anneal_factor must be in (0, 1], got 1.2"),
        ({"tau_min": 3.0}, "tau_min must be in (0, tau_max=2.0], got 3"),
        ({"anneal": False, "anneal_factor": 0.9}, "anneal_factor is set but anneal is off"),
    ],
)
def test_bad_knobs(knobs, message):
    with pytest.raises(ValueError) as error:
        EntropyTemperature(**knobs).start(RunConfig(), 10)
    assert message in str(error.value)
