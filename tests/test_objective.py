"""Weights of every aggregation, and what they sum to; the loss of each route, of the mask and of the added terms."""

import dataclasses
import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from csrc_triton.losses import Chunk
from e3fast.objective import (
    corrected_loss,
    k3,
    keep_sequences,
    loss_weights,
    masked_loss,
    policy_loss,
    sequence_corrected_loss,
    token_loss,
)
from e3fast.types import ROUTES, LossParams
from tests.samples import make_samples

SAMPLES = make_samples([(3, [4] * 4), (3, [4] * 8), (3, [4] * 12)])


def by_group(weights):
    total = defaultdict(float)
    for sample, weight in zip(SAMPLES, weights, strict=True):
        total[sample.group] += weight * sample.num_loss_tokens
    return [total[g] for g in range(3)]


def test_prompt_weights_vector():
    """Groups of 4, 8, 12 have w = 2, 1, 0.667, so each prompt weighs the same at equal lengths."""
    weights = loss_weights(SAMPLES, LossParams(group_weight="prompt"), 16)
    assert [weights[0] / weights[4], weights[12] / weights[4]] == pytest.approx([2, 2 / 3])
    assert by_group(weights) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(
    ("loss", "shares"),
    [
        (LossParams(), [4 / 24, 8 / 24, 12 / 24]),
        (LossParams(aggregation="sequence"), [4 / 24, 8 / 24, 12 / 24]),
        (LossParams(aggregation="group"), [1 / 3] * 3),
        (LossParams(aggregation="constant"), [4 / 24 / 4, 8 / 24 / 4, 12 / 24 / 4]),
    ],
)
def test_share_of_each_group(loss, shares):
    assert by_group(loss_weights(SAMPLES, loss, 16)) == pytest.approx(shares)


def test_nothing_to_weigh():
    assert loss_weights([], LossParams(), 16) == []


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"aggregation": "mean"}, "loss.aggregation must be one of token, sequence, group, constant; got 'mean'"),
        (
            {"group_weight": "prompt", "aggregation": "group"},
            "loss.group_weight 'prompt' needs loss.aggregation 'token'",
        ),
        ({"importance_sampling": "tis"}, "loss.importance_sampling must be one of auto, off, token, sequence"),
        ({"importance_cap": 0.5}, "loss.importance_cap must be in [1, inf), got 0.5"),
        ({"importance_band": 1.0}, "loss.importance_band must be 0 or in (1, inf), got 1.0"),
        ({"clip_low": 1.5}, "loss.clip_low must be in (0, 1.0], got 1.5"),
    ],
)
def test_bad_knobs(knobs, message):
    with pytest.raises(ValueError) as error:
        LossParams(**knobs)
    assert message in str(error.value)


PLAIN, DRAW, RESCUE = range(len(ROUTES))


def fp64(*values):
    return torch.tensor(values, dtype=torch.float64)


def chunk_of(routes, recorded, advantages, seqs=None, weights=None, **more):
    routes = torch.tensor(routes, dtype=torch.int8)
    data = {"routes": routes, "rollout_logprobs": fp64(*recorded), "advantages": fp64(*advantages)} | more
    weights = torch.ones(len(routes), dtype=torch.float64) if weights is None else fp64(*weights)
    ids = None if seqs is None else torch.tensor(seqs)
    return Chunk(data, weights, ids, 0 if seqs is None else seqs[-1] + 1)


def loss_and_slope(logprobs, chunk, loss, formula=policy_loss):
    leaf = fp64(*logprobs).requires_grad_()
    terms = formula(leaf, None, chunk, loss=loss)
    return terms.loss.detach(), torch.autograd.grad(terms.loss.sum(), leaf)[0], terms.metrics


def test_plain_rows_are_on_policy_whatever_was_recorded():
    """With no routes at all, and beside rows of other routes."""
    advantages = (1.5, -0.5, 2.0)
    alone = Chunk({"advantages": fp64(*advantages)}, fp64(1, 1, 1), None, 0)
    mixed = chunk_of([PLAIN, PLAIN, RESCUE], (-9.0, -0.1, -1.0), advantages)
    for chunk, count in ((alone, 3), (mixed, 2)):
        values, slope, metrics = loss_and_slope((-1.0, -2.0, -3.0), chunk, LossParams())
        for i in range(count):
            assert metrics["ratio_max"][i] == 1.0 and metrics["clipped"][i] == 0.0
            assert values[i] == -advantages[i] and slope[i] == -advantages[i]


@pytest.mark.parametrize(
    ("gradient_at", "ratios"), [("mean", (1.0, math.exp(0.1), math.exp(0.15))), ("draw", (1.0, 1.0, math.exp(0.15)))]
)
def test_what_the_ratio_of_each_route_is_to(gradient_at, ratios):
    """A drawn row trained at its own draw is on-policy; a rescued one never is."""
    chunk = chunk_of([PLAIN, DRAW, RESCUE], (-1.1, -2.1, -3.15), (1.0, 1.0, 1.0))
    values, slope, metrics = loss_and_slope((-1.0, -2.0, -3.0), chunk, LossParams(gradient_at=gradient_at))
    assert metrics["ratio_max"].tolist() == pytest.approx(ratios, rel=1e-12)
    assert (-values).tolist() == pytest.approx(ratios, rel=1e-12)
    assert (-slope).tolist() == pytest.approx(ratios, rel=1e-12)


def test_a_rescued_row_is_clipped_like_any_other_without_shaping():
    chunk = chunk_of([RESCUE] * 4, (-2.0, -2.0, -1.0, -1.0), (1.0, -1.0, 1.0, -1.0))
    values, slope, metrics = loss_and_slope((-1.0, -1.0, -2.0, -2.0), chunk, LossParams(clip_low=0.3, clip_high=0.25))
    up, down = math.e, 1 / math.e
    assert values.tolist() == pytest.approx([-1.25, up, -down, 0.7])
    assert slope.tolist() == pytest.approx([0.0, up, -down, 0.0])
    assert metrics["clipped"].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_shaped_rescues_have_no_clip_and_these_weights():
    """LoPE's policy shaping at c = .1: .1 r / (r + .1)^2 on grad log pi, so that unlikely tokens weigh the most."""
    ratios = [0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 10.0]
    for advantage in (2.0, -2.0):
        chunk = chunk_of([RESCUE] * 7, [-5.0] * 7, [advantage] * 7)
        logprobs = [-5.0 + math.log(r) for r in ratios]
        values, slope, metrics = loss_and_slope(logprobs, chunk, LossParams(rescue_shape=0.1))
        assert values.tolist() == pytest.approx([-advantage * r / (r + 0.1) for r in ratios], rel=1e-12)
        weights = (slope / -advantage).tolist()
        assert weights == pytest.approx([0.0098, 0.0826, 0.2500, 0.1389, 0.0826, 0.0454, 0.0098], abs=5e-5)
        assert not metrics["clipped"].any()


def test_shaping_leaves_other_routes_alone():
    chunk = chunk_of([PLAIN, DRAW, RESCUE], (-1.5, -2.5, -3.5), (1.0, 1.0, 1.0))
    shaped, slope, metrics = loss_and_slope((-1.0, -2.0, -3.0), chunk, LossParams(rescue_shape=0.1))
    plain, plain_slope, _ = loss_and_slope((-1.0, -2.0, -3.0), chunk, LossParams())
    assert shaped[:2].tolist() == plain[:2].tolist() and slope[:2].tolist() == plain_slope[:2].tolist()
    assert shaped[2] != plain[2] and metrics["clipped"].tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("rescue_shape", [0.0, 0.1])
def test_kl_term_and_entropy_bonus_against_autograd_by_hand(rescue_shape):
    """On every route; the entropy is a leaf of its own, as the kernels see it."""
    torch.manual_seed(0)
    logprobs, reference = -3 * torch.rand(6, dtype=torch.float64), -3 * torch.rand(6, dtype=torch.float64)
    spread = torch.rand(6, dtype=torch.float64).requires_grad_()
    routes, advantages = [PLAIN, DRAW, RESCUE] * 2, (1.0, -1.0, 0.5, 0.0, 0.0, 0.0)
    chunk = chunk_of(routes, (logprobs - 0.1).tolist(), advantages, ref_logprobs=reference)
    loss = LossParams(beta=0.3, entropy_bonus=0.02, rescue_shape=rescue_shape)
    leaf = logprobs.clone().requires_grad_()
    terms = policy_loss(leaf, spread, chunk, loss=loss)
    got = torch.autograd.grad(terms.loss.sum(), [leaf, spread])

    twin = logprobs.clone().requires_grad_()
    base = policy_loss(twin, None, chunk, loss=LossParams(rescue_shape=rescue_shape)).loss
    q = (reference - twin).exp()
    want = base + 0.3 * (q - torch.log(q) - 1) - 0.02 * spread
    wanted = torch.autograd.grad(want.sum(), [twin, spread])
    torch.testing.assert_close(terms.loss, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(terms.metrics["kl"], (q - torch.log(q) - 1).detach(), rtol=1e-12, atol=1e-12)


GAPS = (math.log(1.5), math.log(4), -math.log(2), math.log(1.2))  # learner - engine; ratios 1.5, 4, 0.5, 1.2
ON_POLICY = LossParams(importance_sampling="token", importance_cap=2.0)


def corrected(loss, routes=(PLAIN,) * 4, **more):
    logprobs, advantages = (-1.0, -2.0, -3.0, -4.0), (1.0, -2.0, 3.0, 0.5)
    recorded = [a - gap for a, gap in zip(logprobs, GAPS, strict=True)]
    chunk = chunk_of(list(routes), recorded, advantages, seqs=[0, 0, 1, 1], weights=(0.1, 0.2, 0.3, 0.4), **more)
    formula = sequence_corrected_loss if loss.importance_sampling == "sequence" else corrected_loss
    values, slope, metrics = loss_and_slope(logprobs, chunk, loss, formula)
    return (-values / fp64(*advantages)).tolist(), (-slope / fp64(*advantages)).tolist(), metrics


def test_token_correction_weighs_each_row_by_its_truncated_ratio():
    """Loss and gradient alike: the weight itself has no gradient."""
    values, slope, metrics = corrected(ON_POLICY)
    assert values == pytest.approx([1.5, 2.0, 0.5, 1.2]) and slope == pytest.approx([1.5, 2.0, 0.5, 1.2])
    assert metrics["capped"].tolist() == [0, 1, 0, 0] and "kept_weight" not in metrics


def test_sequence_correction_weighs_by_the_product():
    values, slope, _ = corrected(dataclasses.replace(ON_POLICY, importance_sampling="sequence", importance_cap=5.0))
    assert values == pytest.approx([5.0, 5.0, 0.6, 0.6]) and slope == pytest.approx([5.0, 5.0, 0.6, 0.6])


@pytest.mark.parametrize(("mode", "kept"), [("token", [1, 0, 1, 1]), ("sequence", [0, 0, 1, 1])])
def test_the_band_takes_rows_or_sequences_out_with_their_weight(mode, kept):
    loss = dataclasses.replace(ON_POLICY, importance_sampling=mode, importance_band=2.1)
    values, slope, metrics = corrected(loss)
    assert [v != 0 for v in values] == [s != 0 for s in slope] == [bool(k) for k in kept]
    assert metrics["kept_weight"].tolist() == pytest.approx(
        [w * k for w, k in zip((0.1, 0.2, 0.3, 0.4), kept, strict=True)]
    )


def test_a_ratio_to_the_engine_is_not_corrected_twice():
    """A rescue, and a drawn row trained at the mean, have the whole ratio in the loss already."""
    routes, wide = (RESCUE, PLAIN, DRAW, PLAIN), dict(clip_low=1.0, clip_high=9.0)
    values, _, _ = corrected(dataclasses.replace(ON_POLICY, **wide), routes)
    assert values == pytest.approx([1.5, 2.0, 0.5, 1.2])  # ratio times weight 1; weight times ratio 1
    values, _, _ = corrected(dataclasses.replace(ON_POLICY, gradient_at="draw", importance_cap=1.0, **wide), routes)
    assert values == pytest.approx([1.5, 1.0, 0.5, 1.0])


def test_kl_and_entropy_terms_are_not_weighted():
    loss = dataclasses.replace(ON_POLICY, beta=0.5, entropy_bonus=0.3)
    refs = fp64(-1.5, -1.5, -3.2, -4.0)
    chunk = chunk_of([PLAIN] * 4, [-2.0] * 4, [0.0] * 4, ref_logprobs=refs)
    logprobs, entropy = fp64(-1.0, -2.0, -3.0, -4.0), fp64(1.0, 2.0, 3.0, 4.0)
    got = corrected_loss(logprobs, entropy, chunk, loss=loss).loss
    assert torch.allclose(got, 0.5 * k3(logprobs, refs) - 0.3 * entropy)


def test_which_formula_a_loss_asks_for():
    names = {"off": "policy_loss", "auto": "policy_loss", "token": "corrected_loss"}
    names |= {"sequence": "sequence_corrected_loss"}
    found = {mode: token_loss(LossParams(importance_sampling=mode)).func.__name__ for mode in names}
    assert found == names and token_loss(LossParams(seq_mask=2.0)).func is masked_loss


def test_k3_vectors():
    """Zero where the models agree, never negative, and finite whatever they say."""
    assert k3(fp64(-1.0, -2.0), fp64(-1.0, -2.0)).tolist() == [0.0, 0.0]
    assert k3(fp64(-1.0, -2.0), fp64(-2.0, -1.0)).tolist() == pytest.approx([math.exp(-1), math.e - 2])
    assert bool((k3(fp64(-1e4, 0.0), fp64(0.0, -1e4)) > 0).all() & k3(fp64(-1e4), fp64(0.0)).isfinite().all())


RATIOS = [((0.1, 0.2, 0.3), True), ((0.3, 0.3, 0.1), False), ((-0.4, 0.1, -0.5), False), ((0.9, -0.9, 0.1), True)]


@pytest.mark.parametrize(("gaps", "stays"), RATIOS)
@pytest.mark.parametrize("route", ["draw", "plain", "rescue"])
def test_mask_at_two_looks_at_whole_drawn_sequences(gaps, stays, route):
    kept = keep_sequences(
        fp64(*gaps), fp64(0, 0, 0), torch.full((3,), ROUTES.index(route)), torch.zeros(3, dtype=torch.int64), 1, 2.0
    )
    assert kept.tolist() == [stays or route != "draw"] * 3


def test_a_masked_sequence_has_no_loss_and_its_weight_is_not_kept():
    """Four sequences in one chunk: drawn inside, drawn outside, plain outside, rescued outside."""
    routes = [DRAW] * 2 + [DRAW] * 3 + [PLAIN] * 2 + [RESCUE]
    seqs, weights = [0, 0, 1, 1, 1, 2, 2, 3], (0.1, 0.1, 0.05, 0.05, 0.05, 0.2, 0.2, 0.25)
    logprobs, recorded = [-1.0] * 8, [-1.1, -1.2, -1.3, -1.3, -1.3, -5.0, -5.0, -3.0]
    chunk = chunk_of(routes, recorded, [1.0] * 8, seqs, weights)
    loss = LossParams(seq_mask=2.0)
    values, slope, metrics = loss_and_slope(logprobs, chunk, loss, masked_loss)
    plain, plain_slope, _ = loss_and_slope(logprobs, chunk, loss)
    kept = torch.tensor([True] * 2 + [False] * 3 + [True] * 3)
    assert torch.equal(values, plain * kept) and torch.equal(slope, plain_slope * kept)
    totals = {name: float(metrics[name].sum()) for name in ("drawn", "drawn_kept", "kept_weight")}
    assert totals == pytest.approx({"drawn": 2.0, "drawn_kept": 1.0, "kept_weight": 0.85})
    on_policy = Chunk({"advantages": fp64(1.0, 1.0)}, fp64(0.3, 0.4), torch.tensor([0, 1]), 2)
    assert masked_loss(fp64(-1, -1), None, on_policy, loss=loss).metrics["kept_weight"].sum() == pytest.approx(0.7)


@pytest.mark.parametrize("loss", [LossParams(), LossParams(aggregation="sequence"), LossParams(group_weight="prompt")])
def test_each_draw_has_a_loss_of_its_own_and_the_step_their_mean(loss):
    """Whatever its tokens: a draw of short completions weighs as much as one of long ones."""
    samples = make_samples([(3, [4, 9]), (3, [2]), (3, [7, 7, 1]), (3, [5, 5])])
    samples = [dataclasses.replace(s, route="draw", draw=1 + s.group % 3) for s in samples]
    weights = loss_weights(samples, dataclasses.replace(loss, gradient_at="draw"), 16)
    for draw in (1, 2, 3):
        own = [i for i, s in enumerate(samples) if s.draw == draw]
        alone = loss_weights([samples[i] for i in own], loss, 16)
        assert [3 * weights[i] for i in own] == pytest.approx(alone)
        assert sum(weights[i] * samples[i].num_loss_tokens for i in own) == pytest.approx(1 / 3)
    pooled = loss_weights(samples, loss, 16)
    assert pooled == loss_weights([dataclasses.replace(s, draw=0) for s in samples], loss, 16) != weights


def test_a_draw_without_signal_counts_and_one_without_tokens_does_not():
    samples = make_samples([(3, [4]), (3, [4]), (3, [4])], zero_groups={1})
    samples = [dataclasses.replace(s, draw=1 + i) for i, s in enumerate(samples)]
    samples[2] = dataclasses.replace(samples[2], loss_mask=np.zeros(7, bool))
    weights = loss_weights(samples, LossParams(gradient_at="draw"), 16)
    assert weights == pytest.approx([1 / 8, 1 / 8, 0.0])
