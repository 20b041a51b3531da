"""Trials before step 1 refuse what memory does not hold, and leave no trace in what is trained."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from e3fast import learner as learner_module
from e3fast import trials as trials_module
from e3fast.allocator import Allocator
from e3fast.config import TrainConfig
from e3fast.costs import model_coefficients
from e3fast.ivon import IvonConfig
from e3fast.learner import LocalLearner
from e3fast.memory import OutOfMemory
from e3fast.objective import loss_weights
from e3fast.packing import pack
from e3fast.trials import Trials, split, try_caps
from e3fast.types import LossParams
from tests.samples import make_samples
from tests.tiny import make_model

CPU = torch.device("cpu")


@given(st.integers(1, 500), st.integers(3, 90))
def test_sequences_fill_the_micro_batch_and_each_has_something_to_predict(tokens, each):
    lengths = split(tokens, min(each, tokens))
    assert sum(lengths) == tokens and max(lengths) <= each
    assert min(lengths) >= 2 or tokens == 1


def make(dtype=torch.bfloat16, ivon=None, perturb=None, **knobs):
    model = make_model(dtype)
    config = TrainConfig(learning_rate=1e-2, **({"tokens_per_micro_batch": 400} | knobs))
    allocator = Allocator(config, model_coefficients(model.config))
    learner = LocalLearner(model, config, CPU, ivon)
    return learner, config, allocator, Trials(learner, 257, allocator.trained, perturb)


def train(learner, count=3):
    samples = make_samples([(6, [3, 9, 4]), (2, [7, 7])])
    weights = loss_weights(samples, LossParams(), 16)
    for _ in range(count):
        learner.update(pack(samples, weights, 400, 1), LossParams())
    return torch.cat([m.detach().flatten() for m in learner.masters])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_trials_leave_no_trace(dtype):
    plain, (learner, config, allocator, trials) = make(dtype)[0], make(dtype)
    drawn = torch.get_rng_state(), np.random.get_state()[1].tobytes()
    try_caps(learner, config, allocator.cap, allocator.forward_cap, 90, trials)
    assert torch.equal(torch.get_rng_state(), drawn[0]) and np.random.get_state()[1].tobytes() == drawn[1]
    assert all(p.grad is None for p in learner.masters) and learner.steps_done == 0
    assert torch.equal(train(learner), train(plain))


@pytest.mark.parametrize("ivon", [None, IvonConfig()])
def test_trials_at_a_draw_hold_what_draws_keep_and_leave_no_trace(ivon, monkeypatch):
    """An fp32 model's own weights are put aside, IVON's sums stand; all is as before at the end."""
    noisy = lambda draw, name, weight, state: weight + 0.01 * draw  # noqa: E731
    plain, (learner, config, allocator, trials) = make(torch.float32, ivon)[0], make(torch.float32, ivon, noisy)
    forward, seen = learner_module.packed_hidden, []

    def watch(model, micro_batch):
        seen.append((learner.draw, learner.draws.kept is not None))
        return forward(model, micro_batch)

    monkeypatch.setattr(learner_module, "packed_hidden", watch)
    trials.run(64, 32)
    assert seen == [(1, True)] and learner.draw == 0 and learner.draws.kept is None
    assert ivon is None or len(learner.optimizer.drawn_grads) == len(learner.masters)
    learner.drop_gradients()
    try_caps(learner, config, allocator.cap, allocator.forward_cap, 90, trials)
    assert ivon is None or not learner.optimizer.drawn_grads
    assert torch.equal(train(learner), train(plain))


def test_the_full_cap_is_run_long_and_short(monkeypatch):
    learner, config, allocator, trials = make(deterministic=False, forward_tokens_per_micro_batch=1000)
    run, seen = LocalLearner.trial, []

    def watch(self, micro_batch, backward, perturb):
        lengths = micro_batch.cu_seqlens.diff()
        seen.append((micro_batch.num_tokens, int(lengths.max()), backward))
        return run(self, micro_batch, backward, perturb)

    monkeypatch.setattr(LocalLearner, "trial", watch)
    plan = try_caps(learner, config, allocator.cap, allocator.forward_cap, 90, trials)
    assert {(400, 90, True), (400, 64, True), (1000, 90, False), (200, 90, True)} <= set(seen)
    assert len(allocator.trained.anchors) == sum(backward for *_, backward in seen) - 1  # the first only warms up
    if plan is not None:
        assert plan.weights == 2 * sum(p.numel() for p in learner.params) and plan.optimizer == 2 * plan.masters


def test_a_cap_that_memory_does_not_hold_is_refused_before_it_is_tried(monkeypatch):
    learner, config, allocator, trials = make()
    monkeypatch.setattr(trials_module, "available_bytes", lambda device: 1000.0)
    monkeypatch.setattr(
        trials_module, "fit_line", lambda found: (0.0, 100.0)
    )  # 100 bytes a token: 9 tokens under the reserve
    run, seen = LocalLearner.trial, []
    monkeypatch.setattr(LocalLearner, "trial", lambda self, m, *args: seen.append(m.num_tokens) or run(self, m, *args))
    with pytest.raises(ValueError, match=r"train\.tokens_per_micro_batch=400 needs about .* about 9 tokens fit"):
        try_caps(learner, config, allocator.cap, allocator.forward_cap, 90, trials)
    assert max(seen) <= 128 and all(p.grad is None for p in learner.masters)
    hard = dataclasses.replace(config, over_long="own_bin", hard_cap=500)
    with pytest.raises(ValueError, match=r"train\.hard_cap=500 needs"):
        try_caps(learner, hard, allocator.cap, allocator.forward_cap, 90, trials)


def test_memory_that_runs_out_in_a_trial_is_refused(monkeypatch):
    learner, config, allocator, trials = make()

    def trial(self, *args):
        raise OutOfMemory("CUDA out of memory")

    monkeypatch.setattr(LocalLearner, "trial", trial)
    with pytest.raises(ValueError, match=r"does not fit in memory \(CUDA out of memory\): lower it"):
        try_caps(learner, config, allocator.cap, allocator.forward_cap, 90, trials)
