"""Arithmetic of rollout budgets: ranks, bounds and the allocation of one batch. Pure functions.

Letters: B requests of one batch, N_seen prompts ranked. A weight w is 2 * N_seen * k, an integer for every tie rule,
so the fixed allocation runs on integers and exact fractions and conserves its total by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt


def bounds(phase: int, group: int, min_group: int, max_group: int, widen: int) -> tuple[int, int]:
    """Smallest and largest group of a phase (0-based); phase 0 is uniform."""
    return max(group - phase * widen, min_group), min(group + phase * widen, max_group)


def rank_weights(rates: npt.NDArray[np.float64], ties: str, order: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Weight 2 * position of each prompt, easiest first.

    `order` breaks ties ("mean" gives a class its mean position).
    """
    ranked = np.lexsort((order, -rates))
    weights = np.empty(len(rates), dtype=np.int64)
    weights[ranked] = 2 * np.arange(len(rates))
    if ties == "mean":
        for rate in np.unique(rates):
            members = rates == rate
            weights[members] = weights[members].sum() // members.sum()
    return weights


def allocate_faithful(k: Sequence[float | None], total: int, low: int, high: int) -> list[int]:
    """The published algorithm with its artefacts: uncapped proportional step, 1e-8 in the denominator, float64."""
    known = [0.0 if x is None else x for x in k]
    norm = sum(known)
    shares = [x / (norm + 1e-8) if norm else 0.0 for x in known]
    counts = [int(np.floor(low + (total - len(k) * low) * share)) for share in shares]
    deficit = total - sum(counts)
    for i in sorted(range(len(k)), key=lambda i: -known[i]):
        if deficit <= 0:
            break
        if counts[i] < high:
            extra = min(deficit, high - counts[i])
            counts[i] += extra
            deficit -= extra
    return counts


def allocate_fixed(
    weights: Sequence[int], total: int, low: int, high: int, leftover: str, order: Sequence[float]
) -> list[int]:
    """Integer allocation in [low, high] with an exact total, non-decreasing in weight.

    Equal weights are treated alike.
    """
    share = capped_shares(weights, total - len(weights) * low, high - low)
    counts = [low + int(x) for x in share]
    left = total - sum(counts)
    if leftover == "hardest":
        raise_hardest(counts, left, weights, high, order)
    else:
        part = [x - int(x) for x in share]
        open_ = [i for i in range(len(counts)) if counts[i] < high]
        for i in sorted(open_, key=lambda i: (-part[i], -weights[i], order[i]))[:left]:
            counts[i] += 1
    return counts


def capped_shares(weights: Sequence[int], rest: int, room: int) -> list[Fraction]:
    """`rest` split in proportion to weight, none above `room`.

    Whoever saturates leaves, the others share what remains.
    """
    share = [Fraction(0)] * len(weights)
    free = list(range(len(weights)))
    while free:
        norm = sum(weights[i] for i in free)
        for i in free:
            share[i] = Fraction(rest * weights[i], norm) if norm else Fraction(rest, len(free))
        full = [i for i in free if share[i] >= room]
        if not full:
            break
        for i in full:
            share[i] = Fraction(room)
        rest -= len(full) * room
        free = [i for i in free if i not in set(full)]
    return share


def raise_hardest(counts: list[int], left: int, weights: Sequence[int], high: int, order: Sequence[float]) -> None:
    """Hand out what rounding left: class by class, hardest first, always to the class's lowest member."""
    for weight in sorted(set(weights), reverse=True):
        members = [i for i in range(len(counts)) if weights[i] == weight]
        while left and (below := [i for i in members if counts[i] < high]):
            counts[min(below, key=lambda i: (counts[i], order[i]))] += 1
            left -= 1


def allocate_greedy(
    gains: Sequence[Sequence[float]], rates: Sequence[float], total: int, low: int, high: int, order: Sequence[float]
) -> list[int]:
    """Start at low, give one rollout at a time to the largest gain; `gains[i][n - low]` is the gain of n -> n + 1."""
    counts = [low] * len(gains)
    for _ in range(total - low * len(gains)):
        below = [i for i in range(len(gains)) if counts[i] < high]
        best = min(below, key=lambda i: (-gains[i][counts[i] - low], rates[i], order[i]))
        counts[best] += 1
    return counts


def variance_gain(rate: float, n: int, form: str) -> float:
    """Fall of the gradient's variance by one more rollout (VIP, arXiv 2602.01601)."""
    a = 4 * rate * (1 - rate)
    return a / (n * (n - 1)) if form == "rloo" else a * ((n - 1) / n**2 - n / (n + 1) ** 2)


def knapsack_gain(rate: float, n: int) -> float:
    """Rise of the chance of a mixed group, times its worth (arXiv 2509.25849)."""
    fail = 1 - rate
    return (rate**n * fail + fail**n * rate) * rate * fail**2


def informative(rate: float, n: int) -> float:
    """Chance that a group of n is mixed."""
    return 1 - rate**n - (1 - rate) ** n


def allocate_sera(
    rates: Sequence[float], total: int, low: int, high: int, order: Sequence[float]
) -> tuple[list[int], float]:
    """Equal chance of a second success for all (SERA, arXiv 2609.36552); returns the counts and S of its solution."""
    active = [i for i, rate in enumerate(rates) if informative(rate, high) >= 0.05]
    spare = total - low * (len(rates) - len(active))
    if not low * len(active) <= spare <= high * len(active):
        active, spare = list(range(len(rates))), total
    hazard = [-np.log1p(-min(rates[i], 1 - 1e-12)) for i in active]
    size = lambda s: np.clip(1 + s / np.maximum(hazard, 1e-300), low, high)  # noqa: E731
    left, right = -50.0, 50.0
    for _ in range(200):
        middle = (left + right) / 2
        left, right = (left, middle) if size(np.exp(middle)).sum() > spare else (middle, right)
    s = float(np.exp((left + right) / 2))
    counts = [low] * len(rates)
    for i, n in zip(active, size(s), strict=True):
        counts[i] = int(np.floor(n + 1e-9))
    target = 1 - np.exp(-s)
    miss = lambda i, n: (1 - (1 - rates[i]) ** (n - 1) - target) ** 2  # noqa: E731
    for _ in range(total - sum(counts)):
        below = [i for i in active if counts[i] < high]
        best = min(below, key=lambda i: (miss(i, counts[i] + 1) - miss(i, counts[i]), order[i]))
        counts[best] += 1
    return counts, s
