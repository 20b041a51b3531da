"""What a mask drops, a drawn sequence or a row out of the importance band, leaves loss and normaliser alike."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

from e3fast.config import TrainConfig
from e3fast.learner import LocalLearner
from e3fast.objective import loss_weights
from e3fast.packing import pack
from e3fast.types import LossParams
from tests.dense import dense_rows, flat_grad, near_policy, off, routed
from tests.samples import make_samples
from tests.test_learner import CPU, SHAPE, exact_learner, step_gradient
from tests.tiny import make_model


def masked_samples(model):
    """(samples, who is dropped): drawn in and out of the band, plain and rescued far out, and some without signal."""
    plain = make_samples(SHAPE, zero_groups={1})
    shifts = [0.1, 0.2, [0.3, -0.3, 0.1, 0.0], 0.05, 0.3, 0.3, -0.2, 2.0, 0.0, 0.5, 0.01]
    routes = ["draw"] * 9 + ["rescue", "draw"]
    routes[7] = "plain"
    samples = [
        routed(near_policy(model, s, shift), route, draw=1)
        for s, shift, route in zip(plain, shifts, routes, strict=True)
    ]
    dropped = [i for i, s in enumerate(samples) if s.route == "draw" and abs(total_gap(model, s)) > math.log(2)]
    return samples, dropped


@torch.no_grad()
def total_gap(model, sample):
    return float((dense_rows(model, sample)[0].numpy() - sample.rollout_logprobs[sample.loss_mask]).sum())


MASK = LossParams(seq_mask=2.0)


@pytest.mark.parametrize("group_weight", ["token", "prompt"])
@pytest.mark.parametrize(("cap", "sharing"), [(10_000, True), (10_000, False), (31, True), (19, False)])
def test_what_the_mask_drops_leaves_loss_and_normaliser(cap, sharing, group_weight):
    """Also sequences without signal, that have no backward pass."""
    model = make_model(torch.float64)
    samples, dropped = masked_samples(model)
    assert {samples[i].has_signal for i in dropped} == {True, False} and len(dropped) < 9
    loss = dataclasses.replace(MASK, group_weight=group_weight)
    weights = loss_weights(samples, loss, 16)
    batch = pack(samples, weights, cap, 1, sharing=sharing)
    learner = exact_learner(model)
    stats, got = step_gradient(learner, batch, loss)
    kept = [i for i in range(len(samples)) if i not in dropped]
    left = sum(weights[i] * samples[i].num_loss_tokens for i in kept)
    alone = pack([samples[i] for i in kept], [weights[i] / left for i in kept], 10_000, 1, sharing=False)
    unmasked = dataclasses.replace(loss, seq_mask=None)
    want_stats, want = step_gradient(exact_learner(model), alone, unmasked)
    assert off(got, want) < 1e-5 and stats.grad_norm == pytest.approx(want_stats.grad_norm, rel=1e-5)
    assert stats.loss == pytest.approx(want_stats.loss, rel=1e-4)
    drawn = [i for i, s in enumerate(samples) if s.route == "draw"]
    assert stats.keep_rate == pytest.approx(1 - len(dropped) / len(drawn), rel=1e-6)
    _, loose = step_gradient(exact_learner(model), batch, unmasked)
    assert off(loose, want) > 0.05


@pytest.mark.parametrize(("cap", "sharing"), [(10_000, True), (31, True), (19, False)])
@pytest.mark.parametrize("mode", ["token", "sequence"])
def test_what_the_band_drops_leaves_loss_and_normaliser(mode, cap, sharing):
    """Against autograd by hand: kept rows alone, each by its truncated ratio, over the kept weight."""
    model = make_model(torch.float64)
    plain, rng = make_samples(SHAPE, zero_groups={1}), np.random.default_rng(0)
    samples = [near_policy(model, s, rng.normal(0, 0.5, s.num_loss_tokens).tolist()) for s in plain]
    loss = LossParams(importance_sampling=mode, importance_cap=1.2, importance_band=1.6)
    weights = loss_weights(samples, loss, 16)
    stats, got = step_gradient(exact_learner(model), pack(samples, weights, cap, 1, sharing=sharing), loss)
    twin = copy.deepcopy(model)
    total = kept_weight = 0.0
    for sample, weight in zip(samples, weights, strict=True):
        logprobs = dense_rows(twin, sample)[0]
        gaps = logprobs.detach() - torch.as_tensor(sample.rollout_logprobs[sample.loss_mask])
        ratio = (gaps if mode == "token" else gaps.sum().expand_as(gaps)).exp()
        kept = (ratio <= 1.6) & (ratio >= 1 / 1.6)
        advantages = torch.as_tensor(sample.advantages[sample.loss_mask])
        total = total - (weight * kept * ratio.clamp(max=1.2) * advantages * logprobs).sum()
        kept_weight += weight * int(kept.sum())
    (total / kept_weight).backward()
    assert 0.2 < kept_weight < 0.9 and stats.importance_kept == pytest.approx(kept_weight, rel=1e-5)
    assert off(got, flat_grad(twin)) < 1e-5 and 0 < stats.importance_capped < 1


def test_a_step_of_which_the_mask_leaves_nothing_is_skipped_and_counted():
    model = make_model()
    samples = [routed(near_policy(model, s, 1.0), "draw", draw=1) for s in make_samples(SHAPE)]
    learner = LocalLearner(copy.deepcopy(model), TrainConfig(learning_rate=1e-2), CPU)
    stats = learner.update(pack(samples, loss_weights(samples, MASK, 16), 40, 1), MASK)
    assert not stats.stepped and stats.keep_rate == stats.loss == 0 and learner.steps_done == 1
    assert all(torch.equal(a, b) for a, b in zip(learner.model.parameters(), model.parameters(), strict=True))
