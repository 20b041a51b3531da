"""Samples into micro-batches under a hard token cap, with the same number of them on every rank.

A fragment is what is laid out together: one sample, or samples of one group behind their shared prompt prefix. With
sharing the prefix is the prompt less its last token, computed once; each suffix starts with that last token again, so
that it predicts its own completion's first token inside its own segment.

Letters: P prompt tokens, L tokens of a sample, T tokens of a micro-batch, N segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from e3fast.types import Batch, MicroBatch, PackingPlan, Sample

IGNORED = -100
Fragment = tuple[int, ...]  # sample indices, in order; two or more share a prefix


def pack(
    samples: Sequence[Sample],
    weights: Sequence[float],
    tokens_per_micro_batch: int,
    num_ranks: int,
    *,
    sharing: bool = True,
    score_all: bool = True,
) -> Batch:
    """One optimiser step's samples as micro-batches; `weights` (one a sample) weigh its loss tokens.

    Samples whose advantages are all zero get no backward pass: they go into `forward_only`, for their entropy, or with
    `score_all` off nowhere. Samples without a loss token are not packed. ValueError for a sample longer than the cap.
    """
    asked = [i for i, sample in enumerate(samples) if sample.num_loss_tokens]
    trained = [i for i in asked if samples[i].has_signal]
    scored = [i for i in asked if score_all and not samples[i].has_signal]
    plans = [plan_packing(samples, chosen, num_ranks, tokens_per_micro_batch, sharing) for chosen in (trained, scored)]
    built = [[[build(samples, weights, fragments) for fragments in rank] for rank in plan.bins] for plan in plans]
    return Batch(
        micro_batches=tuple(map(tuple, built[0])),
        forward_only=tuple(map(tuple, built[1])),
        num_loss_tokens=sum(samples[i].num_loss_tokens for i in asked),
        num_sequences=len(asked),
        num_groups=len({samples[i].group for i in asked}),
        plan=plans[0],
        forward_plan=plans[1],
    )


def plan_packing(
    samples: Sequence[Sample], chosen: Sequence[int], num_ranks: int, cap: int, sharing: bool
) -> PackingPlan:
    """Longest fragment first into the least filled bin with room.

    One more micro-batch a rank while something does not fit.
    """
    for i in chosen:
        if len(samples[i].token_ids) > cap:
            raise ValueError(
                f"a sample of {len(samples[i].token_ids)} tokens exceeds train.tokens_per_micro_batch={cap}"
            )
    fragments = cut_fragments(samples, chosen, cap, sharing)
    sizes = [fragment_tokens(samples, fragment) for fragment in fragments]
    order = sorted(range(len(fragments)), key=lambda f: -sizes[f])
    num_slots = -(-sum(sizes) // (cap * num_ranks))
    while (bins := place(order, sizes, num_slots * num_ranks, cap)) is None:
        num_slots += 1
    # Heaviest bins first, dealt so that the bins that meet in a slot are alike.
    filled = sorted(bins, key=lambda b: -sum(sizes[f] for f in b))
    dealt = [
        [tuple(fragments[f] for f in filled[s * num_ranks + r]) for s in range(num_slots)] for r in range(num_ranks)
    ]
    filler = sum(1 for b in bins if not b)
    return PackingPlan(
        num_ranks=num_ranks,
        cap=cap,
        bins=tuple(map(tuple, dealt)),
        num_tokens=sum(sizes) + filler,
        num_unshared_tokens=sum(len(samples[i].token_ids) for i in chosen) + filler,
    )


def place(order: Sequence[int], sizes: Sequence[int], num_bins: int, cap: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = [0] * num_bins
    for f in order:
        b = min(range(num_bins), key=load.__getitem__)
        if load[b] + sizes[f] > cap:
            return None
        bins[b].append(f)
        load[b] += sizes[f]
    return bins


def cut_fragments(samples: Sequence[Sample], chosen: Sequence[int], cap: int, sharing: bool) -> list[Fragment]:
    """Samples alone, or groups cut so that a prefix and its suffixes fill at most half the cap and never exceed it."""
    if not sharing:
        return [(i,) for i in chosen]
    groups: dict[tuple[int, bytes], list[int]] = {}
    for i in chosen:  # the prompt's tokens are part of the key: only equal prefixes are shared
        prompt = samples[i].token_ids[: samples[i].num_prompt_tokens]
        groups.setdefault((samples[i].group, prompt.tobytes()), []).append(i)
    return [fragment for members in groups.values() for fragment in cut_group(samples, members, cap)]


def cut_group(samples: Sequence[Sample], members: Sequence[int], cap: int) -> list[Fragment]:
    prefix = samples[members[0]].num_prompt_tokens - 1
    if prefix < 1 or len(members) < 2:
        return [(i,) for i in members]
    fragments: list[list[int]] = []
    used = cap + 1
    for i in members:
        suffix = len(samples[i].token_ids) - prefix
        if used + suffix > max(cap // 2, prefix + suffix):
            fragments.append([])
            used = prefix
        fragments[-1].append(i)
        used += suffix
    return [tuple(fragment) for fragment in fragments]


def fragment_tokens(samples: Sequence[Sample], fragment: Fragment) -> int:
    """Tokens laid out: the prefix once, every suffix by itself."""
    shared = (len(fragment) - 1) * (samples[fragment[0]].num_prompt_tokens - 1)
    return sum(len(samples[i].token_ids) for i in fragment) - shared


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


def build(samples: Sequence[Sample], weights: Sequence[float], fragments: Sequence[Fragment]) -> MicroBatch:
    """Gather the tensors of one micro-batch. A bin without fragments becomes the smallest filler.

    One token, no loss.
    """
    segments = lay_out(samples, fragments)
    if not segments:
        return filler()
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
    )
    assert micro_batch.num_tokens == int(micro_batch.cu_seqlens[-1]) == len(micro_batch.temperatures)
    return micro_batch


def shift(values: npt.NDArray[Any], end: object) -> npt.NDArray[Any]:
    """Entry t takes what belongs to token t + 1, inside one segment; the last entry takes `end`."""
    return np.append(values[1:], np.array(end, dtype=values.dtype))


def filler() -> MicroBatch:
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
    )
