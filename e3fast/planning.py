"""Which sample goes into which micro-batch: a pure function of lengths, groups, ranks, cap and costs.

All ranks meet in every micro-batch, so a slot (the k-th micro-batch of all ranks) lasts as long as its costliest bin.
The plan sought has the smallest sum of slot maxima plus c0 for each slot, under a cap that no bin exceeds. The search
is bounded by counts, never by a clock: equal input gives an equal plan on every machine.

Letters: n samples, D ranks, K slots, P prompt and C completion tokens of a sample.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from e3fast.costs import alone_costs, attention_costs, check_coefficients, prefix_costs
from e3fast.placement import (
    Content,
    Items,
    Unit,
    cut_evenly,
    make_unit,
    place_best_fit,
    place_longest_first,
    slot_starts,
    stripe,
)
from e3fast.types import Coefficients, FloatArray, IntArray, PackingPlan

CUTS = (1, 2, 4)  # parts of the cap that a group's units may take: finer ones balance better and share less
MAX_PLANS = 3  # numbers of slots a candidate is packed into
MAX_FAILED = 3  # numbers of slots a candidate may fail at before best fit says how many do
CLOSER = 1 - 1e-12  # a plan counts as better beyond rounding: a tie keeps fewer slots and the earlier candidate


@dataclass(frozen=True, slots=True)
class Task:
    """What every candidate has to place."""

    num_samples: int
    num_ranks: int
    cap: int
    c0: float
    items: Items  # every sample alone
    closed: list[int]  # over the cap: each has a bin to itself


@dataclass(frozen=True, slots=True)
class Candidate:
    items: Items
    units: list[Unit]
    tokens: int  # with every prefix once: no packing has fewer
    cost: float  # the same


@dataclass(frozen=True, slots=True)
class Packed:
    time: float  # predicted for the step
    units: list[list[Unit]]  # of each bin
    costs: list[float]  # of each bin, without c0


NOTHING = Packed(0.0, [], [])


def plan_packing(
    lengths: Any,
    groups: Any,
    num_ranks: int,
    cap: int,
    coefficients: Coefficients,
    *,
    sharing: bool = True,
    hard_cap: int | None = None,
) -> PackingPlan:
    """Plan one optimiser step. `lengths` (n, 2) holds each sample's prompt and completion tokens; (n,) `groups`.

    Samples of one group may share their prompt. Those longer than `cap` have a bin to themselves, up to `hard_cap`.
    ValueError, before any work, for input that is not whole or that no plan can hold.
    """
    sizes, labels = check_samples(lengths, groups, sharing)
    check_limits(num_ranks, cap, hard_cap, sizes)
    check_coefficients(coefficients)
    costs = alone_costs(sizes, coefficients)
    total = sizes.sum(axis=1)
    opened = np.flatnonzero(total <= cap)
    task = Task(
        num_samples=len(sizes),
        num_ranks=num_ranks,
        cap=cap,
        c0=coefficients.c0,
        items=alone_items(total, costs),
        closed=np.flatnonzero(total > cap).tolist(),
    )
    candidates = [alone_candidate(task.items, opened.tolist())]
    if sharing:
        candidates += shared_candidates(shared_items(sizes, labels, opened, costs, coefficients), opened.tolist(), cap)
    best = search(candidates[0], task, None, by_best_fit=num_ranks == 1) if len(sizes) else NOTHING
    for candidate in candidates[1:]:
        best = search(candidate, task, best, by_best_fit=False)
    return make_plan(best, task, sizes, labels, coefficients)


def check_samples(lengths: Any, groups: Any, sharing: bool) -> tuple[IntArray, IntArray]:
    """Lengths (n, 2) and dense labels (n,) as integers."""
    sizes, given = whole_numbers("lengths", lengths), whole_numbers("groups", groups)
    sizes = sizes.reshape(0, 2) if sizes.size == 0 else sizes
    if sizes.ndim != 2 or sizes.shape[1] != 2 or given.shape != (len(sizes),):
        raise ValueError(f"lengths must be (n, 2) and groups (n,), got {sizes.shape} and {given.shape}")
    if sizes.size and sizes.min() < 1:
        raise ValueError(f"a sample needs a prompt and a completion token; lengths hold {int(sizes.min())}")
    _, first, labels = np.unique(given, return_index=True, return_inverse=True)
    unlike = np.flatnonzero(sizes[first[labels], 0] != sizes[:, 0])
    if sharing and len(unlike):
        raise ValueError(f"samples of group {int(given[unlike[0]])} have prompts of different lengths")
    return sizes, labels


def whole_numbers(name: str, values: Any) -> IntArray:
    array = np.asarray(values)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iuf" or not np.isfinite(array).all() or (array != np.floor(array)).any():
        raise ValueError(f"{name} must be whole numbers")
    return array.astype(np.int64)


def check_limits(num_ranks: int, cap: int, hard_cap: int | None, sizes: IntArray) -> None:
    for name, value, least in (("num_ranks", num_ranks, 1), ("cap", cap, 1), ("hard_cap", hard_cap, cap)):
        if value is not None and (not isinstance(value, int | np.integer) or value < least):
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    longest = int(sizes.sum(axis=1).max(initial=0))
    if longest > (hard_cap or cap):
        name = "hard_cap" if hard_cap and hard_cap > cap else "tokens_per_micro_batch"
        raise ValueError(f"a sample of {longest} tokens exceeds train.{name}={hard_cap or cap}")


def alone_items(total: IntArray, costs: FloatArray) -> Items:
    n = len(total)
    return Items(list(range(n)), total.tolist(), costs.tolist(), [0] * n, [0.0] * n)


def alone_candidate(items: Items, opened: Sequence[int]) -> Candidate:
    units = [Unit(items.costs[i], items.tokens[i], (i,)) for i in opened]
    return Candidate(items, units, sum(unit.tokens for unit in units), sum(unit.cost for unit in units))


def shared_items(
    sizes: IntArray, labels: IntArray, opened: IntArray, costs: FloatArray, coefficients: Coefficients
) -> Items:
    """Samples behind their prompt; those without a prefix or without a sibling stay loners."""
    n, num_siblings = len(sizes), np.bincount(labels[opened], minlength=len(labels))[labels]
    shared = (sizes[:, 0] > 1) & (num_siblings > 1)
    prefix = np.where(shared, sizes[:, 0] - 1, 0)
    saved = np.where(shared, prefix_costs(sizes[:, 0], coefficients), 0.0)
    return Items(
        keys=np.where(shared, labels, n + np.arange(n)).tolist(),
        tokens=(sizes.sum(axis=1) - prefix).tolist(),
        costs=(costs - saved).tolist(),
        prefix_tokens=prefix.tolist(),
        prefix_costs=saved.tolist(),
    )


def shared_candidates(items: Items, opened: Sequence[int], cap: int) -> list[Candidate]:
    """Groups as whole as the cap lets them be, and cut finer; none where nothing can be shared."""
    members: dict[int, list[int]] = {}
    for i in opened:
        members.setdefault(items.keys[i], []).append(i)
    if len(members) == len(opened):
        return []
    groups = [sorted(own, key=lambda i: -items.tokens[i]) for own in members.values()]
    whole = [make_unit(own, items) for own in groups]
    tokens, cost = sum(unit.tokens for unit in whole), sum(unit.cost for unit in whole)
    cuts = [[unit for own in groups for unit in cut_evenly(own, items, cap // part)] for part in CUTS]
    return [Candidate(items, units, tokens, cost) for units in cuts]


def search(candidate: Candidate, task: Task, best: Packed | None, by_best_fit: bool) -> Packed:
    """The better of `best` and of this candidate's plans, over rising numbers of slots.

    `by_best_fit`: pack by that alone, which needs the fewest bins; one rank has nothing to balance.
    """
    floor = (candidate.cost + sum(task.items.costs[i] for i in task.closed)) / task.num_ranks
    slots, fitted = fewest_slots(candidate.tokens, len(task.closed), task), None
    plans = failed = 0
    while plans < MAX_PLANS and not (best and hopeless(floor, slots, task, best)):
        content = None if by_best_fit else balance(candidate, task, slots)
        if content is None:
            fitted = fitted or place_best_fit(candidate.units, candidate.items, task.cap)
            num_empty = task.num_ranks * slots - len(task.closed) - len(fitted)
            content = [*fitted, *({} for _ in range(num_empty))] if num_empty >= 0 else None
        if content is not None:
            plans += 1
            packed = price(candidate.items, content, task, slots)
            best = packed if best is None or packed.time < best.time * CLOSER else best
        failed += content is None
        skip = content is None and (by_best_fit or failed >= MAX_FAILED)
        slots = -(-(len(fitted or ()) + len(task.closed)) // task.num_ranks) if skip else slots + 1
    assert best is not None
    return best


def hopeless(floor: float, slots: int, task: Task, best: Packed) -> bool:
    """Whether no packing into so many slots, or more, can beat the best: `floor` is an even share of the least cost."""
    return floor + task.c0 * slots >= best.time * CLOSER or task.num_ranks * slots > task.num_samples


def balance(candidate: Candidate, task: Task, slots: int) -> Content | None:
    """Longest first into the bins that closed samples leave: the first ones, as those cost the most."""
    costs = [task.items.costs[i] for i in task.closed] + [unit.cost for unit in candidate.units]
    starts = slot_starts(costs, task.num_ranks, slots)[len(task.closed) :]
    return place_longest_first(candidate.units, candidate.items, starts, task.cap)


def fewest_slots(tokens: int, num_closed: int, task: Task) -> int:
    return -(-(num_closed + -(-tokens // task.cap)) // task.num_ranks)


def price(items: Items, content: Content, task: Task, slots: int) -> Packed:
    """Predicted time of a packing, closed bins added: the sum of slot maxima and c0 a slot."""
    content = [*content, *({items.keys[i]: [i]} for i in task.closed)]
    units = [[make_unit(own, items) for own in bin_.values()] for bin_ in content]
    costs = [sum(unit.cost for unit in own) for own in units]
    time = sum(sorted(costs, reverse=True)[:: task.num_ranks]) + task.c0 * slots
    return Packed(time, units, costs)


def make_plan(packed: Packed, task: Task, sizes: IntArray, labels: IntArray, coefficients: Coefficients) -> PackingPlan:
    """The plan as every rank reads it; a bin without samples stands for one token of filler."""
    filler_cost = coefficients.a + float(attention_costs(np.array(1.0), coefficients))
    num_filler = sum(not own for own in packed.units)
    costs = [cost if own else filler_cost for own, cost in zip(packed.units, packed.costs, strict=True)]
    tokens = [sum(unit.tokens for unit in own) or 1 for own in packed.units]
    fragments = [tuple(sorted(tuple(sorted(unit.members)) for unit in own)) for own in packed.units]
    ranks = stripe(costs, task.num_ranks)
    bins = tuple(tuple(fragments[b] for b in rank) for rank in ranks)
    spent = [float(value) for value in astuple(coefficients)]
    described = (sizes.tolist(), labels.tolist(), task.num_ranks, task.cap, spent, bins)
    return PackingPlan(
        num_ranks=task.num_ranks,
        cap=task.cap,
        coefficients=coefficients,
        bins=bins,
        tokens=tuple(tuple(tokens[b] for b in rank) for rank in ranks),
        costs=tuple(tuple(costs[b] for b in rank) for rank in ranks),
        unshared_tokens=int(sizes.sum()) + num_filler,
        unshared_cost=sum(task.items.costs) + num_filler * filler_cost,
        digest=hashlib.sha256(repr(described).encode()).hexdigest()[:16],
    )


def plan_metrics(plan: PackingPlan) -> dict[str, float | int]:
    """How well a plan uses its ranks and its room. Shares are in [0, 1]; nan where there is nothing to share."""
    costs, tokens = np.array(plan.costs, dtype=np.float64), np.array(plan.tokens, dtype=np.int64)
    filled = np.array([[bool(own) for own in rank] for rank in plan.bins], dtype=bool)
    work, laid_out = float(costs[filled].sum()), int(tokens[filled].sum())
    closed = filled & (tokens > plan.cap)
    fewest = -(-(int(closed.sum()) + -(-int(tokens[filled & ~closed].sum()) // plan.cap)) // plan.num_ranks)
    lockstep = float(costs.max(axis=0).sum()) if plan.num_slots else 0.0
    barrier = float(costs.sum(axis=1).max()) if plan.num_slots else 0.0
    c0 = plan.coefficients.c0
    filler_cost = float(costs[~filled].sum())
    return {
        "num_micro_batches": plan.num_slots,
        "fewest_micro_batches": fewest,  # no packing of as many tokens has fewer
        "lockstep_efficiency": ratio(work, plan.num_ranks * lockstep),  # where ranks meet in every micro-batch
        "barrier_efficiency": ratio(work, plan.num_ranks * barrier),  # where they meet once a step
        "fill": ratio(laid_out, tokens.size * plan.cap),
        "step_over_perfect": ratio(lockstep + c0 * plan.num_slots, work / plan.num_ranks + c0 * fewest),
        "balance": ratio(float(costs.max(initial=0.0)) * costs.size, float(costs.sum())),  # heaviest bin / mean bin
        "prompt_work_saved": 1 - work / (plan.unshared_cost - filler_cost) if plan.num_slots else 0.0,
        "sharing_active": any(len(own) > 1 for rank in plan.bins for kept in rank for own in kept),
        "fragments": sum(len(kept) for rank in plan.bins for kept in rank),
        "filler": int((~filled).sum()),
        "own_bins": int(closed.sum()),  # of samples longer than the cap
        "max_bin_tokens": int(tokens.max(initial=0)),
    }


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def describe_plan(plan: PackingPlan) -> str:
    """A plan in one line for the console."""
    if not plan.num_slots:
        return "no micro-batches"
    m = plan_metrics(plan)
    return (
        f"{plan.num_slots} micro-batch{'es' if plan.num_slots > 1 else ''}, {100 * m['fill']:.0f} % full, "
        f"{100 * m['lockstep_efficiency']:.1f} % balanced, prompt work saved {100 * m['prompt_work_saved']:.0f} %"
    )
