"""The learner's laws: loss and gradient do not depend on packing, order or micro-batches.

Learning rate 0 keeps ratio 1. What a mask drops leaves loss and normaliser; a KL term and log-probs equal dense ones.
"""

import copy
import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from e3fast.config import TrainConfig
from e3fast.learner import LocalLearner
from e3fast.objective import loss_weights, token_loss
from e3fast.packing import pack
from e3fast.totals import Totals
from e3fast.types import LossParams
from tests.dense import dense_rows, flat_grad, near_policy, off, routed
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
        learner.score(micro_batch, totals, loss)
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


def exact_learner(model, **knobs):
    """A learner whose one step is plain descent at rate 1 without a clip, in the model's own fp64."""
    config = TrainConfig(learning_rate=0.0, max_grad_norm=1e9, **knobs)
    learner = LocalLearner(copy.deepcopy(model).float(), config, CPU)
    learner.model.double()
    learner.optimizer = torch.optim.SGD(learner.masters, lr=0.0)
    return learner


def step_gradient(learner, batch, loss):
    """What `update` hands to the optimizer: after the mask, before the step."""
    taken = []
    learner.optimizer.register_step_pre_hook(lambda *_: taken.append(flat_grad(learner.model)))
    stats = learner.update(batch, loss)
    return stats, taken[0] if taken else None


def dense_loss(model, reference, samples, weights, loss):
    """The step's loss without packing, of plain rows: -A, the k3 term and the entropy bonus."""
    total = 0.0
    for sample, weight in zip(samples, weights, strict=True):
        logprobs, entropy = dense_rows(model, sample)
        with torch.no_grad():
            gap = dense_rows(reference, sample)[0] - logprobs
        gap = gap.detach() + logprobs.detach() - logprobs  # the reference has no gradient
        advantages = torch.as_tensor(sample.advantages[sample.loss_mask])
        rows = -(logprobs - logprobs.detach()).exp() * advantages + loss.beta * (gap.exp() - gap - 1)
        total = total + weight * (rows - loss.entropy_bonus * entropy).sum()
    return total


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("loss", [LossParams(beta=0.5), LossParams(beta=0.2, entropy_bonus=0.1)])
def test_other_terms_have_the_gradient_of_rows_without_signal_too(loss, sharing):
    model, start = make_model(torch.float64), make_model(torch.float64, seed=3)
    samples = make_samples(SHAPE, zero_groups={1, 2})
    weights = loss_weights(samples, loss, 16)
    assert loss.needs_every_row
    batch = pack(samples, weights, 40, 1, sharing=sharing, backward="all")
    learner = exact_learner(model)
    learner.reference = copy.deepcopy(start).requires_grad_(False)
    stats, got = step_gradient(learner, batch, loss)
    twin = copy.deepcopy(model)
    want = dense_loss(twin, start, samples, weights, loss)
    want.backward()
    assert off(got, flat_grad(twin)) < 1e-6 and stats.loss == pytest.approx(want.item(), rel=1e-5)
    with torch.no_grad():
        gaps = torch.cat([dense_rows(start, s)[0] - dense_rows(model, s)[0] for s in samples])
    assert stats.kl == pytest.approx(float((gaps.exp() - gaps - 1).mean()), rel=1e-5)
    skipping = exact_learner(model)
    skipping.reference = learner.reference
    _, less = step_gradient(skipping, pack(samples, weights, 40, 1, sharing=sharing), loss)
    assert off(less, got) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_the_start_model_and_stays(dtype):
    learner = LocalLearner(make_model(dtype), TrainConfig(learning_rate=1e-3), CPU)
    learner.keep_reference()
    loss, samples = LossParams(beta=0.1), make_samples(SHAPE)
    batch = pack(samples, loss_weights(samples, loss, 16), 40, 1, backward="all")
    kl = [learner.update(batch, loss).kl for _ in range(3)]
    assert kl[0] == pytest.approx(0, abs=1e-6) and min(kl[1:]) > 0
    for kept, moved, fresh in zip(
        learner.reference.parameters(), learner.params, make_model(dtype).parameters(), strict=True
    ):
        assert torch.equal(kept, fresh) and not torch.equal(moved, fresh)
        assert not kept.requires_grad and kept.grad is None


@pytest.mark.parametrize("cap", [30, 10_000])
@pytest.mark.parametrize("sharing", [True, False])
def test_logprobs_are_the_dense_ones_sample_by_sample(sharing, cap):
    """Of completion tokens in order, those without a behaviour log-prob included."""
    model, samples = make_model(torch.float64), make_samples(SHAPE, zero_groups={1})
    holed = samples[4].loss_mask.copy()
    holed[4] = False
    samples[4] = dataclasses.replace(samples[4], loss_mask=holed)
    samples[6] = routed(samples[6], "rescue")
    batch = pack(samples, [0.0] * len(samples), cap, 1, sharing=sharing, backward="none")
    learner = exact_learner(model)
    found = learner.logprobs(batch, None)
    assert sorted(found) == list(range(len(samples)))
    for i, sample in enumerate(samples):
        with torch.no_grad():
            assert found[i] == pytest.approx(dense_rows(model, sample)[0].numpy(), rel=1e-6)
    assert all(p.grad is None for p in learner.params)


@pytest.mark.parametrize("seq_mask", [None, 2.0])
def test_entropy_does_not_care_whether_a_group_was_dropped(seq_mask):
    """Nor whether its rows have signal: what regroup drops is scored, and weighs nothing."""
    model, loss = make_model(torch.float64), dataclasses.replace(LossParams(), seq_mask=seq_mask)
    samples = make_samples(SHAPE)
    bare = [
        dataclasses.replace(s, loss_mask=np.zeros_like(s.loss_mask), advantages=np.zeros_like(s.advantages))
        if s.group in (0, 2)
        else s
        for s in samples
    ]
    rest = [s for s in samples if s.group not in (0, 2)]
    (whole, _), (dropped, got), (without, want) = (
        step_gradient(exact_learner(model), pack(own, loss_weights(own, loss, 16), 40, 1), loss)
        for own in (samples, bare, rest)
    )
    assert dropped.entropy_tokens == whole.entropy_tokens > without.entropy_tokens
    assert dropped.entropy == pytest.approx(whole.entropy, rel=1e-6)
    with torch.no_grad():
        dense = torch.cat([dense_rows(model, s)[1] for s in samples])
    assert whole.entropy == pytest.approx(float(dense.mean()), rel=1e-6)
    assert off(got, want) < 1e-6 and dropped.loss == pytest.approx(without.loss, rel=1e-6)
    assert dropped.mismatch_mean == pytest.approx(without.mismatch_mean, rel=1e-6)


def test_rescues_are_in_no_entropy_and_no_mismatch():
    model, loss = make_model(torch.float64), LossParams()
    samples = [near_policy(model, s, 0.0) for s in make_samples(SHAPE)]
    rescued = [routed(near_policy(model, s, 0.1), "rescue") if s.group == 2 else s for s in samples]
    stats, _ = step_gradient(exact_learner(model), pack(rescued, loss_weights(rescued, loss, 16), 40, 1), loss)
    with torch.no_grad():
        dense = torch.cat([dense_rows(model, s)[1] for s in samples if s.group != 2])
    assert stats.entropy == pytest.approx(float(dense.mean()), rel=1e-6) and stats.entropy_tokens == len(dense)
    assert stats.mismatch_max < 1e-6 and stats.ratio_max == pytest.approx(math.exp(0.1), rel=1e-5)


@pytest.mark.parametrize("rescue_shape", [0.0, 0.1])
def test_rescued_rows_have_the_gradient_of_two_prompts_by_hand(rescue_shape):
    """Sampled behind a prefix, scored behind the plain prompt, the ratio between the two."""
    model = make_model(torch.float64)
    (sample,) = make_samples([(5, [6])], temperature=0.8)
    p, completion = 5, sample.token_ids[5:]
    behind = dataclasses.replace(
        sample,
        num_prompt_tokens=p + 3,
        token_ids=np.concatenate([[9, 8, 7], sample.token_ids]),
        temperatures=np.full(p + 9, 0.8),
    )
    with torch.no_grad():
        recorded = dense_rows(model, behind)[0]
    rescued = routed(
        dataclasses.replace(sample, rollout_logprobs=np.concatenate([np.zeros(p), recorded.numpy()])), "rescue"
    )
    loss = LossParams(rescue_shape=rescue_shape)
    _, got = step_gradient(exact_learner(model), pack([rescued], [1 / 6], 40, 1), loss)
    twin = copy.deepcopy(model)
    ratio, advantage = (dense_rows(twin, sample)[0] - recorded).exp(), float(sample.advantages[-1])
    clipped = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    rows = -advantage * ratio / (ratio + rescue_shape) if rescue_shape else clipped
    rows.mean().backward()
    assert len(completion) == 6 and float((ratio.detach() - 1).abs().max()) > 0.3
    assert off(got, flat_grad(twin)) < 1e-5
