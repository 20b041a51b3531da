"""Where memory runs out a step is repeated in smaller micro-batches, and nothing else changes.

Drawn rows are scored again at their draw where the loss asks for the learner's log-probs.
"""

import copy
import dataclasses
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from e3fast import learner as learner_module
from e3fast.allocator import Allocator, CostFit, halved, with_logprobs
from e3fast.config import TrainConfig
from e3fast.costs import model_coefficients
from e3fast.learner import LocalLearner
from e3fast.memory import OutOfMemory
from e3fast.objective import loss_weights
from e3fast.types import LossParams
from tests.dense import dense_rows, routed
from tests.samples import make_samples
from tests.tiny import make_model

SHAPE = [(6, [3, 9, 4]), (2, [7, 7]), (11, [2, 5, 8, 1]), (4, [6, 12])]
CPU = torch.device("cpu")
NO_ROOM = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."


def make_allocator(model, cap=200, **knobs):
    return Allocator(TrainConfig(tokens_per_micro_batch=cap, **knobs), model_coefficients(model.config))


class SmallLearner(LocalLearner):
    """A learner whose memory ends at `room` tokens of a micro-batch."""

    room = 10_000

    def backward(self, micro_batch, formula, totals):
        super().backward(micro_batch, formula, totals)  # gradients are there already when it fails
        if micro_batch.num_tokens > self.room:
            raise RuntimeError(NO_ROOM)


def step(room, cap, samples, learner_class=SmallLearner, **knobs):
    model = make_model(torch.bfloat16)
    learner, allocator = learner_class(model, TrainConfig(learning_rate=1e-2), CPU), make_allocator(model, cap, **knobs)
    learner.room = room
    loss = LossParams()
    weights = loss_weights(samples, loss, 16)
    batch = allocator.pack(samples, weights, 1, loss)
    batch, stats = allocator.update(learner, batch, samples, weights, loss, False)
    return allocator, batch, stats, torch.cat([p.detach().flatten().float() for p in learner.masters])


def test_a_step_that_does_not_fit_is_repeated_in_smaller_micro_batches():
    samples = make_samples(SHAPE, zero_groups={1})
    allocator, batch, stats, weights = step(30, 200, samples)
    assert allocator.num_replans >= 1 and allocator.cap <= 60
    assert all(m.num_tokens <= 30 for m in batch.micro_batches[0]) and len(batch.micro_batches[0]) > 1
    assert len(stats.trained_seconds) == batch.plan.num_slots and stats.stepped
    # The same as if the cap had been that from the start: nothing of the failed tries is left.
    direct = step(10_000, allocator.cap, samples)
    assert torch.equal(weights, direct[3]) and stats.loss == direct[2].loss
    report = allocator.report()
    assert report["allocator/cap"] == allocator.cap and report["allocator/replans"] == allocator.num_replans


@pytest.mark.parametrize("call", [1, 4, 9])
def test_a_backward_pass_that_breaks_off_leaves_nothing_behind(call, monkeypatch):
    """Memory can run out inside it, where a parameter's fresh gradient is widened for its master."""
    samples, calls = make_samples(SHAPE, zero_groups={1}), []
    widen = learner_module.move_gradient

    def tight(master):
        hook = widen(master)

        def failing(param):
            calls.append(param)
            if len(calls) == call:
                raise RuntimeError(NO_ROOM)
            hook(param)

        return failing

    monkeypatch.setattr(learner_module, "move_gradient", tight)
    allocator, _, stats, weights = step(10_000, 200, samples)
    assert allocator.num_replans == 1
    monkeypatch.setattr(learner_module, "move_gradient", widen)
    direct = step(10_000, allocator.cap, samples)
    assert stats.grad_norm == direct[2].grad_norm and torch.equal(weights, direct[3])


def test_the_cap_is_halved_while_anything_can_be_split():
    samples = make_samples([(4, [40]), (3, [5, 5, 5, 5])])
    _, batch, _, _ = step(10_000, 44, samples)
    assert max(len(own) for b in batch.plan.bins[0] for own in b) > 1 and batch.plan.tokens[0][0] == 44
    assert halved(44, batch.plan) < 23


def test_one_sample_that_does_not_fit_ends_the_run_with_advice():
    with pytest.raises(OutOfMemory, match=r"one sample in a micro-batch .*lower rollout\.max_new_tokens"):
        step(8, 200, make_samples([(4, [20])]))


def test_a_sample_above_a_halved_cap_has_a_micro_batch_of_its_own():
    samples = make_samples([(4, [20]), (3, [2, 2, 2, 2])])
    allocator, batch, _, _ = step(25, 200, samples)
    assert allocator.cap < 24
    assert sorted(m.num_tokens for m in batch.micro_batches[0])[-1] == 24


def test_other_errors_are_not_taken_for_memory():
    class Broken(LocalLearner):
        def backward(self, micro_batch, formula, totals):
            raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        step(1, 200, make_samples(SHAPE), Broken)


def test_half_of_what_was_laid_out():
    model, samples = make_model(), make_samples(SHAPE)
    plan = make_allocator(model, cap=1000).pack(samples, [1.0] * len(samples), 1, LossParams()).plan
    assert halved(1000, plan) == plan.num_tokens // 2
    alone = make_allocator(model, cap=1000).pack(samples[:1], [1.0], 1, LossParams()).plan
    assert halved(1000, alone) == 1000


def test_halved_caps_survive_a_restart_but_not_a_raised_one():
    samples = make_samples(SHAPE)
    allocator, *_ = step(30, 200, samples)
    state = json.loads(json.dumps(allocator.state()))
    again = make_allocator(make_model())
    again.restore(state)
    names = ("cap", "forward_cap", "num_replans")
    assert [getattr(again, name) for name in names] == [getattr(allocator, name) for name in names]
    assert again.trained.fit == allocator.trained.fit
    lower = make_allocator(make_model(), cap=7)
    lower.restore(state)
    assert lower.cap == 7
    untouched = make_allocator(make_model(), cap=300)
    untouched.restore(json.loads(json.dumps(make_allocator(make_model(), cap=100).state())))
    assert untouched.cap == 300  # the run file's own, as nothing was halved


def test_measured_times_move_plans_only_where_they_may():
    samples = make_samples(SHAPE)
    fixed, *_ = step(10_000, 40, samples)
    free, *_ = step(10_000, 40, samples, deterministic=False)
    assert fixed.coefficients(fixed.trained) == fixed.trained.start
    assert free.trained.fit and free.coefficients(free.trained) == free.trained.fit.coefficients != free.trained.start
    assert fixed.report()["fit/trained_observations"] >= 2


def test_a_prediction_is_made_before_its_measurement():
    samples = make_samples(SHAPE)
    model = make_model()
    plan = make_allocator(model, cap=40).pack(samples, [1.0] * len(samples), 1, LossParams()).plan
    costs = CostFit(make_allocator(model, cap=40).trained.start)
    costs.observe(plan, samples, [2e-9 * cost for cost in plan.costs[0]])
    assert costs.predicted != costs.predicted and costs.measured == pytest.approx(2e-9 * sum(plan.costs[0]))
    costs.observe(plan, samples, [2e-9 * cost for cost in plan.costs[0]])
    assert costs.predicted == pytest.approx(costs.measured, rel=0.1)


def test_tails_are_cut_only_where_the_run_says_so():
    samples, model = make_samples([(4, [30]), (3, [5])]), make_model()
    assert make_allocator(model, cap=20).trim(samples) == (samples, 0)
    cut, count = make_allocator(model, cap=20, over_long="cut").trim(samples)
    assert count == 1 and [len(s.token_ids) for s in cut] == [20, 8]
    assert make_allocator(model, cap=20, over_long="cut").pack(cut, [1.0, 1.0], 1, LossParams()).plan.num_slots >= 1


def shrunk(draw, name, weight, state):
    """A draw that is no noise: the weights a little smaller."""
    return weight * (1 - 0.05 * draw)


def mixed_routes():
    """Plain, drawn and rescued samples, of them one that counts in the entropy alone and one with a hole."""
    samples = make_samples(SHAPE, zero_groups={1})
    samples = [
        routed(s, ("plain", "draw", "draw", "rescue")[i % 4], draw=(0, 1, 2, 1)[i % 4]) for i, s in enumerate(samples)
    ]
    samples[1] = dataclasses.replace(samples[1], loss_mask=np.zeros_like(samples[1].loss_mask))
    holed = samples[6].loss_mask.copy()
    holed[-2] = False
    samples[6] = dataclasses.replace(samples[6], loss_mask=holed)
    return samples


LEARNERS = LossParams(seq_mask=2.0, behaviour_logprobs="learner")


@pytest.mark.parametrize("cap", [24, 300])
def test_drawn_rows_get_the_learners_log_probs_at_their_draw(cap):
    """Others keep the engine's; so do all where the loss does not ask, or nothing was drawn."""
    model, samples = make_model(), mixed_routes()
    learner = LocalLearner(copy.deepcopy(model), TrainConfig(), CPU)
    allocator = make_allocator(model, cap)
    found = allocator.rescore(learner, samples, LEARNERS, shrunk)
    assert [s is t for s, t in zip(found, samples, strict=True)] == [
        i == 1 or s.route != "draw" for i, s in enumerate(samples)
    ]
    for sample, old in zip(found, samples, strict=True):
        if sample is old:
            continue
        twin = copy.deepcopy(model)
        for param in twin.parameters():
            param.data *= 1 - 0.05 * sample.draw
        with torch.no_grad():
            want = dense_rows(twin, sample)[0].numpy()
        assert sample.rollout_logprobs[sample.num_prompt_tokens :] == pytest.approx(want, abs=1e-4)
        assert not sample.rollout_logprobs[: sample.num_prompt_tokens].any() and sample.loss_mask is old.loss_mask
    assert learner.draw == 0
    assert (
        allocator.rescore(learner, samples, dataclasses.replace(LEARNERS, behaviour_logprobs="engine"), None) is samples
    )
    plain = make_samples(SHAPE)
    assert allocator.rescore(learner, plain, LEARNERS, None) is plain


def test_with_logprobs_leaves_what_is_not_asked():
    sample = make_samples([(3, [2])])[0]
    assert with_logprobs(sample, np.array([-7.0, -8.0])).rollout_logprobs.tolist() == [0, 0, 0, -7, -8]
    assert sample.rollout_logprobs[-1] != -8


def test_the_loss_says_who_is_packed_where():
    samples, allocator = mixed_routes(), make_allocator(make_model(), 300)
    pack = lambda loss, **knobs: allocator.pack(samples, [1.0] * len(samples), 1, loss, **knobs)  # noqa: E731
    draws = lambda side: [m.draw for m in side[0]]  # noqa: E731
    owners = lambda side: sorted(i for m in side[0] for i in m.sample_of.tolist() if i >= 0)  # noqa: E731
    silent = [i for i, s in enumerate(samples) if not s.has_signal]
    at_mean, at_draw = pack(LossParams()), pack(LossParams(gradient_at="draw"))
    assert draws(at_mean.micro_batches) == draws(at_mean.forward_only) == [0]
    assert draws(at_draw.micro_batches) == [0, 1, 2] and owners(at_draw.forward_only) == silent == [1, 3, 4]
    assert owners(pack(LossParams(beta=0.1)).forward_only) == [1], "what has no loss token has no gradient"
    scored = pack(LossParams(), scored_at_draws=True)
    assert scored.micro_batches == ((),) and draws(scored.forward_only) == [0, 1, 2]
    assert owners(scored.forward_only) == list(range(len(samples)))


@pytest.mark.parametrize("gradient_at", ["mean", "draw"])
def test_a_step_at_draws_that_does_not_fit_is_repeated_all_the_same(gradient_at):
    """The same weights as from a smaller cap, with the mask's normaliser and each draw's own gradient."""
    samples = [s if s.route == "plain" else routed(s, "draw", max(1, s.draw)) for s in mixed_routes()]
    mask = 1e9 if gradient_at == "mean" else None
    loss = LossParams(gradient_at=gradient_at, seq_mask=mask)
    weights = loss_weights(samples, loss, 16)
    ends = []
    for room, cap in ((30, 200), (10_000, None)):
        learner, allocator = (
            SmallLearner(make_model(), TrainConfig(learning_rate=1e-2), CPU),
            make_allocator(make_model()),
        )
        allocator.cap = cap or ends[0][1].cap
        learner.room = room
        batch = allocator.pack(samples, weights, 1, loss)
        _, stats = allocator.update(learner, batch, samples, weights, loss, False, shrunk)
        ends.append((stats, allocator, torch.cat([p.detach().flatten() for p in learner.masters])))
    assert ends[0][1].num_replans >= 1 and ends[1][1].num_replans == 0
    assert ends[0][0].grad_norm == pytest.approx(ends[1][0].grad_norm, rel=1e-5)
    assert torch.equal(ends[0][2], ends[1][2])
    if mask:
        assert 0 < ends[0][0].keep_rate < 1 and ends[0][0].keep_rate == pytest.approx(ends[1][0].keep_rate)


DRILL = """
    import resource, torch
    from tests.test_allocator import *
    model = make_model(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, head_dim=64)
    samples = make_samples([(8, [200] * 8) for _ in range(8)])
    learner = LocalLearner(model, TrainConfig(learning_rate=1e-3), CPU)
    learner.allocate(); learner.drop_gradients()
    allocator = make_allocator(model, cap=16_384)
    loss = LossParams(); weights = loss_weights(samples, loss, 16)
    small = make_allocator(model, cap=300)
    small.update(learner, small.pack(samples, weights, 1, loss), samples, weights, loss, False)  # libraries set up
    size = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmSize")) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + 250 * 2**20, -1))
    batch, stats = allocator.update(learner, allocator.pack(samples, weights, 1, loss), samples, weights, loss, False)
    print(allocator.num_replans, allocator.cap, stats.stepped, len(batch.micro_batches[0]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address-space limits are Linux's")
def test_real_memory_runs_out_and_the_step_goes_through():
    """Under an address-space limit torch itself fails to allocate in the backward pass of the large micro-batch."""
    code = textwrap.dedent(DRILL)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    replans, cap, stepped, slots = done.stdout.split()
    assert int(replans) >= 1 and int(cap) < 16_384 and stepped == "True" and int(slots) > 1
