"""Costs: FLOP as counted by hand, the parts of a fragment that add up, and fits that know what they cannot know."""

from types import SimpleNamespace

import numpy as np
import pytest

from e3fast.costs import (
    RIDGE,
    Observation,
    Work,
    alone_costs,
    bin_work,
    fit_apart,
    fragment_cost,
    full_cost,
    model_coefficients,
    pairs,
    prefix_costs,
    refit,
    with_overhead,
)
from e3fast.types import Coefficients


def config(**sizes):
    base = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 1000,
    }
    return SimpleNamespace(**(base | sizes))


def model(h, y, heads, kv, d, f, v):
    return config(
        hidden_size=h,
        num_hidden_layers=y,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=f,
        vocab_size=v,
        **({"head_dim": d} if d else {}),
    )


@pytest.mark.parametrize(
    ("of", "a", "b"),
    [
        (model(1024, 28, 16, 8, 128, 3072, 151936), 1_191_968_768, 114_688),  # Qwen3-0.6B: heads wider than h / H
        (model(2560, 36, 32, 8, 128, 9728, 151936), 8_044_544_000, 294_912),  # Qwen3-4B
        (model(3584, 28, 28, 4, None, 18944, 152064), 14_140_571_648, 200_704),  # Qwen2.5-7B
    ],
)
def test_known_models(of, a, b):
    c = model_coefficients(of)
    assert (c.a + c.head, c.b) == (a, b)
    assert c.head == 2 * of.hidden_size * of.vocab_size and c.c0 == c.window_b == c.window == 0


def test_transformers_configs_are_read():
    from transformers import Gemma3TextConfig, Qwen2Config, Qwen3Config

    assert model_coefficients(Qwen3Config()).window_b == 0
    windowed = model_coefficients(Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=20))
    assert windowed.window == 64 and windowed.window_b * 20 == windowed.b * 12
    gemma = Gemma3TextConfig()
    c = model_coefficients(gemma)
    assert c.window == gemma.sliding_window and c.b + c.window_b == 2 * 26 * 8 * 256
    assert c.b == 2 * 8 * 256 * gemma.layer_types.count("full_attention")


@pytest.mark.parametrize(
    ("knobs", "full", "windowed"),
    [
        ({}, 4, 0),
        ({"sliding_window": 8}, 0, 4),
        ({"sliding_window": 8, "use_sliding_window": False}, 4, 0),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, 3, 1),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}, 2, 2),
        ({"sliding_window": None, "layer_types": ["sliding_attention", "full_attention"] * 2}, 4, 0),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, 1, 0),
    ],
)
def test_windows_by_layer(knobs, full, windowed):
    c = model_coefficients(config(**knobs))
    assert (c.b, c.window_b) == (2 * 64 * full, 2 * 64 * windowed)
    assert c.window == (8 if windowed else 0)


@pytest.mark.parametrize(
    ("knobs", "width"),
    [
        ({}, 4 * 96),
        ({"num_experts_per_tok": 2}, 4 * 2 * 96),
        ({"num_experts_per_tok": 2, "moe_intermediate_size": 16}, 4 * 32),
        ({"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 7}, 4 * 39),
        ({"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}, 4 * 48),
        ({"num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}, 3 * 32 + 96),
        ({"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 3}, 32 + 3 * 96),
        ({"num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2}, 2 * 32 + 2 * 96),
    ],
)
def test_experts_that_a_token_passes(knobs, width):
    c, dense = model_coefficients(config(**knobs)), model_coefficients(config())
    assert c.a - dense.a == 6 * 64 * (width - 4 * 96)


def test_a_config_without_a_size_is_refused():
    with pytest.raises(ValueError, match="the model's config needs a whole vocab_size of at least 1, got None"):
        model_coefficients(config(vocab_size=None))


def test_pairs_count_what_queries_see():
    """Up to the diagonal, which the square counts half."""
    for window in (0, 1, 5, 40):
        for length in (1, 4, 5, 6, 39, 100):
            seen = sum(min(i + 1, window or length) for i in range(length))
            counted = float(pairs(np.array(float(length)), window))
            assert 0 <= 2 * seen - counted <= length


def test_parts_of_a_fragment_add_up():
    c = Coefficients(c0=5.0, a=2.0, b=0.25, head=3.0, window_b=0.5, window=6)
    # P 4, C 2 and 5: a prefix of 3, suffixes of 3 and 6, lengths 6 and 9
    tokens, attention = 3 + 3 + 6, 0.25 * (9 + (36 - 9) + (81 - 9)) + 0.5 * (9 + (36 - 9) + (2 * 9 * 6 - 36 - 9))
    assert fragment_cost(4, [2, 5], c) == 2.0 * tokens + 3.0 * 7 + attention
    alone = alone_costs(np.array([(4, 2), (4, 5)]), c)
    assert alone.tolist() == [fragment_cost(4, [2], c), fragment_cost(4, [5], c)]
    assert alone.sum() - prefix_costs(np.array([4]), c)[0] == fragment_cost(4, [2, 5], c)
    work = bin_work([(0, 2), (1,)], [(4, 2), (7, 1), (4, 5)], c)
    assert sum(work) == fragment_cost(4, [2, 5], c) + fragment_cost(7, [1], c)
    assert prefix_costs(np.array([1]), c)[0] == 0


def test_overhead_is_a_share_of_a_full_micro_batch():
    c = with_overhead(Coefficients(0.0, a=2.0, b=0.5, head=1.0), cap=10, share=0.1)
    assert c.c0 == pytest.approx(0.1 * (20 + 10 + 50)) and full_cost(c, 10) == 80
    assert (c.a, c.b, c.head) == (2.0, 0.5, 1.0)


WINDOWED = config(
    hidden_size=256, vocab_size=4000, sliding_window=2000, layer_types=["full_attention"] * 3 + ["sliding_attention"]
)
START = with_overhead(model_coefficients(WINDOWED), cap=8192)
TRUE = (0.004, 3e-12, 9e-12)  # seconds a micro-batch, and a FLOP of either kind: attention runs at a third of the speed


def measure(works, noise, seed=1):
    rng = np.random.default_rng(seed)
    return [
        Observation(w, (TRUE[0] + TRUE[1] * w.linear + TRUE[2] * w.attention) * (1 + noise * rng.standard_normal()))
        for w in works
    ]


def bins(count, least, seed=0):
    """Work of micro-batches of `least`..1 of 8,192 tokens, in sequences of like length."""
    rng, works = np.random.default_rng(seed), []
    for _ in range(count):
        tokens, each = int(8192 * rng.uniform(least, 1)), int(rng.integers(200, 8000))
        lengths = [(20, min(each, tokens) - 20)] * max(1, tokens // each)
        works.append(bin_work([(i,) for i in range(len(lengths))], lengths, START))
    return works


def test_a_fit_recovers_what_made_the_times():
    fit = refit(measure(bins(200, 0.2), noise=0.01), START)
    assert not fit.rescaled_only and fit.r2 > 0.98 and fit.num_observations == 200 and fit.condition < 30
    assert fit.factors == pytest.approx(TRUE, rel=0.05)
    assert fit.coefficients.b == pytest.approx(TRUE[2] * START.b, rel=0.05)
    assert fit.coefficients.window_b / fit.coefficients.b == pytest.approx(START.window_b / START.b)
    assert fit.coefficients.head / fit.coefficients.a == pytest.approx(START.head / START.a)
    work = bins(1, 0.5, seed=9)[0]
    assert fit.seconds(work) == pytest.approx(TRUE[0] + TRUE[1] * work.linear + TRUE[2] * work.attention, rel=0.02)
    assert fit.coefficients.c0 + sum(bin_work([(0,), (1,)], [(3, 50), (9, 70)], fit.coefficients)) == pytest.approx(
        fit.seconds(bin_work([(0,), (1,)], [(3, 50), (9, 70)], START))
    )


@pytest.mark.parametrize("noise", [0.03, 0.0001])
def test_alike_micro_batches_only_rescale(noise):
    """The trap: balanced micro-batches are alike, and a free fit would explain them by anything."""
    rng = np.random.default_rng(3)
    one = bin_work([(0,), (1,), (2,)], [(20, 2600)] * 3, START)
    works = [Work(one.linear * s, one.attention * s) for s in 1 + 0.002 * rng.standard_normal(200)]
    fit = refit(measure(works, noise), START)
    assert fit.rescaled_only and (fit.r2 < 0.9 or fit.condition > 100)
    assert fit.coefficients.b / fit.coefficients.a == pytest.approx(START.b / START.a)
    assert fit.coefficients.c0 / fit.coefficients.a == pytest.approx(START.c0 / START.a)
    assert fit.seconds(one) == pytest.approx(measure([one], 0)[0].seconds, rel=0.01)


def test_times_of_something_else_only_rescale():
    rng = np.random.default_rng(0)
    works = bins(100, 0.2)
    fit = refit([Observation(w, t) for w, t in zip(works, rng.uniform(0.5, 1.5, 100), strict=True)], START)
    assert fit.rescaled_only and fit.r2 < 0.9 and fit.condition < 30


@pytest.mark.parametrize("negative", [0, 1, 2])
def test_the_best_fit_without_negative_parts_is_found(negative):
    """Where a part is 0, more of it would make the fit worse; where it is above, neither more nor less helps."""
    rng = np.random.default_rng(negative)
    features = rng.uniform(0.5, 2.0, (40, 3)) * [1.0, 1e9, 1e12]
    truth = np.array([1.0, 1e-9, 1e-12])
    truth[negative] *= -0.3
    seconds, prior = features @ truth, np.abs(truth)
    found, r2, condition = fit_apart(features, seconds, prior)
    pull = RIDGE * (features**2).sum(0)
    slope = features.T @ (features @ found - seconds) + pull * (found - prior)
    slope /= np.abs(features.T @ seconds)
    assert found[negative] == 0 and slope[negative] > 1e-4
    free = [j for j in range(3) if j != negative]
    assert (found[free] > 0).all() and slope[free] == pytest.approx(0, abs=1e-9)
    assert r2 < 1 and condition > 1


def test_what_times_do_not_tell_is_drawn_to_the_start():
    """Attention is a hundredth of the work here: its own speed is taken from the start values."""
    works = [Work(w.linear, 0.01 * w.linear * (1 + 1e-5 * i)) for i, w in enumerate(bins(30, 0.2))]
    features = np.array([(1.0, *w) for w in works])
    found, _, _ = fit_apart(features, features @ np.array([0.0, 3e-12, 0.0]), np.array([0.0, 3e-12, 3e-12]))
    assert found[2] > 1e-12 and found[1] == pytest.approx(3e-12, rel=0.02)


def test_few_observations_rescale_and_none_are_refused():
    fit = refit(measure(bins(2, 0.2), 0), START)
    assert fit.rescaled_only and fit.condition == float("inf") and fit.num_observations == 2
    with pytest.raises(ValueError, match="at least one observation"):
        refit([], START)
    with pytest.raises(ValueError, match="times above 0"):
        refit([Observation(Work(1.0, 1.0), 0.0)], START)
    with pytest.raises(ValueError, match="work in them"):
        refit([Observation(Work(0.0, 0.0), 1.0)], Coefficients(0.0, 1.0, 1.0))
