"""Draws of the weights: the policy's own come back bit for bit, each gradient is that of its own draw, IVON's sums.

While rollouts are generated each draw is pushed once, and methods make it one after the other.
"""

import copy

import pytest
import torch

from e3fast.config import RolloutConfig, RunConfig, TrainConfig
from e3fast.ivon import IvonConfig
from e3fast.learner import LocalLearner
from e3fast.memory import OutOfMemory
from e3fast.methods import Method, PerturbedWeights
from e3fast.metrics import StageClock
from e3fast.objective import loss_weights, token_loss
from e3fast.packing import pack
from e3fast.rollout.transformers import TransformersEngine
from e3fast.totals import Totals
from e3fast.train import generate_at_draws, perturb_by_all
from e3fast.types import LossParams
from tests.dense import dense_rows, flat_grad, near_policy, off, routed
from tests.records import context, prompt, request
from tests.samples import make_samples
from tests.tiny import make_model, make_tokenizer

SHAPE = [(6, [3, 9, 4]), (2, [7, 7]), (11, [2, 5, 8, 1]), (4, [6, 12])]
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
NO_ROOM = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
AT_DRAW = LossParams(gradient_at="draw")


def make_perturb(sigma=0.02, **knobs):
    """The perturb function of a run with PerturbedWeights."""
    method = PerturbedWeights(sigma=None if "posterior" in knobs else sigma, **({"variant": "m3po"} | knobs))
    optimizer = "ivon" if "posterior" in knobs else "adamw"
    rollout = RolloutConfig(rollouts_per_prompt=16)
    method.start(RunConfig(rollout=rollout, train=TrainConfig(optimizer=optimizer)), 10)
    ctx = context(step=3)
    return lambda *args: perturb_by_all(ctx, [method], *args)


def make_learner(dtype=torch.float32, ivon=None, max_grad_norm=1e9):
    return LocalLearner(make_model(dtype), TrainConfig(learning_rate=1e-3, max_grad_norm=max_grad_norm), CPU, ivon)


def flat(tensors):
    return torch.cat([tensor.flatten().double() for tensor in tensors])


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def drawn_samples(draws=(1, 2), **knobs):
    samples = make_samples(SHAPE, **knobs)
    return [routed(s, "draw", draw=draws[i % len(draws)]) for i, s in enumerate(samples)]


def at_draws(samples, cap=40, loss=AT_DRAW):
    return pack(samples, loss_weights(samples, loss, 16), cap, 1, at_draws=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_policys_own_weights_come_back_bit_for_bit(dtype):
    """From any draw, and from one over another; the second time too."""
    learner, perturb = make_learner(dtype), make_perturb()
    params, masters = copies(learner.params), copies(learner.masters)
    for walk in ([1, 0], [2, 1, 3, 0], [4, 4, 0, 0]):
        for draw in walk:
            learner.stand_at(draw, perturb)
            assert learner.draw == draw and equal(params, copies(learner.params)) == (draw == 0)
        assert equal(masters, learner.masters) and learner.draws.kept is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_draw_is_made_of_the_masters_and_rounded_once(dtype):
    """Also where another draw stood before: nothing is added to what is there."""
    learner, perturb = make_learner(dtype), make_perturb()
    if dtype == torch.bfloat16:  # masters between two bf16 numbers
        for master in learner.masters:
            master.data += 1e-4
    masters = copies(learner.masters)
    for draw in (1, 3, 2):
        learner.stand_at(draw, perturb)
        for (name, weight), master in zip(learner.weights(), masters, strict=True):
            wanted = perturb(draw, name, master, {})
            assert wanted.dtype == torch.float32 and torch.equal(weight, wanted.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engine_takes_over_the_same_bits(dtype):
    learner, perturb = make_learner(dtype), make_perturb()
    engine = TransformersEngine(make_model(dtype, seed=9), make_tokenizer(), 8)
    learner.stand_at(2, perturb)
    engine.load_weights(learner.weights(), policy_version=0)
    learner.stand_at(0, None)
    for (name, weight), master in zip(engine.model.named_parameters(), learner.masters, strict=True):
        assert torch.equal(weight, perturb(2, name, master, {}).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [(), (0, 1, 2, 3)])
def test_an_update_with_draws_ends_at_the_policys_own_weights(dtype, zero):
    """Started at a draw, as it is after generation; also where no row has signal."""
    learner, perturb = make_learner(dtype), make_perturb()
    before = copies(learner.masters)
    learner.stand_at(2, perturb)
    stats = learner.update(at_draws(drawn_samples(zero_groups=zero)), AT_DRAW, probe=True, perturb=perturb)
    assert learner.draw == 0 and stats.stepped == (not zero) and stats.ratio_max == (0.0 if zero else 1.0)
    assert equal(learner.params, [m.to(dtype) for m in learner.masters])
    assert equal(before, learner.masters) == bool(zero)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("probe", [True, False])
def test_a_step_at_the_mean_does_not_care_where_generation_left_the_model(dtype, probe):
    samples = drawn_samples(zero_groups=(1,))
    batch = pack(samples, loss_weights(samples, LossParams(), 16), 40, 1)
    ends = []
    for draw in (0, 2):
        learner = make_learner(dtype)
        learner.stand_at(draw, make_perturb())
        ends.append((learner.update(batch, LossParams(), probe, make_perturb()), copies(learner.masters)))
    (stats, want), (again, got) = ends
    assert (stats.loss, stats.entropy, stats.grad_norm) == (again.loss, again.entropy, again.grad_norm)
    assert not probe or stats.elasticity == again.elasticity
    assert equal(want, got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_of_an_empty_batch_or_at_draws_end_there_too(dtype):
    learner, perturb, samples = make_learner(dtype), make_perturb(), drawn_samples((1, 3))
    before = copies(learner.params)
    for own in (samples, []):
        learner.stand_at(1, perturb)
        batch = pack(own, [0.0] * len(own), 40, 1, at_draws=True, backward="none")
        assert len(learner.logprobs(batch, perturb)) == len(own)
        assert learner.draw == 0 and equal(before, learner.params)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fails_at", [2, 5])
def test_memory_that_runs_out_at_a_draw_leaves_nothing_behind(dtype, fails_at, monkeypatch):
    learner, perturb, calls = make_learner(dtype), make_perturb(), []
    before = copies(learner.params)
    backward = LocalLearner.backward

    def tight(self, micro_batch, formula, totals):
        backward(self, micro_batch, formula, totals)
        calls.append(micro_batch.draw)
        if len(calls) == fails_at:
            raise RuntimeError(NO_ROOM)

    monkeypatch.setattr(LocalLearner, "backward", tight)
    batch = at_draws(drawn_samples(), cap=25)
    with pytest.raises(OutOfMemory):
        learner.update(batch, AT_DRAW, perturb=perturb)
    assert calls[-1] > 0 and learner.draw == 0 and equal(before, learner.params)
    assert all(p.grad is None for p in [*learner.params, *learner.masters]) and learner.draws.kept is None
    again, twin = (learner.update(batch, AT_DRAW, perturb=perturb), make_learner(dtype))
    assert again == twin.update(batch, AT_DRAW, perturb=perturb) and equal(learner.params, twin.params)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_that_runs_out_while_a_draw_is_made_leaves_nothing_behind(dtype):
    """Noise takes memory of its own; the model must not stay half perturbed."""
    learner, perturb, calls = make_learner(dtype), make_perturb(), []
    before = copies(learner.params)

    def tight(draw, name, weight, state):
        calls.append(name)
        if len(calls) == 5:
            raise RuntimeError(NO_ROOM)
        return perturb(draw, name, weight, state)

    with pytest.raises(OutOfMemory):
        learner.update(at_draws(drawn_samples()), AT_DRAW, perturb=tight)
    assert learner.draw == 0 and equal(before, learner.params)
    learner.stand_at(1, perturb)
    learner.stand_at(0, None)
    assert equal(before, learner.params)


def theta(model, draw, perturb, state=None):
    """A copy of a model with a draw's weights, by hand."""
    twin = copy.deepcopy(model)
    for name, param in twin.named_parameters():
        param.data.copy_(perturb(draw, name, param.detach().float(), (state or {}).get(name, {})))
    return twin


def dense_gradient(model, samples, weights):
    """Of on-policy rows, sample by sample."""
    model.zero_grad()
    for sample, weight in zip(samples, weights, strict=True):
        advantages = torch.as_tensor(sample.advantages[sample.loss_mask]).float()
        (-weight * advantages * dense_rows(model, sample)[0]).sum().backward()
    return flat_grad(model)


def gradient_of_update(learner, batch, loss, perturb):
    taken = []
    learner.optimizer.register_step_pre_hook(lambda *_: taken.append(flat(m.grad for m in learner.masters)))
    stats = learner.update(batch, loss, perturb=perturb)
    return stats, taken[0]


@pytest.mark.parametrize("draws", [(1,), (1, 2, 3)], ids=["b3po", "m3po"])
@pytest.mark.parametrize("cap", [25, 10_000])
def test_gradients_at_draws_are_those_of_models_loaded_by_hand(draws, cap):
    """Each draw's own token mean at its own weights, averaged over draws."""
    learner, perturb, samples = make_learner(), make_perturb(), drawn_samples(draws)
    stats, got = gradient_of_update(learner, at_draws(samples, cap), AT_DRAW, perturb)
    model, want, wrong = make_model(), 0.0, 0.0
    for draw in draws:
        own = [s for s in samples if s.draw == draw]
        share = 1 / (len(draws) * sum(s.num_loss_tokens for s in own))
        want = want + dense_gradient(theta(model, draw, perturb), own, [share] * len(own))
        wrong = wrong + dense_gradient(model, own, [share] * len(own))
    assert off(got, want) < 1e-4 < 0.05 < off(wrong, want)
    assert stats.ratio_max == 1.0


def test_scored_rows_stand_at_their_draws_too():
    """Entropy of b3po and m3po, and the engine's log-probs against the learner's, are at each draw's weights."""
    perturb, model = make_perturb(), make_model()
    twins = {draw: theta(model, draw, perturb) for draw in (1, 2)}
    samples = [near_policy(twins[s.draw], s, 0.0) for s in drawn_samples(zero_groups=(1, 2))]
    stats = make_learner().update(at_draws(samples), AT_DRAW, perturb=perturb)
    with torch.no_grad():
        dense = torch.cat([dense_rows(twins[s.draw], s)[1] for s in samples])
    assert stats.entropy == pytest.approx(float(dense.mean()), rel=1e-5) and stats.mismatch_max < 1e-4
    at_mean = make_learner().update(pack(samples, loss_weights(samples, LossParams(), 16), 40, 1), LossParams())
    assert at_mean.mismatch_mean != at_mean.mismatch_mean, "at other weights there is nothing to compare"
    batch = pack(samples, [0.0] * len(samples), 40, 1, at_draws=True, backward="none")
    found = make_learner().logprobs(batch, perturb)
    for i, sample in enumerate(samples):
        assert found[i] == pytest.approx(sample.rollout_logprobs[sample.loss_mask], abs=1e-4)


IVON = IvonConfig(ess=1e6, lr=1.0, warmup=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cap", "max_norm"), [(25, 1e9), (10_000, 1e9), (10_000, 1e-2)])
def test_ivon_sums_the_noise_times_the_gradient_of_each_draw(dtype, cap, max_norm):
    """A clip takes both down alike."""
    perturb, draws = make_perturb(posterior="ivon", ess=1e6), (1, 2, 3)
    samples = drawn_samples(draws)
    learner = make_learner(dtype, IVON, max_norm)
    own = copies(learner.masters)
    taken = []
    step = learner.optimizer.step

    def look(closure=None):
        sums = learner.optimizer.noise_grads
        taken.append((flat(m.grad for m in learner.masters), flat(sums[m] for m in learner.masters)))
        step()

    learner.optimizer.step = look
    learner.update(at_draws(samples, cap), AT_DRAW, perturb=perturb)
    ((grad, noise_grad),) = taken
    want, want_noise = 0.0, 0.0
    for draw in draws:
        mine = [s for s in samples if s.draw == draw]
        twin = make_learner(dtype, IVON)
        twin.stand_at(draw, perturb)
        share = 1 / (3 * sum(s.num_loss_tokens for s in mine))
        weights = [share] * len(mine)
        for m in pack(mine, weights, cap, 1).micro_batches[0]:
            twin.backward(m, token_loss(AT_DRAW), Totals())
        g = flat(m.grad for m in twin.masters)
        names = [name for name, _ in learner.weights()]
        nu = flat(perturb(draw, name, m, {}) - m for name, m in zip(names, own, strict=True))
        want, want_noise = want + g, want_noise + nu * g
    clip = min(1.0, max_norm / float(want.norm()))
    assert off(grad, clip * want) < 1e-4 and off(noise_grad, clip * want_noise) < 1e-4
    assert learner.optimizer.noise_grads == {} == learner.optimizer.drawn_grads


@pytest.mark.parametrize("dtype", DTYPES)
def test_trials_before_the_first_step_leave_ivon_as_it_was(dtype):
    """Its state stands already, so that memory is measured beside it; nothing of it has moved."""
    learner, fresh = make_learner(dtype, IVON), make_learner(dtype, IVON)
    learner.allocate()
    trial = at_draws(make_samples(SHAPE), 10_000).micro_batches[0][0]
    learner.trial(trial, backward=True)
    learner.drop_gradients()
    states = [learner.optimizer.state[master] for master in learner.masters]
    assert all(
        not s["momentum"].any() and not s["step"] and bool((s["hess"] == s["hess"].flatten()[0]).all()) for s in states
    )
    assert equal(learner.params, fresh.params) and equal(learner.masters, fresh.masters)
    perturb = make_perturb(posterior="ivon", ess=1e6)
    stats, again = (of.update(at_draws(drawn_samples()), AT_DRAW, perturb=perturb) for of in (learner, fresh))
    assert stats.loss == pytest.approx(again.loss, rel=1e-4) and stats.stepped
    assert off(flat(learner.masters), flat(fresh.masters)) < 1e-6


class Standing:
    """A learner that has weights named by their draw."""

    draw = 0

    def stand_at(self, draw, perturb):
        self.draw = draw

    def weights(self):
        return iter([("w", torch.tensor(float(self.draw)))])


class Pushed:
    """An engine with weights of its own, that notes what it is given and what is sampled with it."""

    def __init__(self):
        self.draw, self.held, self.log = 0, 0, []

    def load_weights(self, weights, policy_version, draw=0):
        self.draw, self.held = draw, int(dict(weights)["w"])
        self.log.append(("push", self.held, policy_version))

    def generate(self, requests):
        self.log.append(("generate", [r.draw for r in requests], [r.prompt.id for r in requests]))
        return [[(r.prompt.id, r.draw, self.held)] * r.num_rollouts for r in requests]


def generate(learner, engine, *asked):
    requests = [request(prompt(row), 2, draw=draw) for row, draw in asked]
    return generate_at_draws(context(step=4), learner, engine, None, StageClock(), requests)


def test_an_engine_is_at_the_draw_whatever_the_learner_has_done_since():
    """A refill's latents move the learner back to its own weights between two rounds."""
    learner, engine = Standing(), Pushed()
    generate(learner, engine, (0, 1))
    learner.stand_at(0, None)
    assert generate(learner, engine, (1, 0))[0][0] == ("1", 0, 0)
    learner.stand_at(2, None)
    assert generate(learner, engine, (1, 2))[0][0] == ("1", 2, 2)


def test_each_draw_is_pushed_once_and_answers_stand_in_order():
    learner, both = Standing(), Pushed()
    done = generate(learner, both, (0, 2), (0, 1), (1, 2), (2, 0), (1, 1))
    assert [own[0] for own in done] == [("0", 2, 2), ("0", 1, 1), ("1", 2, 2), ("2", 0, 0), ("1", 1, 1)]
    assert both.log == [
        ("generate", [0], ["2"]),
        ("push", 1, 4),
        ("generate", [1, 1], ["0", "1"]),
        ("push", 2, 4),
        ("generate", [2, 2], ["0", "1"]),
    ]
    both.log.clear()
    assert generate(learner, both, (3, 0), (4, 2))[0][0] == ("3", 0, 0), "a later round starts at the draw that stands"
    assert [entry[:2] for entry in both.log] == [("push", 0), ("generate", [0]), ("push", 2), ("generate", [2])]
    both.log.clear()
    assert generate(learner, both) == [] == both.log


def test_methods_make_a_draw_one_after_the_other():
    class Doubles(Method):
        def perturb(self, ctx, draw, name, weight, optimizer_state):
            return 2 * weight

    class Adds(Method):
        def perturb(self, ctx, draw, name, weight, optimizer_state):
            return weight + draw + ctx.step

    weight = torch.ones(2)
    assert perturb_by_all(context(step=5), [Doubles(), Adds()], 3, "w", weight, {}).tolist() == [10, 10]
    assert perturb_by_all(context(step=5), [Adds(), Doubles()], 3, "w", weight, {}).tolist() == [18, 18]
    assert perturb_by_all(context(), [Method()], 3, "w", weight, {}) is weight
