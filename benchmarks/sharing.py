"""A training step with prompt sharing on and off, in turns in one process: seconds, tokens/s, and the same gradient.

    python -m benchmarks.step --sharing [--save]
    python -m benchmarks.step --sharing gradients [--save]

The quickstart's model on made-up tokens: forward, backward, clipping and optimizer step of one batch. Lengths are as
in GSM8K (about 116 prompt and 293 completion tokens, groups of 8) and with long prompts (2,570 and 550, groups of 16).
`padded-sdpa` is the same step as transformers runs it without packing: rows of one sample, padded to the longest, as
many as the cap holds, and its own SDPA. Tokens a second count every sample's own tokens, however they are laid out.
`gradients` compares the ways instead, on a group's first samples in fp32: in bf16, made-up tokens leave so little of a
gradient that its rounding shows most.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.results import Row

TARGETS = {"gsm8k-like": 1.25, "long-prompt": 2.5}
MOST_DIFFERENT = 1e-4


@dataclass(frozen=True)
class Case:
    name: str
    prompt: int  # mean tokens
    completion: int
    num_groups: int
    group_size: int
    cap: int
    rounds: int
    padded: bool  # whether transformers' padded step is timed too: minutes a round with long prompts
    compared: int  # samples whose gradients are


CASES = (
    Case("gsm8k-like", 116, 293, 4, 8, 4096, 3, True, 4),
    Case("long-prompt", 2570, 550, 1, 16, 12288, 3, False, 2),
)


def made_up_samples(case: Case, seed: int = 0) -> list[Any]:
    """Log-normal completions around the case's mean, prompts of one length, and a gradient from every sample."""
    from e3fast.types import Sample

    rng, samples = np.random.default_rng(seed), []
    for group in range(case.num_groups):
        prompt = rng.integers(100, 40_000, case.prompt)
        drawn = case.completion * np.exp(0.4 * rng.standard_normal(case.group_size) - 0.08)
        for i, length in enumerate(np.maximum(8, drawn.astype(np.int64)).tolist()):
            ids = np.concatenate([prompt, rng.integers(100, 40_000, length)])
            asked = np.arange(len(ids)) >= case.prompt
            samples.append(
                Sample(
                    group=group,
                    prompt_id=str(group),
                    num_prompt_tokens=case.prompt,
                    token_ids=ids,
                    loss_mask=asked,
                    entropy_mask=asked,
                    advantages=np.where(asked, 1.0 - 2.0 * (i % 2), 0.0),
                    rollout_logprobs=np.where(asked, -1.0, 0.0),
                    temperatures=np.ones(len(ids)),
                )
            )
    return samples


class Bench:
    """One model and learner, and the ways to do a step on one batch of samples."""

    def __init__(self, case: Case, samples: Sequence[Any], dtype: str = "auto") -> None:
        import torch

        from e3fast.config import ModelConfig, TrainConfig
        from e3fast.learner import LocalLearner
        from e3fast.machine import find_compute_dtype
        from e3fast.model import load_policy
        from e3fast.objective import loss_weights
        from e3fast.types import LossParams

        self.case, self.samples = case, samples
        self.weights = loss_weights(self.samples, LossParams(), 0)
        device = torch.device("cpu")
        self.model, _ = load_policy(ModelConfig(), find_compute_dtype(dtype, device), device)
        self.learner = LocalLearner(self.model, TrainConfig(learning_rate=0.0), device)

    @property
    def providers(self) -> dict[str, Callable[[], None]]:
        return {
            "e3fast": lambda: self.packed(sharing=True),
            "e3fast-sharing-off": lambda: self.packed(sharing=False),
            "padded-sdpa": self.padded,
        }

    def packed(self, sharing: bool) -> None:
        from e3fast.costs import model_coefficients, with_overhead
        from e3fast.packing import pack
        from e3fast.totals import Totals
        from e3fast.types import LossParams

        coefficients = with_overhead(model_coefficients(self.model.config), self.case.cap)
        batch = pack(self.samples, self.weights, self.case.cap, 1, coefficients=coefficients, sharing=sharing)
        self.learner.accumulate(None, (), batch.micro_batches[0], LossParams(), Totals())

    def padded(self) -> None:
        """Rows of one sample each, right-padded, in the order they came; the same loss op on the same rows."""
        self.model.config._attn_implementation = "sdpa"
        rows = max(1, self.case.cap // max(len(s.token_ids) for s in self.samples))
        for first in range(0, len(self.samples), rows):
            self.padded_micro_batch(self.samples[first : first + rows], self.weights[first : first + rows])
        self.model.config._attn_implementation = "e3fast"

    def padded_micro_batch(self, samples: Sequence[Any], weights: Sequence[float]) -> None:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        from csrc_triton import grpo, linear_grpo_loss

        stack = lambda values: pad_sequence([torch.as_tensor(v) for v in values], batch_first=True)  # noqa: E731
        ids, asked = stack([s.token_ids for s in samples]), stack([s.loss_mask for s in samples])
        real = stack([np.ones(len(s.token_ids), np.int64) for s in samples])
        advantages = stack([s.advantages for s in samples]).float()
        weight = torch.tensor(weights, dtype=torch.float32)[:, None].expand(ids.shape)
        hidden = self.model.base_model(input_ids=ids, attention_mask=real, use_cache=False).last_hidden_state
        here = asked[:, 1:]
        extra = {"advantages": advantages[:, 1:][here]}
        head = self.model.lm_head.weight
        linear_grpo_loss(hidden[:, :-1][here], head, ids[:, 1:][here], extra, grpo, weight[:, 1:][here]).loss.backward()

    def gradient(self) -> Any:
        import torch

        return torch.cat([master.grad.flatten() for master in self.learner.masters])


def measure(case: Case) -> list[Row]:
    """Rounds in turns, so that a slow spell of the machine falls on all; the first round warms up."""
    bench = Bench(case, made_up_samples(case))
    ways = {name: way for name, way in bench.providers.items() if case.padded or name != "padded-sdpa"}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1 + case.rounds):
        for name, accumulate in ways.items():
            start = time.perf_counter()
            accumulate()
            bench.learner.step()
            spent = time.perf_counter() - start
            print(f"{case.name} round {turn} {name}: {spent:.1f} s", flush=True)
            if turn:
                seconds[name].append(spent)
    return rows_of(case, bench.samples, seconds)


def compare_gradients(case: Case) -> list[Row]:
    """How far the gradient of each way is from that with sharing off, relative to its norm."""
    bench, found = Bench(case, made_up_samples(case)[: case.compared], "fp32"), {}
    for name, accumulate in bench.providers.items():
        accumulate()
        found[name] = bench.gradient()
        bench.learner.drop_gradients()
    want = found.pop("e3fast-sharing-off")
    off = lambda gradient: float((gradient - want).norm() / want.norm())  # noqa: E731
    return [Row(case.name, name, "gradient_difference", [off(g)], "of sharing off, fp32") for name, g in found.items()]


def rows_of(case: Case, samples: Sequence[Any], seconds: dict[str, list[float]]) -> list[Row]:
    tokens = sum(len(sample.token_ids) for sample in samples)
    rows = [Row(case.name, name, "seconds", spent, "s") for name, spent in seconds.items()]
    rows += [
        Row(case.name, name, "tokens_per_second", [tokens / s for s in spent], "tokens/s")
        for name, spent in seconds.items()
    ]
    over = lambda slow, fast: [s / f for s, f in zip(seconds[slow], seconds[fast], strict=True)]  # noqa: E731
    rows.append(Row(case.name, "e3fast", "speedup", over("e3fast-sharing-off", "e3fast"), "x of sharing off"))
    if case.padded:
        gain = over("padded-sdpa", "e3fast-sharing-off")
        rows.append(Row(case.name, "e3fast-sharing-off", "speedup_over_padded", gain, "x of padded-sdpa"))
    return rows


def missed(rows: Sequence[Row]) -> list[str]:
    """Targets that the figures do not reach."""
    out = []
    for row in rows:
        value, least = statistics.median(row.values), TARGETS.get(row.case, 0.0)
        if row.metric == "speedup" and value < least:
            out.append(f"{row.case} speedup {value:.2f} < {least}")
        if row.metric == "gradient_difference" and value > MOST_DIFFERENT:
            out.append(f"{row.case} {row.provider} gradient_difference {value:.2g} > {MOST_DIFFERENT}")
    return out
