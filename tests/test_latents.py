"""Latents: those of training are those of prompt-only passes, and the projection keeps nearness."""

import dataclasses

import numpy as np
import pytest
import torch

from e3fast import latents
from e3fast.config import TrainConfig
from e3fast.learner import LocalLearner
from e3fast.objective import loss_weights
from e3fast.packing import pack
from e3fast.types import LossParams
from tests.dense import dense_hidden, routed
from tests.records import prompt
from tests.samples import make_samples
from tests.tiny import make_model

SHAPE = [(6, [3, 9, 4]), (2, [7, 7]), (11, [2, 5, 8, 1]), (1, [6, 12])]
CPU = torch.device("cpu")


def make_learner(cap=4096, dtype=torch.float32):
    learner = LocalLearner(make_model(dtype), TrainConfig(learning_rate=1e-2, tokens_per_micro_batch=cap), CPU)
    learner.measure_latents(seed=5)
    return learner


def prompts_of(samples):
    first = {s.group: s for s in reversed(samples)}
    return [prompt(g, first[g].token_ids[: first[g].num_prompt_tokens].tolist()) for g in sorted(first)]


def close(a, b):
    return np.abs(a - b).max() < 1e-4 * np.abs(b).max()


@pytest.mark.parametrize("cap", [5, 14, 4096])
def test_prompt_only_passes_are_dense_hidden_states_projected(cap):
    """Whatever the cap; a prompt longer than it goes alone. Order and repeats are the caller's."""
    learner, model = make_learner(cap), make_model()
    prompts = prompts_of(make_samples(SHAPE))
    asked = [prompts[i] for i in (2, 0, 3, 1, 0)]
    found = learner.latents(asked)
    matrix = latents.projection(5, 32, CPU)
    with torch.no_grad():
        want = np.stack([(dense_hidden(model, p.token_ids)[-1] @ matrix).numpy() for p in asked])
    assert found.shape == (5, latents.SIZE) and close(found, want) and close(found[1], found[4])
    assert learner.latents([]).shape == (0, latents.SIZE)


def test_parts_stay_under_the_cap():
    prompts = [prompt(i, range(1, 1 + n)) for i, n in enumerate((3, 4, 9, 2, 2, 1))]
    assert list(latents.parts(prompts, 7)) == [[0, 1], [2], [3, 4, 5]]
    assert list(latents.parts([], 7)) == []


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("cap", [24, 10_000])
@pytest.mark.parametrize("zero", [(), (0, 2), (0, 1, 2, 3)])
def test_latents_of_training_are_those_of_prompts_alone(sharing, cap, zero):
    """Of the policy before the step; from rows with a backward pass and without one."""
    learner, samples = make_learner(), make_samples(SHAPE, zero_groups=zero)
    want = learner.latents(prompts_of(samples))
    batch = pack(samples, loss_weights(samples, LossParams(), 16), cap, 1, sharing=sharing)
    stats = learner.update(batch, LossParams())
    assert sorted(stats.latents) == ["0", "1", "2", "3"]
    for g in range(4):
        assert close(stats.latents[str(g)], want[g])


def test_rescues_and_rows_for_the_entropy_alone_have_them_too():
    learner, samples = make_learner(), make_samples([(6, [3]), (4, [5])])
    want = learner.latents(prompts_of(samples))
    samples = [
        routed(samples[0], "rescue"),
        dataclasses.replace(samples[1], loss_mask=np.zeros(9, bool), advantages=np.zeros(9)),
    ]
    stats = learner.update(pack(samples, loss_weights(samples, LossParams(), 16), 40, 1), LossParams())
    assert all(close(stats.latents[str(g)], want[g]) for g in (0, 1))


def test_none_are_measured_unless_asked_for():
    samples = make_samples(SHAPE)
    learner = LocalLearner(make_model(), TrainConfig(), CPU)
    assert learner.update(pack(samples, [0.01] * len(samples), 40, 1), LossParams()).latents == {}


def test_the_projection_keeps_lengths_and_is_the_seeds():
    matrix = latents.projection(5, 64, CPU)
    assert torch.equal(matrix, latents.projection(5, 64, CPU))
    assert not torch.equal(matrix, latents.projection(6, 64, CPU))
    torch.manual_seed(0)
    points = torch.randn(200, 64)
    ratios = (points @ matrix).norm(dim=1) / points.norm(dim=1)
    assert 0.8 < float(ratios.min()) < float(ratios.max()) < 1.2 and abs(float(ratios.mean()) - 1) < 0.03
