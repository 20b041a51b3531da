"""A run is refused where the engine's log-probs are not the learner's: token by token, and under a sequence mask."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from e3fast.agreement import NUM_ROLLOUTS, RATIO_ROLLOUTS, RATIO_TOKENS, check_mask, check_ratio
from e3fast.allocator import Allocator
from e3fast.config import RolloutConfig, RunConfig, TrainConfig
from e3fast.costs import model_coefficients
from e3fast.learner import LocalLearner
from e3fast.prompts import PromptPool
from e3fast.rollout.transformers import TransformersEngine
from tests.records import prompt
from tests.tiny import make_model, make_tokenizer

CPU = torch.device("cpu")


class Noisy:
    """An engine whose log-probs are off by `share` of rollouts times `gap` a token."""

    def __init__(self, engine, gap, share=1.0, nan_at=None):
        self.engine, self.gap, self.share, self.nan_at, self.seen = engine, gap, share, nan_at, []

    def generate(self, requests):
        done = self.engine.generate(requests)
        total, count, out = sum(map(len, done)), 0, []
        for own in done:
            out.append([])
            for rollout in own:
                gap = self.gap if count < round(self.share * total) else 0.0
                logprobs = [value + gap for value in rollout.rollout_logprobs]
                if self.nan_at is not None:
                    logprobs[self.nan_at] = math.nan
                out[-1].append(dataclasses.replace(rollout, rollout_logprobs=tuple(logprobs)))
                self.seen.append(out[-1][-1])
                count += 1
        return out


def ask(num_prompts=20, band=2.0, ratio_in=None, seen=None, cap=400, over_long="refuse", max_new_tokens=6, **noise):
    model = make_model()
    learner = LocalLearner(model, TrainConfig(), CPU)
    train = TrainConfig(tokens_per_micro_batch=cap, over_long=over_long)
    config = RunConfig(train=train, rollout=RolloutConfig(temperature=0.8, max_new_tokens=max_new_tokens))
    rng = np.random.default_rng(0)
    pool = PromptPool([prompt(i, rng.integers(1, 257, 5).tolist()) for i in range(num_prompts)], 0)
    engine = Noisy(TransformersEngine(model, make_tokenizer(), 200), **({"gap": 0.0} | noise))
    before = [p.clone() for p in model.parameters()]
    try:
        parts = (config, pool, engine, learner, Allocator(train, model_coefficients(model.config)))
        return check_ratio(*parts, ratio_in) if ratio_in else check_mask(*parts, band)
    finally:
        if seen is not None:
            seen += engine.seen
        assert len(engine.seen) >= (RATIO_ROLLOUTS if ratio_in else NUM_ROLLOUTS)
        assert all(r.request.draw == 0 for r in engine.seen)
        assert {r.request.temperature for r in engine.seen} == {0.8}
        assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("num_prompts", [1, 20, 64, 80])
def test_exact_log_probs_keep_everything(num_prompts):
    count = {1: 64, 20: 80, 64: 64, 80: 64}[num_prompts]
    assert ask(num_prompts) == f"mask at no noise keeps 100% of {count} rollouts"


@pytest.mark.parametrize("gap", [0.8, -0.8])
def test_noisy_log_probs_are_refused_with_advice(gap):
    with pytest.raises(ValueError, match=r'keeps only 0% of rollouts .*set behaviour_logprobs = "learner"'):
        ask(gap=gap)


def test_a_few_may_be_off_and_a_wide_band_bears_more():
    assert "keeps 95%" in ask(64, gap=0.8, share=3 / 64)
    with pytest.raises(ValueError, match="keeps only 94%"):
        ask(64, gap=0.8, share=4 / 64)
    assert "keeps 100%" in ask(gap=0.8, band=1e3)


def test_a_nan_log_prob_costs_its_token_only():
    assert "keeps 100%" in ask(nan_at=0)


def test_tails_are_cut_where_the_run_cuts_them():
    """As in the step itself, so that a long rollout does not end the run before it starts."""
    assert "keeps 100%" in ask(cap=8, over_long="cut", max_new_tokens=24)


def test_equal_log_probs_have_ratio_one():
    line = ask(ratio_in="fp32")
    mean, largest = (
        float(part.split(" nats")[0].split(",")[0]) for part in line.split("| ")[1:2] + line.split("max ")[1:]
    )
    assert mean < 1e-6 and largest < 1e-4 and "effective sample 100.0%" in line


@pytest.mark.parametrize(("dtype", "gap"), [("fp32", 0.02), ("bf16", 0.3)])
def test_an_engine_of_another_policy_is_refused_before_step_one(dtype, gap):
    with pytest.raises(ValueError, match=f"at learning rate 0 .* differ by {gap:.3g} nats a token .*in {dtype}"):
        ask(ratio_in=dtype, gap=gap)
    assert "effective sample" in ask(ratio_in=dtype, gap=gap / 3)


def test_the_ratio_test_samples_few_and_short_completions():
    """A run with completions of 32,768 tokens must not wait for them."""
    seen = []
    ask(ratio_in="fp32", max_new_tokens=200, seen=seen)
    assert len(seen) == 16 and {r.request.max_new_tokens for r in seen} == {RATIO_TOKENS}
