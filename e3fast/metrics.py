"""What a run measures: seconds by stage, the metrics of a step, peak memory; and means over a run's ends.

Shares are in [0, 1], times in seconds, memory in GiB, entropies in nats a token. Pure but for the two clocks it reads.
"""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from e3fast.planning import plan_metrics
from e3fast.types import VERDICTS, Batch, Group, LossParams, StepContext, StepStats


class StageClock:
    """Wall seconds by stage: `with clock("generate"): ...`. A stage inside a stage pauses the outer one."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.stages = ["other"]
        self.seconds: dict[str, float] = {}
        self.mark = now()

    def charge(self) -> None:
        """Book the time since the last mark on the stage under way."""
        now = self.now()
        self.seconds[self.stages[-1]] = self.seconds.get(self.stages[-1], 0.0) + now - self.mark
        self.mark = now

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.charge()
        self.stages.append(stage)
        try:
            yield
        finally:
            self.charge()
            self.stages.pop()

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last take, then from zero; "other" is the time outside any stage."""
        self.charge()
        taken, self.seconds = self.seconds, {}
        return taken


def step_metrics(
    ctx: StepContext, groups: Sequence[Group], loss: LossParams, batch: Batch, stats: StepStats
) -> dict[str, Any]:
    """The step's flat metrics; a mean of nothing is nan. Pure: time, totals and memory are the trainer's to add."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = [len(rollout.token_ids) for rollout in rollouts]
    accuracy = ctx.clean_accuracy
    return {
        "step": ctx.step,
        "rollouts": len(rollouts),
        "generated_tokens": sum(tokens),
        "mean_completion_tokens": mean(tokens),
        "temperature": mean([rollout.request.temperature for rollout in rollouts]),
        "clean_accuracy": math.nan if accuracy is None else accuracy,
        **verdict_metrics(groups),
        **group_metrics(ctx, groups),
        **extra_metrics(ctx, groups),
        "entropy": stats.entropy,
        "entropy_at_one": stats.entropy_at_one,
        "entropy_elasticity": stats.elasticity,
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "ratio_max": stats.ratio_max,
        "clip_share": stats.clip_share,
        "mismatch_mean": stats.mismatch_mean,
        "mismatch_max": stats.mismatch_max,
        "mismatch_kl": stats.mismatch_kl,
        "effective_sample_share": stats.effective_sample_share,
        "importance_capped": stats.importance_capped,
        "importance_kept": stats.importance_kept,
        "beta": loss.beta,
        "kl": stats.kl,
        "keep_rate": stats.keep_rate,
        "stepped": stats.stepped,
        "trained_tokens": stats.trained_tokens,
        "scored_tokens": stats.scored_tokens,
        **packing_metrics(batch),
    }


def verdict_metrics(groups: Sequence[Group]) -> dict[str, float | int]:
    """The five verdicts counted apart, and the mean reward of the rollouts that have one."""
    pairs = [pair for group in groups for pair in zip(group.rollouts, group.scores, strict=True)]
    verdicts = [score.verdict for _, score in pairs]
    cut = [rollout for rollout, score in pairs if score.verdict == "correct" and rollout.finish_reason == "length"]
    return {
        "reward": mean([score.value for _, score in pairs if score.verdict != "failed"]),
        **{f"verdict/{verdict}": verdicts.count(verdict) for verdict in VERDICTS},
        "truncated_correct": len(cut),
    }


def group_metrics(ctx: StepContext, groups: Sequence[Group]) -> dict[str, float | int]:
    """Rollouts of each prompt's first requests: how many, and the shares of judged prompts with mixed outcome
    (signal), all wrong, all correct: they sum to 1.
    """
    counts = [(judged, correct) for judged, correct in ctx.clean.values() if judged]
    by_prompt: dict[str, int] = {}
    for group in groups:
        if group.request.kind == "first":
            by_prompt[group.prompt.id] = by_prompt.get(group.prompt.id, 0) + len(group.rollouts)
    sizes = list(by_prompt.values())
    return {
        "prompts": len(sizes),
        "signal_share": mean([0 < correct < judged for judged, correct in counts]),
        "all_wrong_share": mean([correct == 0 for _, correct in counts]),
        "all_correct_share": mean([correct == judged for judged, correct in counts]),
        "group_size_min": min(sizes, default=0),
        "group_size_mean": mean(sizes),
        "group_size_max": max(sizes, default=0),
    }


def extra_metrics(ctx: StepContext, groups: Sequence[Group]) -> dict[str, float | int]:
    """What methods asked for beside the first round: its share of all tokens, and what retries were right in."""
    tokens = lambda own: sum(len(rollout.token_ids) for group in own for rollout in group.rollouts)  # noqa: E731
    extra = [group for group in groups if group.request.kind == "extra"]
    return {
        "rounds": ctx.round,
        "extra_token_share": tokens(extra) / max(tokens(groups), 1),
        "rescued_prompts": len({group.prompt.id for group in extra if group.counts[1]}),
    }


def packing_metrics(batch: Batch) -> dict[str, float | int | str]:
    """How well micro-batches are used: all ranks' with and without a backward pass; under packing/ those with one."""
    plans = (batch.plan, batch.forward_plan)
    laid_out = sum(plan.num_tokens for plan in plans)
    room = sum(plan.num_ranks * plan.num_slots * plan.cap for plan in plans)
    unshared = sum(plan.unshared_tokens for plan in plans)
    return {
        "micro_batches": sum(plan.num_ranks * plan.num_slots for plan in plans),
        "fill": laid_out / room if room else math.nan,
        "prompt_work_saved": 1 - laid_out / unshared if unshared else 0.0,
        **{f"packing/{name}": value for name, value in plan_metrics(batch.plan).items()},
        "packing/digest": batch.plan.digest,
    }


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; nan of nothing."""
    return sum(values) / len(values) if values else math.nan


def peak_gib() -> float:
    """Largest resident memory this process has had, GiB."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def number(row: dict[str, Any], key: str) -> float | None:
    """A metric as a finite float; None where it is missing, null, nan or no number."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def tenth_means(rows: Sequence[dict[str, Any]], key: str) -> tuple[float | None, float | None]:
    """Means of a metric over the first and the last tenth of the steps; None where no step has it."""
    size = -(-len(rows) // 10)
    ends = (rows[:size], rows[len(rows) - size :])
    values = [[v for row in end if (v := number(row, key)) is not None] for end in ends]
    return (mean(values[0]) if values[0] else None, mean(values[1]) if values[1] else None)


@dataclass(frozen=True, slots=True)
class Costs:
    """What all steps of a run took together."""

    tokens: int  # generated
    seconds: float  # of the steps; evaluations are not in it
    peak_gib: float | None
    failed: int  # rollouts without a verdict

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


def run_costs(rows: Sequence[dict[str, Any]]) -> Costs:
    peaks = [peak for row in rows if (peak := number(row, "peak_gib")) is not None]
    return Costs(
        tokens=int(sum(number(row, "generated_tokens") or 0 for row in rows)),
        seconds=sum(map(step_seconds, rows)),
        peak_gib=max(peaks, default=None),
        failed=int(sum(number(row, "verdict/failed") or 0 for row in rows)),
    )


def step_seconds(row: dict[str, Any]) -> float:
    """Wall seconds of a step: its stages together."""
    return sum(number(row, key) or 0.0 for key in row if key.startswith("seconds/"))


def pass_names(*rows: dict[str, Any]) -> list[str]:
    """The pass@k that evaluations hold, by rising k."""
    found = {key for row in rows for key in row if re.fullmatch(r"pass@\d+", key)}
    return sorted(found, key=lambda name: int(name.removeprefix("pass@")))
