"""Credit: groups of scored rollouts become samples with an advantage per token. Pure functions.

A group's failed rollouts take no part: they enter no mean and no deviation and are not trained on. Rewards that are all
equal, compared before any arithmetic, and groups of one give an advantage of exactly 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from e3fast.types import FloatArray, Group, Rollout, Sample

AdvantageKind = Literal["grpo", "dr_grpo", "rloo"]


def group_advantages(
    rewards: torch.Tensor, group_ids: torch.Tensor, *, kind: AdvantageKind = "grpo", eps: float = 1e-6
) -> torch.Tensor:
    """Advantage of each reward within its group: (N,) and (N,) to (N,), groups of any size, ids in any order.

    grpo (r - mean)/(sd + eps) with n - 1 in sd; dr_grpo r - mean (arXiv 2503.20783); rloo r minus the mean of the
    others (arXiv 2402.14740). ValueError for another kind or unequal lengths.
    """
    if kind not in ("grpo", "dr_grpo", "rloo"):
        raise ValueError(f"kind must be one of grpo, dr_grpo, rloo; got {kind!r}")
    if rewards.shape != group_ids.shape or rewards.ndim != 1:
        raise ValueError(f"rewards and group_ids must be (N,), got {tuple(rewards.shape)} and {tuple(group_ids.shape)}")
    out = torch.zeros_like(rewards)
    for members in split_groups(group_ids):
        own = rewards[members].double()
        out[members] = one_group(own, own, kind, eps).to(rewards.dtype)
    return out


def split_groups(group_ids: torch.Tensor) -> list[torch.Tensor]:
    """Indices of each group's members."""
    order = torch.argsort(group_ids, stable=True)
    _, sizes = torch.unique_consecutive(group_ids[order], return_counts=True)
    return list(order.split(sizes.tolist())) if order.numel() else []


def one_group(own: torch.Tensor, stats: torch.Tensor, kind: AdvantageKind, eps: float) -> torch.Tensor:
    """Advantages of `own` rewards against the mean and deviation of `stats`, fp64."""
    n = stats.numel()
    if n < 2 or bool(stats.max() == stats.min()):
        return torch.zeros_like(own)
    centred = own - stats.mean()
    if kind == "dr_grpo":
        return centred
    return centred * (n / (n - 1)) if kind == "rloo" else centred / (stats.std() + eps)


def make_samples(groups: Sequence[Group], kind: AdvantageKind) -> list[Sample]:
    """One sample a judged rollout, in group order."""
    samples = []
    for group in groups:
        judged = [i for i, score in enumerate(group.scores) if score.verdict != "failed"]
        if not judged:
            continue
        own = torch.tensor([group.scores[i].value for i in judged], dtype=torch.float64)
        stats = own if group.stats_rewards is None else torch.tensor(group.stats_rewards, dtype=torch.float64)
        advantages = one_group(own, stats, kind, 1e-6).tolist()
        samples += [make_sample(group, group.rollouts[i], a) for i, a in zip(judged, advantages, strict=True)]
    return samples


def left_over_samples(groups: Sequence[Group], kept: Sequence[Group]) -> list[Sample]:
    """Judged first rollouts that no kept group holds: they count in the step's entropy and in nothing else."""
    used = {id(rollout) for group in kept for rollout in group.rollouts}
    return [
        dataclasses.replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
        for group in groups
        if group.request.kind == "first"
        for rollout, score in zip(group.rollouts, group.scores, strict=True)
        if score.verdict != "failed" and id(rollout) not in used
        for sample in (make_sample(group, rollout, 0.0),)
    ]


def make_sample(group: Group, rollout: Rollout, advantage: float) -> Sample:
    prompt, completion = rollout.request.prompt.token_ids, rollout.token_ids
    asked = np.arange(len(prompt) + len(completion)) >= len(prompt)
    on_completion = lambda values: np.concatenate([np.zeros(len(prompt)), np.asarray(values, dtype=np.float64)])  # noqa: E731
    # A NaN log-prob from the engine costs its token, not the run: the token leaves loss and entropy, signal or not.
    usable = np.isfinite(on_completion(rollout.rollout_logprobs)) & asked
    spread: FloatArray = np.full(len(asked), rollout.request.temperature)
    return Sample(
        group=group.id,
        prompt_id=group.prompt.id,
        num_prompt_tokens=len(prompt),
        token_ids=np.array(prompt + completion, dtype=np.int64),
        loss_mask=usable,
        entropy_mask=usable & (rollout.request.kind == "first"),
        advantages=np.where(asked, advantage, 0.0),
        rollout_logprobs=on_completion(rollout.rollout_logprobs),
        temperatures=spread,
        route=rollout.request.route,
        draw=rollout.request.draw,
    )
