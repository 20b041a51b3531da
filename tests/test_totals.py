"""What a step's micro-batches add up to: sums and counts, each over its own rows, the same however they are cut."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from e3fast.objective import mask_metrics
from e3fast.packing import build
from e3fast.totals import Totals, comparable, row_ends, segment_of
from e3fast.types import LossParams
from tests.dense import routed
from tests.samples import make_samples


def micro_batch_of(samples, fragments=None, draw=0):
    return build(samples, [1.0 / len(samples)] * len(samples), fragments or [(i,) for i in range(len(samples))], draw)


def target_rows(m):
    return torch.nonzero(m.targets >= 0)[:, 0]


def mixed(draw=1):
    """A plain, a drawn, a rescued sample, and one that counts in the entropy alone."""
    samples = make_samples([(4, [3]), (2, [5]), (3, [2]), (3, [4])])
    bare = dataclasses.replace(samples[3], loss_mask=np.zeros_like(samples[3].loss_mask))
    return [samples[0], routed(samples[1], "draw", draw), routed(samples[2], "rescue"), bare]


@pytest.mark.parametrize(("draw", "compared"), [(0, 3), (1, 3 + 5)])
def test_each_sum_is_over_its_own_rows(draw, compared):
    m = micro_batch_of(mixed(), draw=draw)
    rows = target_rows(m)
    logprobs, entropy = m.rollout_logprobs[rows] + 0.25, torch.full((len(rows),), 2.0)
    logprobs[4] += 0.5  # a drawn row
    totals = Totals()
    totals.add(m, rows, logprobs, entropy, "scored")
    assert (totals.entropy_tokens, totals.entropy) == (3 + 5 + 4, 24.0), "all but rescues"
    assert totals.loss_tokens == 3 + 5 + 2, "all but the bare one"
    assert totals.gap_tokens == compared, "same weights and same text alone can be compared"
    assert totals.gap_max == pytest.approx(0.75 if draw else 0.25)
    assert totals.gap == pytest.approx(0.25 * compared + (0.5 if draw else 0))
    assert totals.tokens == {"trained": 0, "scored": m.num_tokens}
    routes = [[bool(x) for x in comparable(m)[rows].tolist()].count(True)]
    assert routes == [compared + 4]


def test_kl_and_effective_sample_of_the_mismatch():
    """By hand: ratios 1.5, 1, 1/2 of policy to engine."""
    m = micro_batch_of(make_samples([(4, [3])]))
    rows, ratios = target_rows(m), torch.tensor([1.5, 1.0, 0.5])
    totals = Totals()
    totals.add(m, rows, m.rollout_logprobs[rows] + ratios.log(), torch.zeros(3), "trained")
    stats = totals.stats(1.0, True, 257)
    kl = sum(r - 1 - math.log(r) for r in ratios.tolist()) / 3
    assert stats.mismatch_kl == pytest.approx(kl, rel=1e-5)
    assert stats.effective_sample_share == pytest.approx(9 / (3 * 3.5), rel=1e-6)


@pytest.mark.parametrize(("mode", "kept"), [("token", 4), ("sequence", 3)])
def test_rows_without_a_backward_pass_leave_by_the_band_too(mode, kept):
    """Two completions of 3 tokens; the first is out of the band at one token, and as a whole."""
    m = micro_batch_of(make_samples([(4, [3, 3])]))
    rows = target_rows(m)
    totals, gaps = Totals(), torch.tensor([0.8, 0.0, 0.0, 0.2, 0.2, -0.8])
    loss = LossParams(importance_sampling=mode, importance_band=2.0)
    totals.mask_scored(m, rows, m.rollout_logprobs[rows] + gaps, loss)
    weight = float(m.loss_weights[rows][0])
    assert totals.kept_weight == pytest.approx(kept * weight) and totals.banded
    assert totals.stats(1.0, True, 257).importance_kept == pytest.approx(kept * weight)


def test_sums_do_not_depend_on_the_cut():
    samples = make_samples([(4, [3, 6, 2]), (2, [5]), (9, [7, 1])])
    torch.manual_seed(0)
    noise = {i: torch.rand(20) for i in range(len(samples))}
    found = []
    for parts in ([[0, 1, 2, 3, 4, 5]], [[5], [0, 3], [1, 2, 4]]):
        totals = Totals()
        for part in parts:
            m = micro_batch_of(samples, [(i,) for i in part])
            rows = target_rows(m)
            shift = torch.cat([noise[i][: samples[i].num_loss_tokens] for i in part])
            totals.add(m, rows, m.rollout_logprobs[rows] - shift, shift, "trained")
            totals.add_loss(shift.sum(), {"clipped": shift.sum(), "ratio_max": shift.max(), "kl": shift.sum(),
                                          "num_rows": torch.tensor(len(shift))})  # fmt: skip
        found.append(totals.stats(1.0, True, 257))
    for name in ("loss", "entropy", "mismatch_mean", "mismatch_max", "kl", "clip_share", "ratio_max"):
        assert getattr(found[0], name) == pytest.approx(getattr(found[1], name), rel=1e-5), name
    assert found[0].entropy_tokens == found[1].entropy_tokens == 24


def test_means_of_nothing_are_nan():
    stats = Totals().stats(0.0, False, 257)
    nothing = (
        "entropy",
        "clip_share",
        "mismatch_mean",
        "kl",
        "keep_rate",
        "entropy_at_one",
        "elasticity",
        "mismatch_kl",
    )
    nothing += ("effective_sample_share", "importance_capped", "importance_kept")
    assert all(math.isnan(getattr(stats, name)) for name in nothing)
    assert stats.loss == stats.mismatch_max == 0.0 and stats.latents == {}


@pytest.mark.parametrize("sharing", [False, True])
def test_segments_and_ends_of_rows(sharing):
    samples = make_samples([(6, [3, 2]), (2, [4])])
    m = micro_batch_of(samples, [(0, 1), (2,)] if sharing else None)
    rows = target_rows(m)
    assert row_ends(m, rows).tolist() == [0, 3, 5, 9]
    assert m.sample_of[segment_of(m, rows)].tolist() == [0] * 3 + [1] * 2 + [2] * 4
    some = rows[[0, 2, 4, 6, 7]]  # where some tokens of a sample are not asked
    assert row_ends(m, some).tolist() == [0, 2, 3, 5]


@pytest.mark.parametrize("sharing", [False, True])
def test_rows_without_a_backward_pass_are_masked_by_whole_sequences(sharing):
    """Drawn out of the band: its weight is not kept. What counts in the entropy alone has no part."""
    samples = [routed(s, "draw", 1) for s in make_samples([(6, [3, 2]), (2, [4])])]
    samples += [routed(make_samples([(3, [2])], seed=1)[0], "rescue"), mixed()[3]]
    m = build(samples, [0.1] * 5, [(0, 1), (2,), (3,), (4,)] if sharing else [(i,) for i in range(5)])
    rows = target_rows(m)
    shifts = torch.tensor([0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, -0.3, 0.3, 2.0, 2.0] + [5.0] * 4)
    totals = Totals()
    totals.mask_scored(m, rows, m.rollout_logprobs[rows] + shifts, LossParams(seq_mask=2.0))
    assert totals.drawn == pytest.approx(3) and totals.drawn_kept == pytest.approx(2)
    assert totals.kept_weight == pytest.approx(0.1 * (2 + 4 + 2))
    nothing = Totals()
    bare = micro_batch_of([samples[4]])
    nothing.mask_scored(bare, target_rows(bare), torch.zeros(4), LossParams(seq_mask=2.0))
    assert (nothing.drawn, nothing.kept_weight) == (0.0, 0.0)


def test_rows_of_a_sequence_add_up_to_one():
    ids, routes = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([1, 1, 1, 1, 0, 0])
    kept = torch.tensor([True, True, True, False, True, True])
    found = mask_metrics(kept, routes, torch.full((6,), 0.5, dtype=torch.float64), ids, 3)
    sums = {name: float(v.sum()) for name, v in found.items()}
    assert sums == pytest.approx({"drawn": 2, "drawn_kept": 1, "kept_weight": 2.5})
