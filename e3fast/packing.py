"""Samples into the tensors of micro-batches, as planning.py lays them out: under a hard cap, as many on every rank.

A fragment is what is laid out together: one sample, or samples of one group behind their shared prompt prefix. With
sharing the prefix is the prompt less its last token, computed once; each suffix starts with that last token again, so
that it predicts its own completion's first token inside its own segment.

Letters: P prompt tokens, L tokens of a sample, T tokens of a micro-batch, N segments.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from e3fast.costs import with_overhead
from e3fast.planning import plan_packing
from e3fast.types import ROUTES, Batch, Coefficients, MicroBatch, PackingPlan, Sample

IGNORED = -100
EVEN = Coefficients(c0=0.0, a=1.0, b=0.0)  # every token costs the same
Fragment = tuple[int, ...]  # sample indices, in order; two or more share a prefix


def pack(
    samples: Sequence[Sample],
    weights: Sequence[float],
    tokens_per_micro_batch: int,
    num_ranks: int,
    *,
    coefficients: Coefficients | None = None,
    forward_coefficients: Coefficients | None = None,
    sharing: bool = True,
    score_all: bool = True,
    forward_cap: int | None = None,
    hard_cap: int | None = None,
    backward: Literal["signal", "all", "none"] = "signal",
    at_draws: bool = False,
) -> Batch:
    """One optimiser step's samples as micro-batches; `weights` (one a sample) weigh its loss tokens.

    `backward`: who gets a backward pass; by default samples with an advantage that is not zero. The others go into
    `forward_only`, for their entropy, or with `score_all` off nowhere. Samples with neither loss nor entropy tokens are
    not packed. With `at_draws` a micro-batch holds samples of one draw of weights, and is to be worked out there.
    Micro-batches without a backward pass have their own cap and costs; without them, those of the others. Samples over
    the cap have a micro-batch to themselves, up to `hard_cap`; ValueError for a longer one.
    """
    costs = coefficients or with_overhead(EVEN, tokens_per_micro_batch)
    asked = [i for i, sample in enumerate(samples) if sample.num_loss_tokens]
    wanted = {"signal": lambda sample: sample.has_signal, "all": lambda _: True, "none": lambda _: False}[backward]
    trained = [i for i in asked if wanted(samples[i])]
    counted = {i for i, sample in enumerate(samples) if sample.num_loss_tokens or sample.entropy_mask.any()}
    scored = sorted(counted.difference(trained)) if score_all else []
    cap, wide = tokens_per_micro_batch, forward_cap or tokens_per_micro_batch
    longest = max(wide, hard_cap or 0)
    lay = functools.partial(lay_out_draws, samples, weights, num_ranks=num_ranks, sharing=sharing, at_draws=at_draws)
    plan, micro_batches = lay(trained, cap=cap, coefficients=costs, hard_cap=hard_cap)
    forward_plan, forward_only = lay(scored, cap=wide, coefficients=forward_coefficients or costs, hard_cap=longest)
    return Batch(
        micro_batches=micro_batches,
        forward_only=forward_only,
        prompt_ids=tuple(sample.prompt_id for sample in samples),
        num_loss_tokens=sum(samples[i].num_loss_tokens for i in asked),
        num_sequences=len(asked),
        num_groups=len({samples[i].group for i in asked}),
        plan=plan,
        forward_plan=forward_plan,
    )


def lay_out_draws(
    samples: Sequence[Sample],
    weights: Sequence[float],
    chosen: Sequence[int],
    *,
    num_ranks: int,
    cap: int,
    coefficients: Coefficients,
    sharing: bool,
    hard_cap: int | None,
    at_draws: bool,
) -> tuple[PackingPlan, tuple[tuple[MicroBatch, ...], ...]]:
    """Plan and micro-batches of some samples; draw after draw, so that each draw of weights is loaded once."""
    plans, parts = [], []
    for draw in sorted({samples[i].draw if at_draws else 0 for i in chosen}) or [0]:
        own = [i for i in chosen if not at_draws or samples[i].draw == draw]
        plans.append(plan_chosen(samples, own, num_ranks, cap, coefficients, sharing, hard_cap))
        parts.append(build_all(samples, weights, plans[-1], draw))
    return join_plans(plans), tuple(sum(own, ()) for own in zip(*parts, strict=True))


def join_plans(plans: Sequence[PackingPlan]) -> PackingPlan:
    """Plans of the same ranks, cap and costs, one after the other."""
    if len(plans) == 1:
        return plans[0]
    join = lambda name: tuple(sum(own, ()) for own in zip(*(getattr(plan, name) for plan in plans), strict=True))  # noqa: E731
    return replace(
        plans[0],
        **{name: join(name) for name in ("bins", "tokens", "costs")},
        unshared_tokens=sum(plan.unshared_tokens for plan in plans),
        unshared_cost=sum(plan.unshared_cost for plan in plans),
        digest=hashlib.blake2b("".join(plan.digest for plan in plans).encode(), digest_size=8).hexdigest(),
    )


def plan_chosen(
    samples: Sequence[Sample],
    chosen: Sequence[int],
    num_ranks: int,
    cap: int,
    coefficients: Coefficients,
    sharing: bool,
    hard_cap: int | None,
) -> PackingPlan:
    """The plan of some of the samples; its bins hold their indices among all of them."""
    prompts = [samples[i].num_prompt_tokens for i in chosen]
    lengths = [(p, len(samples[i].token_ids) - p) for i, p in zip(chosen, prompts, strict=True)]
    labels: dict[tuple[int, bytes], int] = {}  # the prompt's tokens are part of the key: only equal prefixes are shared
    keys = [(samples[i].group, samples[i].token_ids[:p].tobytes()) for i, p in zip(chosen, prompts, strict=True)]
    groups = [labels.setdefault(key, len(labels)) for key in keys]
    plan = plan_packing(lengths, groups, num_ranks, cap, coefficients, sharing=sharing, hard_cap=hard_cap)
    bins = tuple(tuple(tuple(tuple(chosen[i] for i in own) for own in kept) for kept in rank) for rank in plan.bins)
    return replace(plan, bins=bins)


def build_all(
    samples: Sequence[Sample], weights: Sequence[float], plan: PackingPlan, draw: int
) -> tuple[tuple[MicroBatch, ...], ...]:
    return tuple(tuple(build(samples, weights, fragments, draw) for fragments in rank) for rank in plan.bins)


def cut_overlong(samples: Sequence[Sample], cap: int) -> tuple[list[Sample], int]:
    """Samples with the tail of completions beyond `cap` tokens cut off, and how many were cut.

    Advantages stay as they are. Loss weights are to be taken after it. ValueError where a prompt leaves no room.
    """
    cut = [cut_sample(sample, cap) if len(sample.token_ids) > cap else sample for sample in samples]
    return cut, sum(len(sample.token_ids) > cap for sample in samples)


def cut_sample(sample: Sample, cap: int) -> Sample:
    if sample.num_prompt_tokens >= cap:
        raise ValueError(
            f"a prompt of {sample.num_prompt_tokens} tokens leaves no room for a completion under "
            f"train.tokens_per_micro_batch={cap}"
        )
    names = ("token_ids", "loss_mask", "entropy_mask", "advantages", "rollout_logprobs", "temperatures")
    return replace(sample, **{name: getattr(sample, name)[:cap] for name in names})


class Segment(NamedTuple):
    sample: int  # whose tokens stand here
    start: int  # first token of the sample that is laid out
    stop: int
    prefix: int  # segment that holds tokens 0..start-1, or -1
    is_prefix: bool


def lay_out(samples: Sequence[Sample], fragments: Sequence[Fragment]) -> list[Segment]:
    segments: list[Segment] = []
    for fragment in fragments:
        if len(fragment) == 1:
            segments.append(Segment(fragment[0], 0, len(samples[fragment[0]].token_ids), -1, False))
            continue
        cut = samples[fragment[0]].num_prompt_tokens - 1
        home = len(segments)
        segments.append(Segment(fragment[0], 0, cut, -1, True))
        segments += [Segment(i, cut, len(samples[i].token_ids), home, False) for i in fragment]
    return segments


def build(
    samples: Sequence[Sample], weights: Sequence[float], fragments: Sequence[Fragment], draw: int = 0
) -> MicroBatch:
    """Gather the tensors of one micro-batch. A bin without fragments becomes the smallest filler.

    One token, no loss.
    """
    segments = lay_out(samples, fragments)
    if not segments:
        return filler(draw)
    here = [(samples[s.sample], s, slice(s.start, s.stop)) for s in segments]
    asked = [np.zeros(s.stop - s.start, bool) if s.is_prefix else shift(x.loss_mask[at], False) for x, s, at in here]
    counted = [
        np.zeros(s.stop - s.start, bool) if s.is_prefix else shift(x.entropy_mask[at], False) for x, s, at in here
    ]
    loss_mask, entropy_mask = np.concatenate(asked), np.concatenate(counted)
    targets = np.concatenate([shift(x.token_ids[at], IGNORED) for x, _, at in here])
    weight = np.concatenate([np.full(s.stop - s.start, weights[s.sample]) for s in segments])
    gather = lambda name, end: np.concatenate([shift(getattr(x, name)[at], end) for x, _, at in here])  # noqa: E731
    fp32 = lambda x: torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))  # noqa: E731
    lengths = np.array([s.stop - s.start for s in segments], dtype=np.int64)
    micro_batch = MicroBatch(
        token_ids=torch.from_numpy(np.concatenate([x.token_ids[at] for x, _, at in here])),
        targets=torch.from_numpy(np.where(loss_mask | entropy_mask, targets, IGNORED)),
        position_ids=torch.from_numpy(np.concatenate([np.arange(s.start, s.stop) for s in segments])),
        loss_mask=torch.from_numpy(loss_mask),
        loss_weights=fp32(weight * loss_mask),
        entropy_mask=torch.from_numpy(entropy_mask),
        advantages=fp32(gather("advantages", 0.0) * loss_mask),
        rollout_logprobs=fp32(np.where(loss_mask, gather("rollout_logprobs", 0.0), 0.0)),
        temperatures=fp32(gather("temperatures", 1.0)),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], lengths.cumsum()])),
        prefix_of=torch.tensor([s.prefix for s in segments]),
        sample_of=torch.tensor([-1 if s.is_prefix else s.sample for s in segments]),
        routes=torch.from_numpy(np.repeat([ROUTES.index(x.route) for x, _, _ in here], lengths).astype(np.int8)),
        draw=draw,
    )
    assert micro_batch.num_tokens == int(micro_batch.cu_seqlens[-1]) == len(micro_batch.temperatures)
    return micro_batch


def shift(values: npt.NDArray[Any], end: object) -> npt.NDArray[Any]:
    """Entry t takes what belongs to token t + 1, inside one segment; the last entry takes `end`."""
    return np.append(values[1:], np.array(end, dtype=values.dtype))


def filler(draw: int = 0) -> MicroBatch:
    """One token that asks for nothing: it keeps a rank's backward in step and adds exactly 0."""
    zero, one = torch.zeros(1), torch.ones(1)
    false, index = torch.zeros(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    ends, nothing = torch.tensor([0, 1]), torch.tensor([-1])
    return MicroBatch(
        token_ids=index,
        targets=torch.full_like(index, IGNORED),
        position_ids=index,
        loss_mask=false,
        loss_weights=zero,
        entropy_mask=false,
        advantages=zero,
        rollout_logprobs=zero,
        temperatures=one,
        cu_seqlens=ends,
        prefix_of=nothing,
        sample_of=nothing,
        routes=torch.zeros(1, dtype=torch.int8),
        draw=draw,
    )
