"""Units into bins under a hard token cap, and bins into slots.

A unit is what is placed as a whole: members behind one prefix, cut apart only where no bin takes them together. Members
of one key that meet in a bin pay their prefix once. A slot is what all ranks do at a time: one bin of each.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

Content = list[dict[int, list[int]]]  # of each bin: key -> members


@dataclass(frozen=True, slots=True)
class Items:
    """What each item adds to a bin, by its index. Items of one key share a prefix; a loner's prefix is empty."""

    keys: list[int]
    tokens: list[int]  # behind the prefix
    costs: list[float]
    prefix_tokens: list[int]
    prefix_costs: list[float]


class Unit(NamedTuple):
    cost: float  # prefix included, as in tokens
    tokens: int
    members: Sequence[int]  # of one key, longest first


def make_unit(members: Sequence[int], items: Items) -> Unit:
    first = members[0]
    return Unit(
        cost=items.prefix_costs[first] + sum(items.costs[i] for i in members),
        tokens=items.prefix_tokens[first] + sum(items.tokens[i] for i in members),
        members=members,
    )


def cut_evenly(members: Sequence[int], items: Items, limit: int) -> list[Unit]:
    """Members of one key in few and alike units of at most `limit` tokens; one that is longer stays alone."""
    room = limit - items.prefix_tokens[members[0]]
    alone = [[i] for i in members if items.tokens[i] > room]
    rest = members[len(alone) :]
    num_pieces = -(-sum(items.tokens[i] for i in rest) // room) if rest else 0
    pieces: list[list[int]] = []
    while len(pieces) < num_pieces:
        pieces, heap = [[] for _ in range(num_pieces)], [(0, p) for p in range(num_pieces)]
        for i in rest:
            load, lightest = heap[0]
            pieces[lightest].append(i)
            heapreplace(heap, (load + items.tokens[i], lightest))
        if max(heap)[0] > room:
            num_pieces = min(num_pieces + 1 + num_pieces // 64, len(rest))
    return [make_unit(piece, items) for piece in alone + pieces]


class Bins:
    """Bins while they are filled. Loads may start below 0: such a bin is meant to hold more than others."""

    def __init__(self, items: Items, starts: Sequence[float], cap: int) -> None:
        self.items = items
        self.content: Content = [{} for _ in starts]
        self.rooms = np.full(len(starts), cap)
        self.loads = np.array(starts)

    def put(self, b: int, unit: Unit) -> None:
        first, own = unit.members[0], self.content[b]
        key, cost, tokens = self.items.keys[first], unit.cost, unit.tokens
        if key in own:
            own[key] += unit.members
            cost -= self.items.prefix_costs[first]
            tokens -= self.items.prefix_tokens[first]
        else:
            own[key] = list(unit.members)
        self.rooms[b] -= tokens
        self.loads[b] += cost

    def put_while_it_fits(self, queue: list[Unit]) -> None:
        """Units from the queue's end, each into the least loaded bin, until that one lacks the room."""
        heap = [(load, b) for b, load in enumerate(self.loads.tolist())]
        heapify(heap)
        while queue and queue[-1].tokens <= self.rooms[b := heap[0][1]]:
            self.put(b, queue.pop())
            heapreplace(heap, (self.loads.item(b), b))

    def least_loaded(self, tokens: int) -> int | None:
        """The least loaded of the bins with that much room."""
        b = int(np.where(self.rooms >= tokens, self.loads, np.inf).argmin())
        return b if self.rooms[b] >= tokens else None

    def put_part(self, unit: Unit) -> list[int] | None:
        """As much of a unit as the least loaded bin for its longest member takes; what is left, or None for no bin."""
        b = self.least_loaded(make_unit(unit.members[:1], self.items).tokens)
        if b is None:
            return None
        room = int(self.rooms[b]) - self.items.prefix_tokens[unit.members[0]]
        part: list[int] = []
        left: list[int] = []
        for i in unit.members:
            fits = self.items.tokens[i] <= room
            (part if fits else left).append(i)
            room -= self.items.tokens[i] if fits else 0
        self.put(b, make_unit(part, self.items))
        return left


def place_longest_first(units: Sequence[Unit], items: Items, starts: Sequence[float], cap: int) -> Content | None:
    """Costliest unit first, each into the least loaded bin with room; a unit that no bin takes is cut apart.

    `starts` holds a load for each bin. None where a member fits nowhere.
    """
    if not starts:
        return None if units else []
    bins = Bins(items, starts, cap)
    queue = sorted(units, key=lambda unit: -unit.cost)[::-1]
    bins.put_while_it_fits(queue)
    # A heap would now pop bins without room and push them back by the hundred: one vector operation a unit is faster.
    while queue:
        unit = queue.pop()
        b = bins.least_loaded(unit.tokens)
        if b is not None:
            bins.put(b, unit)
            continue
        left = bins.put_part(unit)
        if left is None:
            return None
        if left:
            insort(queue, make_unit(left, items), key=lambda unit: unit.cost)
    return bins.content


def place_best_fit(units: Sequence[Unit], items: Items, cap: int) -> Content:
    """Longest unit first, each into the fullest bin that takes it; as many bins as that needs."""
    content: Content = []
    rooms: list[tuple[int, int]] = []  # sorted
    for unit in sorted(units, key=lambda unit: -unit.tokens):
        at = bisect_left(rooms, (unit.tokens, -1))
        room, b = rooms.pop(at) if at < len(rooms) else (cap, len(content))
        if b == len(content):
            content.append({})
        content[b].setdefault(items.keys[unit.members[0]], []).extend(unit.members)
        insort(rooms, (room - unit.tokens, b))
    return content


def slot_starts(costs: Sequence[float], num_ranks: int, num_slots: int) -> list[float]:
    """Loads for bins to start from, such that a slot led by a giant is filled up to it.

    The costliest units set the levels of the first slots, as long as they exceed what would be an even share. Their
    slots last that long whatever else is in them, so their bins take more than the even share of the others.
    """
    ordered, left = sorted(costs, reverse=True), sum(costs)
    levels: list[float] = []
    for slot in range(num_slots):
        even = left / (num_ranks * (num_slots - slot))
        level = ordered[slot * num_ranks] if slot * num_ranks < len(ordered) else 0.0
        if level <= even:
            return [even - level for level in levels] + [0.0] * (num_ranks * num_slots - len(levels))
        levels += [level] * num_ranks
        left -= level * num_ranks
    return [-level for level in levels]


def stripe(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Bins of each rank, slot by slot: no other way to deal these bins has a smaller sum of slot maxima.

    Costliest slot first. Inside a slot, the rank with the most work so far takes the lightest bin.
    """
    order = sorted(range(len(costs)), key=lambda b: (-costs[b], b))
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for first in range(0, len(order), num_ranks):
        least = sorted(range(num_ranks), key=lambda r: (totals[r], r))
        for r, b in zip(least, order[first : first + num_ranks], strict=True):
            ranks[r].append(b)
            totals[r] += costs[b]
    return ranks
