"""Lengths that a training step meets: made-up traces, and E3's published pool of maths questions (arXiv 2505.18573).

Made-up: log-normal prompts, a log-normal mean a prompt, completions log-normal around it; groups stand one behind the
other. Real: `length` of the pool is a model's mean completion and `level` how often it failed. Harder questions get
more samples (4 to 12, mean 8), and completions spread around the mean by exp(0.5 z - 0.125), an assumption.

Letters: P prompt tokens, C completion tokens, G samples of a group.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from e3fast.types import Coefficients, FloatArray, IntArray

EXTRACT = Path(__file__).parent / "lengths.csv"  # 200 rows of the pool: level, mean completion tokens, prompt letters
MAX_NEW = 6144

# FLOP of a forward pass, the head charged on every token so that every scheduler is judged alike.
COSTS = {
    "Qwen3-0.6B": Coefficients(c0=0.0, a=1_191_968_768.0, b=114_688.0),
    "Qwen3-4B": Coefficients(c0=0.0, a=8_044_544_000.0, b=294_912.0),
    "Qwen2.5-7B": Coefficients(c0=0.0, a=14_140_571_648.0, b=200_704.0),
}


@dataclass(frozen=True)
class Trace:
    """Medians in tokens, spreads of the logarithm, and ranges."""

    prompt: float
    prompt_spread: float
    prompt_range: tuple[int, int]
    completion: float
    spread_between: float  # of the prompts' means
    spread_within: float
    completion_range: tuple[int, int]


TRACES = {
    "short": Trace(110, 0.45, (20, 512), 260, 0.35, 0.40, (16, 1_024)),
    "8k": Trace(140, 0.45, (20, 1_024), 1_500, 0.60, 0.55, (64, 7_168)),
    "32k": Trace(140, 0.45, (20, 1_024), 5_000, 0.70, 0.60, (128, 31_744)),
    "longprompt": Trace(2_500, 0.60, (256, 7_000), 500, 0.40, 0.50, (16, 1_024)),
}


@dataclass(frozen=True)
class Case:
    name: str
    model: str  # of COSTS
    trace: str  # of TRACES, or "real"
    num_prompts: int
    group_size: int
    num_ranks: int
    cap: int


CASES = (
    Case("4b-8k-dp8", "Qwen3-4B", "8k", 64, 8, 8, 16_384),
    Case("0.6b-32k-dp8", "Qwen3-0.6B", "32k", 64, 16, 8, 32_768),
    Case("7b-1k-dp8", "Qwen2.5-7B", "short", 128, 8, 8, 8_192),
    Case("7b-8k-dp64", "Qwen2.5-7B", "8k", 512, 8, 64, 16_384),
    Case("real-lengths", "Qwen2.5-7B", "real", 512, 8, 8, 16_384),
    Case("longprompt-dp8", "Qwen2.5-7B", "longprompt", 64, 16, 8, 16_384),
)


def draw_lengths(case: Case, seed: int, pool: FloatArray) -> tuple[IntArray, IntArray]:
    """(n, 2) prompt and completion tokens of each sample, and (n,) its group. `pool` serves real lengths alone."""
    if case.trace == "real":
        return draw_real(pool, case.num_prompts, case.group_size, seed)
    return draw_made_up(TRACES[case.trace], case.num_prompts, case.group_size, seed)


def draw_made_up(trace: Trace, num_prompts: int, group_size: int, seed: int) -> tuple[IntArray, IntArray]:
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, int]] = []
    for _ in range(num_prompts):
        prompt = int(np.clip(rng.lognormal(np.log(trace.prompt), trace.prompt_spread), *trace.prompt_range))
        mean = rng.normal(np.log(trace.completion), trace.spread_between)
        drawn = np.clip(rng.lognormal(mean, trace.spread_within, size=group_size), *trace.completion_range)
        rows += [(prompt, int(completion)) for completion in drawn]
    return np.array(rows), np.repeat(np.arange(num_prompts), group_size)


def draw_real(pool: FloatArray, num_prompts: int, mean_size: int, seed: int) -> tuple[IntArray, IntArray]:
    """Questions of the pool, (N, 3) level, mean completion tokens, prompt letters; more samples for harder ones.

    A pool with fewer rows than asked is drawn from with replacement. About 3.5 letters make a token.
    """
    rng = np.random.default_rng(seed)
    chosen = pool[rng.choice(len(pool), num_prompts, replace=len(pool) < num_prompts)]
    place = np.empty(num_prompts)
    place[np.argsort(chosen[:, 0], kind="stable")] = np.arange(num_prompts)
    least = mean_size / 2
    sizes = np.round(least + mean_size * place / max(num_prompts - 1, 1)).astype(np.int64)
    rows: list[tuple[int, int]] = []
    for (_, length, letters), size in zip(chosen.tolist(), sizes.tolist(), strict=True):
        prompt = int(np.clip(20 + round(letters / 3.5), 16, 2048))
        spread = np.exp(0.5 * rng.standard_normal(size) - 0.125)
        rows += [(prompt, int(c)) for c in np.clip(np.rint(length * spread), 16, MAX_NEW)]
    return np.array(rows), np.repeat(np.arange(num_prompts), sizes)


def load_pool(path: Path | None) -> FloatArray:
    """(N, 3) level, mean completion tokens, prompt letters: of all_data.parquet of E3, or of the extract."""
    if path is None:
        with EXTRACT.open() as file:
            return np.array([[float(v) for v in row] for row in list(csv.reader(file))[1:]])
    import pyarrow.parquet as parquet

    table = parquet.read_table(path, columns=["level", "length", "prompt"]).to_pylist()
    return np.array([[row["level"], row["length"], letters_of(row["prompt"])] for row in table], dtype=np.float64)


def letters_of(prompt: str | Sequence[dict[str, str]]) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)
