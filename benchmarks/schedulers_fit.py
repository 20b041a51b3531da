"""Schedulers of other trainers that fill micro-batches one sample at a time, restated in our words.

Each gives bins[rank][slot] of sample indices. `lengths` (n,) are tokens; `cap` those of a micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from e3fast.types import Coefficients, FloatArray, IntArray

Bins = list[list[list[int]]]  # [rank][slot] sample indices
Scheduler = Callable[[IntArray, int, int, Coefficients], Bins]


def true_costs(lengths: IntArray, coefficients: Coefficients) -> FloatArray:
    """FLOP of each sample alone."""
    return coefficients.a * lengths + coefficients.b * lengths.astype(np.float64) ** 2


def decreasing(lengths: IntArray) -> list[int]:
    return np.argsort(-lengths, kind="stable").tolist()


def tokens(own: Sequence[int], lengths: IntArray) -> int:
    return int(lengths[own].sum()) if len(own) else 0


def by_count(n: int, num_ranks: int) -> list[list[int]]:
    """Contiguous shares of the samples, equal in number."""
    ends = [n * rank // num_ranks for rank in range(num_ranks + 1)]
    return [list(range(a, b)) for a, b in pairwise(ends)]


def deal(bins: list[list[int]], num_ranks: int) -> Bins:
    """Round robin, in the order they were made."""
    filled = bins + [[] for _ in range(-len(bins) % num_ranks)]
    return [filled[rank::num_ranks] for rank in range(num_ranks)]


def first_fit(lengths: IntArray, order: Sequence[int], cap: int) -> list[list[int]]:
    bins: list[list[int]] = []
    rooms = np.zeros(len(order), dtype=np.int64)
    for i in order:
        found = np.flatnonzero(rooms[: len(bins)] >= lengths[i])
        at = int(found[0]) if len(found) else len(bins)
        if at == len(bins):
            bins.append([])
            rooms[at] = cap
        bins[at].append(i)
        rooms[at] -= lengths[i]
    return bins


def next_fit(lengths: IntArray, cap: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room = 0
    for i, length in enumerate(lengths.tolist()):
        if length > room:
            bins.append([])
            room = cap
        bins[-1].append(i)
        room -= length
    return bins


def least_loaded(lengths: IntArray, order: Sequence[int], cap: int) -> list[list[int]]:
    """Into the bin with the fewest tokens, or a new one where that has no room."""
    bins: list[list[int]] = []
    loads: list[tuple[int, int]] = []
    for i in order:
        length = int(lengths[i])
        if loads and loads[0][0] + length <= cap:
            load, at = loads[0]
            bins[at].append(i)
            heapq.heapreplace(loads, (load + length, at))
        else:
            bins.append([i])
            heapq.heappush(loads, (length, len(bins) - 1))
    return bins


def fewest_items(lengths: IntArray, order: Sequence[int], cap: int, least: int) -> list[list[int]]:
    """Into the bin with the fewest samples of those with room, the lighter one of two; `least` bins or more."""
    bins: list[list[int]] = [[] for _ in range(least)]
    rooms = [cap] * least
    for i in order:
        fitting = [b for b in range(len(bins)) if rooms[b] >= lengths[i]]
        if not fitting:
            fitting = [len(bins)]
            bins.append([])
            rooms.append(cap)
        at = min(fitting, key=lambda b: (len(bins[b]), -rooms[b]))
        bins[at].append(i)
        rooms[at] -= int(lengths[i])
    return bins


def split_to_multiple(bins: list[list[int]], costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """The costliest bin halved, its own costliest samples first to the lighter half, until the ranks share evenly."""
    bins = list(bins)
    while len(bins) % num_ranks:
        several = [b for b in range(len(bins)) if len(bins[b]) > 1]
        if not several:
            return bins + [[] for _ in range(-len(bins) % num_ranks)]
        at = max(several, key=lambda b: (sum(costs[i] for i in bins[b]), b))
        halves: tuple[list[int], list[int]] = ([], [])
        loads = [0.0, 0.0]
        for i in sorted(bins[at], key=lambda i: -costs[i]):
            lighter = int(loads[0] > loads[1])
            halves[lighter].append(i)
            loads[lighter] += costs[i]
        bins[at] = halves[0]
        bins.append(halves[1])
    return bins


def modified_first_fit_decreasing(lengths: IntArray, cap: int) -> list[list[int]]:
    """Johnson and Garey (1985), except that what is left goes longest first to the least loaded of further bins.

    A sample above half the cap has a bin, with one above a third where it fits, else with two above a sixth; bins are
    then filled up. The further bins come out lightest first.
    """
    order = decreasing(lengths)
    kind = lambda low, high: [i for i in order if low < lengths[i] <= high]  # noqa: E731
    medium, small = kind(cap / 3, cap / 2), kind(cap / 6, cap / 3)
    bins = [[i] for i in kind(cap / 2, cap)]
    room = lambda own: cap - tokens(own, lengths)  # noqa: E731
    for own in bins:
        take(own, medium, room(own), lengths)
    for own in reversed(bins):
        if len(own) == 1 and len(small) > 1 and tokens(small[-2:], lengths) <= room(own):
            own.append(small.pop())
            take(own, small, room(own), lengths)
    rest = sorted([*medium, *small, *kind(0, cap / 6)], key=lambda i: -lengths[i])
    for own in bins:
        while take(own, rest, room(own), lengths):
            pass
    return bins + sorted(least_loaded(lengths, rest, cap), key=lambda own: tokens(own, lengths))


def take(own: list[int], source: list[int], room: int, lengths: IntArray) -> bool:
    """Move the longest sample that fits; False where none does. `source` is longest first."""
    if not source or lengths[source[-1]] > room:
        return False
    at = next(at for at, i in enumerate(source) if lengths[i] <= room)
    own.append(source.pop(at))
    return True


def move_to_multiple(bins: list[list[int]], num_ranks: int) -> list[list[int]]:
    """New bins until the ranks share evenly, a sample in each, from the bins with the most samples."""
    bins = [list(own) for own in bins]
    sources = iter(sorted(bins, key=lambda own: -len(own)))
    source = next(sources, [])
    for _ in range(-len(bins) % num_ranks):
        while source and len(source) < 2:
            source = next(sources, [])
        bins.append([source.pop()] if source else [])
    return bins


def slime(lengths: IntArray, num_ranks: int, cap: int, coefficients: Coefficients) -> Bins:
    """First fit over all samples; the bins with the most tokens split to a multiple of the ranks; round robin."""
    return deal(slime_bins(lengths, num_ranks, cap), num_ranks)


def slime_bins(lengths: IntArray, num_ranks: int, cap: int) -> list[list[int]]:
    return split_to_multiple(first_fit(lengths, range(len(lengths)), cap), lengths.tolist(), num_ranks)


def nemo_rl(lengths: IntArray, num_ranks: int, cap: int, coefficients: Coefficients) -> Bins:
    """Modified first-fit decreasing, bins to a multiple of the ranks, dealt round robin in the packer's order.

    Sorting each rank's bins by tokens, an option there, gains half a point on the 8k trace and loses 16 on the 32k one.
    """
    return deal(move_to_multiple(modified_first_fit_decreasing(lengths, cap), num_ranks), num_ranks)


def skyrl(lengths: IntArray, num_ranks: int, cap: int, coefficients: Coefficients) -> Bins:
    """Ranks by count, in order; inside, longest first into the least loaded micro-batch, or a new one."""
    ranks = by_count(len(lengths), num_ranks)
    return [least_loaded(lengths, sorted(own, key=lambda i: -lengths[i]), cap) for own in ranks]


def areal(lengths: IntArray, num_ranks: int, cap: int, coefficients: Coefficients) -> Bins:
    """Longest first to the fewest samples, over ranks without a cap and inside them; again until all have as many."""
    ranks = fewest_items(lengths, decreasing(lengths), int(lengths.sum()), num_ranks)
    slots = 1
    while True:
        bins = [fewest_items(lengths, own, cap, slots) for own in ranks]
        if len(set(map(len, bins))) == 1:
            return bins
        slots = max(map(len, bins))


def trl_async(lengths: IntArray, num_ranks: int, cap: int, coefficients: Coefficients) -> Bins:
    """As they arrive, into the open row (one a rank) with room and the least sum of L^2; else all rows close."""
    closed: list[list[list[int]]] = []  # [slot][rank]
    rows, squares, rooms = open_rows(num_ranks, cap)
    for i, length in enumerate(lengths.tolist()):
        fitting = [r for r in range(num_ranks) if rooms[r] >= length]
        if not fitting:
            closed.append(rows)
            rows, squares, rooms = open_rows(num_ranks, cap)
            fitting = list(range(num_ranks))
        r = min(fitting, key=squares.__getitem__)
        rows[r].append(i)
        squares[r] += length * length
        rooms[r] -= length
    return [list(own) for own in zip(*closed, rows, strict=True)]


def open_rows(num_ranks: int, cap: int) -> tuple[list[list[int]], list[int], list[int]]:
    return [[] for _ in range(num_ranks)], [0] * num_ranks, [cap] * num_ranks


def torchtitan(lengths: IntArray, num_ranks: int, cap: int, coefficients: Coefficients) -> Bins:
    """Next fit, rows dealt round robin."""
    return deal(next_fit(lengths, cap), num_ranks)
