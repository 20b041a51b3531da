"""The policy-loss kernels in Triton's interpreter: fp32 against the twin in fp64."""

import pytest
import torch

from csrc_triton.grpo_loss import BLOCK, COUNTERS, Knobs, Tokens, launch_forward
from tests.csrc_triton.policy import EDGE_KNOBS, KNOBS, counted, edges, twin, vectors
from tests.interpreter.poison import poisoned  # noqa: F401

pytestmark = pytest.mark.usefixtures("poisoned")


def run(rows, knobs):
    """(loss, slopes, counters by name) of the kernels on fp32 numbers."""
    single = lambda x: x.float() if x is not None and x.is_floating_point() else x  # noqa: E731
    lp, old, adv, mask = map(single, rows)
    tokens = Tokens(lp, old, adv, mask, single(knobs.get("ref_logprobs")), single(knobs.get("correction")))
    low, high = 1 - knobs.get("clip_low", 0.2), 1 + knobs.get("clip_high", 0.2)
    options = Knobs(low, high, knobs.get("delta"), knobs.get("beta", 0.0), knobs.get("kl", "k3"))
    loss, slopes, counters = launch_forward(tokens, options)
    return loss, slopes, dict(zip(COUNTERS, counters, strict=True))


@pytest.mark.parametrize("name", KNOBS)
@pytest.mark.parametrize("t", [1, 7, 33])
def test_value_gradient_and_counters(name, t):
    rows, knobs = vectors(t, KNOBS[name])
    loss, slopes, counters = run(rows, knobs)
    wanted = twin(rows, knobs, 1.0)
    torch.testing.assert_close(loss.double(), wanted[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slopes.double(), wanted[1], rtol=1e-5, atol=1e-6)
    for key, value in counted(rows, knobs).items():
        assert float(counters[key]) == pytest.approx(float(value), rel=1e-5, abs=1e-5), key


@pytest.mark.parametrize("t", [BLOCK, 300 * BLOCK + 5])
def test_blocks_add_up(t):
    """Beyond 256 blocks the last stage takes more than one step."""
    lp = torch.zeros(t)
    mask = torch.arange(t) % 3 != 0
    gap = torch.full((t,), 0.5)
    gap[1], gap[t - 1] = 1.0, -1.5  # the largest ratio stands in the first block, the largest log-ratio in the last
    adv = torch.ones(t)
    mask[t - 1] = True
    rows = (lp + gap, lp, adv, mask)
    loss, slopes, counters = run(rows, {"clip_high": 9.0})
    ratio = gap.double().exp()[rows[3]]
    assert float(loss) == pytest.approx(-float(ratio.sum()), rel=1e-5)
    assert float(counters["tokens"]) == int(rows[3].sum())
    assert float(counters["abs_log_ratio_max"]) == 1.5 and float(counters["ratio_max"]) == pytest.approx(2.718282)
    torch.testing.assert_close(slopes.double()[rows[3]], -ratio, rtol=1e-6, atol=0)
    assert bool((slopes[~rows[3]] == 0).all())


@pytest.mark.parametrize("knobs", EDGE_KNOBS)
def test_ties_take_the_gradient_of_autograd(knobs):
    rows = edges(torch.float32)
    _, slopes, _ = run(rows, knobs)
    wanted = twin(rows, knobs, 1.0)[1]
    assert torch.equal(slopes == 0, wanted == 0)
    torch.testing.assert_close(slopes, wanted, rtol=1e-6, atol=0)


def test_a_token_far_below_is_counted_by_its_clamped_ratio():
    gap = torch.tensor([-100.0, -0.125, -30.0], dtype=torch.float64)
    rows = (gap, torch.zeros_like(gap), torch.tensor([1.0, -1.0, -2.0], dtype=torch.float64), torch.ones(3) > 0)
    counters = run(rows, {})[2]
    for key, value in counted(rows, {}).items():
        assert float(counters[key]) == pytest.approx(float(value), rel=1e-5, abs=1e-5), key


def test_on_policy_the_gradient_is_exact():
    (lp, _, adv, mask), knobs = vectors(64, {"correction": True})
    _, slopes, counters = run((lp, lp, adv, mask), knobs)
    assert torch.equal(slopes, torch.where(mask, -knobs["correction"].float() * adv.float(), torch.zeros(())))
    assert float(counters["ratio_max"]) == 1.0


def test_masked_rows_are_not_read():
    rows, knobs = vectors(32, KNOBS["all"])
    clean = run(rows, knobs)
    out = ~rows[3]
    garbage = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30] * 8, dtype=torch.float64)
    dirty = [torch.where(out, garbage, x) for x in rows[:3]]
    knobs = {k: torch.where(out, garbage, v) if isinstance(v, torch.Tensor) else v for k, v in knobs.items()}
    loss, slopes, counters = run((*dirty, rows[3].float()), knobs)
    assert torch.equal(loss, clean[0]) and torch.equal(slopes, clean[1])
    assert all(torch.equal(counters[key], clean[2][key]) for key in COUNTERS)


@pytest.mark.parametrize("where", ["logprobs", "old", "advantages", "correction", "ref_logprobs"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_nan_is_not_hidden(where, kl):
    rows, knobs = vectors(12, {**KNOBS["all"], "kl": kl})
    named = dict(zip(("logprobs", "old", "advantages", "mask"), rows, strict=True))
    {**named, **knobs}[where][4] = float("nan")  # token 4 is live
    loss, slopes, counters = run(tuple(named.values()), knobs)
    assert loss.isnan() and slopes[4].isnan() and float(counters["nonfinite"]) == 1.0
    assert int(slopes.isnan().sum()) == 1
    if where in ("logprobs", "old"):
        assert counters["ratio_max"].isnan() and counters["abs_log_ratio_max"].isnan()


@pytest.mark.parametrize("t", [0, 5])
def test_nothing_to_train_on(t):
    rows, knobs = vectors(t, KNOBS["all"])
    loss, slopes, counters = run((*rows[:3], torch.zeros(t, dtype=torch.bool)), knobs)
    assert float(loss) == 0.0 and torch.equal(slopes, torch.zeros(t))
    assert all(float(value) == 0.0 for value in counters.values())


def test_strides_are_honoured():
    rows, _ = vectors(20, {})
    wide = [torch.stack([x, x.flip(0)], 1)[:, 0] for x in rows]
    assert torch.equal(run(wide, {})[1], run(rows, {})[1])
