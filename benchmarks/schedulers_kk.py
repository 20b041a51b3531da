"""Schedulers of other trainers built on the largest differencing method (Karmarkar and Karp), restated in our words."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from benchmarks.schedulers_fit import (
    Bins,
    decreasing,
    first_fit,
    slime_bins,
    split_to_multiple,
    tokens,
    true_costs,
)
from e3fast.types import Coefficients, IntArray

Part = tuple[float, list[int]]  # its cost and its items


def karmarkar_karp(costs: Sequence[float], num_parts: int, equal: bool) -> list[list[int]]:
    """Largest differencing: parts of nearly equal cost, heaviest first; `equal`: of equal counts.

    A partial solution holds an item, or `num_parts` of neighbouring size; the two whose parts differ most are merged,
    heaviest with lightest. Counts that cannot be equal differ by one.
    """
    order = sorted(range(len(costs)), key=lambda i: costs[i])
    order = [-1] * (-len(costs) % num_parts) + order if equal else order
    size = num_parts if equal else 1
    heap = [start(order[first : first + size], costs, num_parts, first) for first in range(0, len(order), size)]
    heapq.heapify(heap)
    number = len(order)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1  # of two alike the older one goes first
    return [items for _, items in heap[0][2]] if heap else [[] for _ in range(num_parts)]


def start(items: Sequence[int], costs: Sequence[float], num_parts: int, number: int) -> tuple[float, int, list[Part]]:
    """A partial solution with an item to a part, the heaviest first; -1 stands for no item."""
    parts: list[Part] = [(costs[i], [i]) if i >= 0 else (0.0, []) for i in reversed(items)]
    parts += [(0.0, [])] * (num_parts - len(parts))
    return parts[-1][0] - parts[0][0], number, parts


def split_rank(own: Sequence[int], costs: Sequence[float], slots: int) -> list[list[int]]:
    """A rank's samples into micro-batches, the heaviest first."""
    return [[own[i] for i in part] for part in karmarkar_karp([costs[i] for i in own], slots, equal=False)]


def verl_bins(lengths: IntArray, num_ranks: int, cap: int, strict: bool) -> Bins:
    """Differencing on 24576 L + L^2: into ranks of equal counts, then inside each rank.

    Into as many micro-batches as the fullest rank's tokens need; `strict`: one more until none is over the cap.
    """
    costs = (24_576 * lengths + lengths**2).tolist()
    ranks = karmarkar_karp(costs, num_ranks, equal=True)
    slots = max(-(-tokens(own, lengths) // cap) for own in ranks)
    while True:
        bins = [split_rank(own, costs, slots) for own in ranks]
        if not strict or all(tokens(kept, lengths) <= cap for own in bins for kept in own):
            return bins
        slots += 1


def verl(lengths: IntArray, num_ranks: int, cap: int, coefficients: Coefficients) -> Bins:
    return verl_bins(lengths, num_ranks, cap, strict=False)


def verl_strict(lengths: IntArray, num_ranks: int, cap: int, coefficients: Coefficients) -> Bins:
    return verl_bins(lengths, num_ranks, cap, strict=True)


def openrlhf(lengths: IntArray, num_ranks: int, cap: int, coefficients: Coefficients) -> Bins:
    """Differencing on length: into ranks of equal counts, then inside each; first fit, longest first, says how many.

    Without its dynamic batches, which is where the ranks are balanced, it has ranks by count: 52 to 93 % in lockstep.
    """
    costs = lengths.tolist()
    ranks = [sorted(own, key=lambda i: -costs[i]) for own in karmarkar_karp(costs, num_ranks, equal=True)]
    slots = max(len(first_fit(lengths, own, cap)) for own in ranks)
    return [split_rank(own, costs, slots) for own in ranks]


def slime_kk(lengths: IntArray, num_ranks: int, cap: int, coefficients: Coefficients) -> Bins:
    """First-fit bins, split to a multiple of the ranks; differencing on their FLOP; inside a rank in the order made.

    That order is what it loses by: it balances what a rank does in all, and not what meets in a slot.
    """
    bins, costs = slime_bins(lengths, num_ranks, cap), true_costs(lengths, coefficients)
    parts = karmarkar_karp([float(costs[own].sum()) for own in bins], num_ranks, equal=True)
    return [[bins[b] for b in sorted(part)] for part in parts]


def prime_rl(lengths: IntArray, num_ranks: int, cap: int, coefficients: Coefficients) -> Bins:
    """First-fit decreasing, split to a multiple of the ranks, differencing in equal counts, then swaps.

    It tries every pair of bins; here only those of the ranks that set the score, which finds the same and far sooner.
    """
    costs = [int(coefficients.a) * length + int(coefficients.b) * length * length for length in lengths.tolist()]
    bins = split_to_multiple(first_fit(lengths, decreasing(lengths), cap), costs, num_ranks)
    weights = np.array([sum(costs[i] for i in own) for own in bins], dtype=np.int64)
    parts = np.array([sorted(part) for part in karmarkar_karp(weights.tolist(), num_ranks, equal=True)])
    while swap := best_swap(weights[parts]):
        one, other = swap
        parts[one], parts[other] = parts[other], parts[one]
    return [[bins[b] for b in part] for part in parts.tolist()]


Place = tuple[int, int]  # rank, slot


def best_swap(work: IntArray) -> tuple[Place, Place] | None:
    """The swap of two bins that lowers (largest total of a rank, largest less smallest) most; None where none does.

    `work` (ranks, slots). Only a swap with the rank of the largest or of the smallest total changes the score.
    """
    loads = work.sum(axis=1)
    score, found = (int(loads.max()), int(loads.max() - loads.min())), None
    for one in (int(loads.argmax()), int(loads.argmin())):
        gain = work[:, None, :] - work[one][None, :, None]  # (ranks, slots of `one`, slots) of `one`
        mine, theirs = loads[one] + gain, loads[:, None, None] - gain
        high = np.maximum(np.maximum(mine, theirs), largest_other(loads, one)[:, None, None])
        low = np.minimum(np.minimum(mine, theirs), -largest_other(-loads, one)[:, None, None])
        high[one] = high.max()  # with itself there is nothing to swap
        spread = np.where(high == high.min(), high - low, high.max())
        rank, own, other = (int(x) for x in np.unravel_index(int(spread.argmin()), spread.shape))
        new = (int(high[rank, own, other]), int(high[rank, own, other] - low[rank, own, other]))
        if new < score:
            score, found = new, ((one, own), (rank, other))
    return found


def largest_other(loads: IntArray, one: int) -> IntArray:
    """(ranks,) for each rank the largest total of those that are neither it nor `one`; of two ranks there are none."""
    rest = loads.copy()
    rest[one] = loads.min() * 2 - loads.max()
    first = int(rest.argmax())
    others = np.full(len(loads), rest[first])
    rest[first] = rest[one]
    others[first] = rest.max()
    return others
