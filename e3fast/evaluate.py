"""Held-out evaluation: unbiased pass@k at its own temperature, the same prompts and random streams each time."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from e3fast.config import EvalConfig
from e3fast.rollout.engine import Engine
from e3fast.streams import stream_key
from e3fast.types import VERDICTS, Prompt, Request, Rollout, Score


class Scorer(Protocol):
    def score(self, pairs: Sequence[tuple[Prompt, Rollout]]) -> list[Score]: ...


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n rollouts drawn without replacement hold a correct one.

    1 - C(n-c, k)/C(n, k) (arXiv 2107.03374).

    Unbiased for every n >= k, so groups of unequal size may be averaged. ValueError for n < k.
    """
    if not 0 <= c <= n or k < 1 or n < k:
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def evaluate(
    engine: Engine, scorer: Scorer, prompts: Sequence[Prompt], config: EvalConfig, max_new_tokens: int, seed: int
) -> dict[str, Any]:
    """Sample, score and summarise; rollouts without a verdict leave their prompt's n."""
    start = time.perf_counter()
    requests = [
        Request(prompt, config.samples, config.temperature, max_new_tokens, stream_key(seed, "eval", prompt.id))
        for prompt in prompts
    ]
    rollouts = engine.generate(requests)
    flat = [rollout for group in rollouts for rollout in group]
    scores = scorer.score([(rollout.request.prompt, rollout) for rollout in flat])
    verdicts = Counter(score.verdict for score in scores)
    counts: list[tuple[Prompt, int, int]] = []
    for i, prompt in enumerate(prompts):
        own = [score.verdict for score in scores[i * config.samples : (i + 1) * config.samples]]
        counts.append((prompt, len(own) - own.count("failed"), own.count("correct")))
    sources = list(dict.fromkeys(prompt.source for prompt in prompts))
    by_source = {s: rates([x for x in counts if x[0].source == s], config.ks) for s in sources}
    return {
        "samples": config.samples,
        "temperature": config.temperature,
        **rates(counts, config.ks),
        "verdicts": {verdict: verdicts[verdict] for verdict in VERDICTS},
        "by_source": by_source,
        "counts": {prompt.id: [judged, correct] for prompt, judged, correct in counts},
        "mean_tokens": sum(len(rollout.token_ids) for rollout in flat) / max(len(flat), 1),
        "seconds": time.perf_counter() - start,
    }


def rates(counts: Sequence[tuple[Prompt, int, int]], ks: Sequence[int]) -> dict[str, float]:
    """pass@k over prompts; a k that some prompt has too few judged rollouts for is left out."""
    out: dict[str, float] = {"num_prompts": len(counts)}
    for k in ks:
        if counts and all(n >= k for _, n, _ in counts):
            out[f"pass@{k}"] = sum(pass_at_k(n, c, k) for _, n, c in counts) / len(counts)
    return out
