"""The learner's laws: loss and gradient do not depend on packing, order or micro-batches.

Learning rate 0 keeps ratio 1.
"""

import copy
import itertools
import math

import pytest
import torch

from e3fast.config import TrainConfig
from e3fast.learner import LocalLearner
from e3fast.objective import loss_weights, token_loss
from e3fast.packing import pack
from e3fast.totals import Totals
from e3fast.types import LossParams
from tests.samples import make_samples
from tests.tiny import make_model

SHAPE = [(6, [3, 9, 4]), (2, [7, 7]), (11, [2, 5, 8, 1]), (4, [6, 12])]
CPU = torch.device("cpu")


def gradient(model, samples, loss, cap, sharing, order=None):
    """Loss and gradients of one step's samples under one way to pack them, in the model's own precision."""
    model = copy.deepcopy(model)
    learner = LocalLearner.__new__(LocalLearner)  # gradients alone: no masters, which would round fp64
    learner.model, learner.device = model, CPU
    samples = [samples[i] for i in order] if order else samples
    batch = pack(samples, loss_weights(samples, loss, 16), cap, 1, sharing=sharing)
    totals = Totals()
    for micro_batch in batch.micro_batches[0]:
        learner.backward(micro_batch, token_loss(loss), totals)
    for micro_batch in batch.forward_only[0]:
        learner.score(micro_batch, totals)
    return totals, torch.cat([p.grad.flatten() for p in model.parameters()])


LOSSES = [LossParams(aggregation=a) for a in ("token", "sequence", "group", "constant")] + [
    LossParams(group_weight="prompt")
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.aggregation}-{loss.group_weight}")
def test_loss_and_gradient_do_not_depend_on_packing(loss):
    """trl#3021, Liger#1082: means per micro-batch have given gradient norms wrong by up to 100x."""
    model, samples = make_model(torch.float64), make_samples(SHAPE, zero_groups={1})
    first, want = gradient(model, samples, loss, 10_000, False)
    ways = itertools.product((19, 31, 10_000), (False, True), (None, [8, 3, 0, 10, 5, 1, 9, 2, 4, 7, 6]))
    for cap, sharing, order in ways:
        totals, got = gradient(model, samples, loss, cap, sharing, order)
        assert float((got - want).norm() / want.norm()) < 1e-6
        assert totals.loss == pytest.approx(first.loss, rel=1e-6)
        assert (
            totals.entropy == pytest.approx(first.entropy, rel=1e-6) and totals.entropy_tokens == first.entropy_tokens
        )


def test_samples_without_signal_add_nothing_but_their_entropy():
    model, samples = make_model(torch.float64), make_samples(SHAPE, zero_groups={1})
    loss = LossParams()
    weights = loss_weights(samples, loss, 16)
    _, skipped = gradient(model, samples, loss, 10_000, True)
    rest = [i for i, s in enumerate(samples) if s.has_signal]
    batch = pack([samples[i] for i in rest], [weights[i] for i in rest], 10_000, 1)
    twin = copy.deepcopy(model)
    learner = LocalLearner.__new__(LocalLearner)
    learner.model, learner.device = twin, CPU
    learner.backward(batch.micro_batches[0][0], token_loss(loss), Totals())
    alone = torch.cat([p.grad.flatten() for p in twin.parameters()])
    assert float((alone - skipped).norm() / skipped.norm()) < 1e-6


def test_entropy_is_a_mean_over_tokens_and_not_of_means():
    totals = Totals(entropy=3.0 + 1.0, entropy_tokens=4 + 1)
    assert totals.stats(0.0, True, 10).entropy == 0.8


def steps(dtype, rate, count=3):
    torch.manual_seed(0)
    learner = LocalLearner(make_model(dtype), TrainConfig(learning_rate=rate, weight_decay=0.0), CPU)
    samples = make_samples(SHAPE)
    batch = pack(samples, loss_weights(samples, LossParams(), 16), 40, 1)
    return learner, [learner.update(batch, LossParams()) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learning_rate_zero_keeps_every_ratio_at_one_and_every_weight(dtype):
    learner, stats = steps(dtype, 0.0)
    assert all(s.ratio_max == 1.0 and s.clip_share == 0.0 for s in stats)
    assert len({s.loss for s in stats}) == 1 and len({s.entropy for s in stats}) == 1
    for got, want in zip(learner.model.parameters(), make_model(dtype).parameters(), strict=True):
        assert torch.equal(got, want)


def test_small_steps_are_not_lost_in_bf16():
    """One step of 1e-5 is below a bf16 ulp of most weights: the fp32 masters must carry it."""
    learner, _ = steps(torch.bfloat16, 1e-5, count=1)
    fresh = [p.float() for p in make_model(torch.bfloat16).parameters()]
    moved = torch.cat([(m - f).abs().flatten() for m, f in zip(learner.masters, fresh, strict=True)])
    assert float((moved > 0).float().mean()) > 0.5
    for param, master in zip(learner.params, learner.masters, strict=True):
        assert torch.equal(param, master.to(torch.bfloat16)) and param.grad is None


def test_masters_gather_the_gradients_of_all_micro_batches():
    samples, loss = make_samples(SHAPE), LossParams()
    grads = []
    for cap in (10_000, 19):
        learner = LocalLearner(make_model(torch.bfloat16), TrainConfig(), CPU)
        batch = pack(samples, loss_weights(samples, loss, 16), cap, 1, sharing=False)
        for micro_batch in batch.micro_batches[0]:
            learner.backward(micro_batch, token_loss(loss), Totals())
        grads.append(torch.cat([master.grad.flatten() for master in learner.masters]))
    assert len(batch.micro_batches[0]) > 5
    assert float((grads[1] - grads[0]).norm() / grads[0].norm()) < 0.05  # bf16 activations round differently


def test_state_round_trip_goes_on_bit_for_bit():
    learner, _ = steps(torch.float32, 1e-3)
    twin, _ = steps(torch.float32, 1e-3, count=0)
    twin.load_state(copy.deepcopy(learner.state()))
    samples = make_samples(SHAPE)
    batch = pack(samples, loss_weights(samples, LossParams(), 16), 40, 1)
    assert learner.update(batch, LossParams()) == twin.update(batch, LossParams())
    for a, b in zip(learner.params, twin.params, strict=True):
        assert torch.equal(a, b)


def test_a_resumed_optimizer_keeps_this_runs_knobs():
    old = LocalLearner(make_model(), TrainConfig(weight_decay=0.5, betas=(0.5, 0.6)), CPU)
    new = LocalLearner(make_model(), TrainConfig(weight_decay=0.0, betas=(0.9, 0.95)), CPU)
    new.load_state(copy.deepcopy(old.state()))
    assert new.optimizer.param_groups[0]["weight_decay"] == 0.0 and new.optimizer.param_groups[0]["betas"] == (
        0.9,
        0.95,
    )


def test_a_step_without_signal_changes_nothing():
    learner = LocalLearner(make_model(torch.float32), TrainConfig(learning_rate=1e-2), CPU)
    samples = make_samples(SHAPE, zero_groups={0, 1, 2, 3})
    before = [p.clone() for p in learner.params]
    stats = learner.update(pack(samples, loss_weights(samples, LossParams(), 16), 40, 1), LossParams())
    assert not stats.stepped and stats.entropy > 0 and learner.steps_done == 0
    assert all(torch.equal(a, b) for a, b in zip(before, learner.params, strict=True))


def test_probe_measures_the_elasticity_and_changes_nothing():
    """At temperature tau the entropy of softmax(z / tau) is known: check against a direct computation."""
    learner, plain = (LocalLearner(make_model(torch.float32), TrainConfig(learning_rate=1e-3), CPU) for _ in range(2))
    samples = make_samples(SHAPE, temperature=1.2)
    batch = pack(samples, loss_weights(samples, LossParams(), 16), 10_000, 1)
    stats = learner.update(batch, LossParams(), probe=True)
    at_one, elasticity = plain.probe(batch.micro_batches[0][0])
    assert (stats.entropy_at_one, stats.elasticity) == (at_one, elasticity)
    assert at_one < stats.entropy and 0.1 < elasticity < 30
    twin = LocalLearner(make_model(torch.float32), TrainConfig(learning_rate=0.0), CPU)
    hot, hotter = (
        twin.update(pack(s, loss_weights(s, LossParams(), 16), 10_000, 1), LossParams()).entropy
        for s in (samples, make_samples(SHAPE, temperature=1.2 * 1.05))
    )
    assert elasticity == pytest.approx(math.log(hotter / hot) / math.log(1.05), rel=1e-4)
    plain.update(batch, LossParams())
    assert all(torch.equal(a, b) for a, b in zip(learner.params, plain.params, strict=True))


def test_warm_up():
    learner = LocalLearner(make_model(), TrainConfig(learning_rate=1.0, warmup_steps=4), CPU)
    rates = []
    for learner.steps_done in range(6):
        rates.append(learner.learning_rate)
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
