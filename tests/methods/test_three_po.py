"""PerturbedWeights: the split over draws, pooling, noise levels, the controller, and every refusal."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from e3fast.advantages import make_samples
from e3fast.config import RolloutConfig, RunConfig, TrainConfig
from e3fast.methods import PerturbedWeights, RolloutBudget
from e3fast.methods.three_po import pool_draws
from e3fast.noise import gaussian
from e3fast.streams import stream_key
from e3fast.types import LossConfig, LossParams
from tests.records import context, group, prompt, request, stats


def started(config=None, **knobs):
    method = PerturbedWeights(**knobs)
    method.start(config or RunConfig(rollout=RolloutConfig(rollouts_per_prompt=16)), 10)
    return method


@pytest.mark.parametrize(("total", "row", "counts"), [(10, 1, [2, 3, 3, 2]), (6, 2, [1, 1, 2, 2])])
def test_split_over_draws(total, row, counts):
    parts = started().split(request(prompt(row), total))
    assert [part.num_rollouts for part in parts] == counts and [part.draw for part in parts] == [1, 2, 3, 4]


@given(st.integers(0, 64), st.integers(0, 100), st.integers(1, 5))
def test_a_split_samples_what_the_whole_would(total, row, draws):
    """Every completion's stream is asked for once, whatever the number of draws."""
    whole = request(prompt(row), total, first_rollout=3)
    parts = PerturbedWeights(draws=draws).split(whole)
    streams = [(part.seed, part.first_rollout + j) for part in parts for j in range(part.num_rollouts)]
    assert streams == [(whole.seed, 3 + j) for j in range(total)]
    assert all(part.num_rollouts and part.route == "draw" for part in parts)
    assert max((p.num_rollouts for p in parts), default=0) <= -(-total // draws)


def drawn_groups(rewards):
    return [group(prompt(0), rewards=own, id=d, draw=d + 1) for d, own in enumerate(rewards)]


def advantages(groups):
    return [round(float(s.advantages[-1]), 4) for s in make_samples(groups, "grpo")]


def test_pooled_and_separate_credit():
    groups = drawn_groups([(1, 1), (0, 0), (1, 0), (0, 0)])
    pooled = started().regroup(context(), groups)
    assert len(pooled) == 1 and pooled[0].request.num_rollouts == 8 and pooled[0].id == 0
    assert advantages(pooled) == [1.2076, 1.2076, -0.7246, -0.7246, 1.2076, -0.7246, -0.7246, -0.7246]
    apart = started(variant="m3po").regroup(context(), groups)
    assert advantages(apart) == [0, 0, 0, 0, 0.7071, -0.7071, 0, 0]
    assert [s.draw for s in make_samples(pooled, "grpo")] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_pooling_leaves_rescues_and_plain_groups_alone():
    groups = [*drawn_groups([(1,), (0,)]), group(prompt(1), id=5), group(prompt(0), id=6, kind="extra")]
    assert [g.id for g in pool_draws(groups)] == [0, 5, 6]


def test_noise_is_named_and_scaled():
    method, weight = started(sigma=1e-2), torch.zeros(3, 5)
    got = method.perturb(context(step=4), 2, "w", weight, {})
    want = 1e-2 * gaussian(stream_key(7, "noise", 4, 2, "w"), 15).view(3, 5)
    assert torch.equal(got, want) and not weight.any()
    only_mlp = started(scope="mlp")
    assert only_mlp.perturb(context(), 1, "model.layers.0.self_attn.q_proj.weight", weight, {}) is weight
    assert only_mlp.perturb(context(), 1, "model.layers.0.mlp.up_proj.weight", weight, {}).any()


@pytest.mark.parametrize(("ess", "sigma"), [(1e8, 3.161e-3), (1e9, 9.995e-4), (1e10, 3.161e-4)])
def test_deviation_of_ivon(ess, sigma):
    config = RunConfig(train=TrainConfig(optimizer="ivon"))
    method = started(config, posterior="ivon", ess=ess)
    assert method.deviation({}) == pytest.approx(sigma, rel=2e-4)
    hess = torch.tensor([1e-3, 4e-3])
    assert method.deviation({"hess": hess})[1] == pytest.approx((ess * (4e-3 + 1e-6)) ** -0.5)


def test_what_each_variant_asks_of_the_loss():
    tune = lambda **knobs: started(**knobs).tune(context(), LossParams())  # noqa: E731
    c3po = tune()
    assert (c3po.seq_mask, c3po.gradient_at, c3po.behaviour_logprobs) == (2.0, "mean", "engine")
    assert tune(behaviour_logprobs="learner").behaviour_logprobs == "learner"
    for variant in ("b3po", "m3po"):
        loss = tune(variant=variant)
        assert (loss.seq_mask, loss.gradient_at) == (None, "draw")
    assert tune(variant="b3po", gradient_at="mean", mask=3.0).seq_mask == 3.0


def test_controller_follows_the_keep_rate():
    method = started(sigma=1e-3)
    method.observe(context(), [], stats(keep_rate=0.9))
    assert method.sigma_now == pytest.approx(1.02e-3) and method.keep_rate_ema == pytest.approx(0.9)
    for _ in range(60):
        method.observe(context(), [], stats(keep_rate=0.2))
    assert method.sigma_now < 1e-3 and method.skipped == 0
    method.observe(context(), [], stats(keep_rate=0.0))
    assert method.skipped == 1
    before = method.state()
    method.observe(context(), [], stats(keep_rate=math.nan))
    assert method.state() == before
    doubled = 1.02**35
    assert doubled == pytest.approx(2, rel=0.01), "35 steps double"


def test_keep_rate_of_a_gaussian_sequence_ratio():
    """With L ~ N(-D, 2D) the mask at 2 keeps this share of sequences."""
    rng = np.random.default_rng(0)
    expected = {0.02: 0.999, 0.05: 0.970, 0.1: 0.870, 0.2: 0.703, 0.3: 0.594, 0.5: 0.460, 1: 0.299, 2: 0.168, 5: 0.051}
    for spread, share in expected.items():
        ratios = rng.normal(-spread, math.sqrt(2 * spread), 200_000)
        assert float((np.abs(ratios) <= math.log(2)).mean()) == pytest.approx(share, abs=0.01)


M3PO_SMALL = RunConfig(methods=(RolloutBudget(),))
REFUSED = [
    ({"draws": 0}, None, "draws must be >= 1, got 0"),
    ({"variant": "b3po", "draws": 4}, None, "b3po uses one draw, got draws=4"),
    ({"gradient_at": "draw"}, None, r"gradient_at is fixed for c3po: remove it \(got 'draw'\)"),
    ({"mask": 0.5}, None, "mask must be > 1, got 0.5"),
    ({"variant": "m3po", "mask": 2.0}, None, "mask is set but the gradient of m3po is taken at the draw"),
    (
        {"variant": "m3po"},
        M3PO_SMALL,
        r"m3po with 4 draws needs at least 8 rollouts a prompt \(2 per draw\), got min_group=4",
    ),
    ({"posterior": "ivon"}, None, "posterior 'ivon' replaces the optimiser: set train.optimizer = \"ivon\""),
    ({"ess": 1e9}, None, "ess is set but posterior is 'isotropic'"),
    ({"posterior": "ivon", "sigma": 1e-3}, None, "sigma is set but posterior is 'ivon'"),
    ({"sigma": -1.0}, None, "sigma must be >= 0, got -1.0"),
    ({"variant": "m3po", "controller": True}, None, "controller moves sigma by the mask's keep rate"),
    ({"controller": False, "keep_low": 0.5}, None, "keep_low is set but the controller is off"),
    ({"keep_low": 0.9}, None, r"keep_low must be in \[0, keep_high=0.85\), got 0.9"),
    ({}, RunConfig(loss=LossConfig(aggregation="sequence")), "needs loss.aggregation 'token', got 'sequence'"),
    ({}, RunConfig(train=TrainConfig(entropy_rows="trained")), "needs train.entropy_rows 'all'"),
]


@pytest.mark.parametrize(("knobs", "config", "message"), REFUSED)
def test_refused_at_the_start(knobs, config, message):
    with pytest.raises(ValueError, match=message):
        started(config, **knobs)


def test_fewer_rollouts_than_draws_are_told():
    config = dataclasses.replace(RunConfig(), rollout=RolloutConfig(rollouts_per_prompt=3))
    assert "some prompts have no rollout of some draws" in PerturbedWeights().start(config, 10)[0]
