"""The arithmetic of choosing prompts by how likely their next group is mixed. Pure functions of arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from e3fast.types import BoolArray, FloatArray, IntArray

CHUNK = 256  # rows whose cosines to every observed prompt are in memory together
Float32Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


class Neighbours(NamedTuple):
    """What each prompt's neighbours say of it: the sum of their weights, and their mean pass rate (0 without any)."""

    weight: FloatArray  # (n,)
    rate: FloatArray  # (n,)


def no_neighbours(num_prompts: int) -> Neighbours:
    return Neighbours(np.zeros(num_prompts), np.zeros(num_prompts))


def informative(rate: FloatArray, size: int) -> FloatArray:
    """Chance that a group of `size` at this pass rate is mixed: 1 - p^n - (1-p)^n."""
    return 1 - rate**size - (1 - rate) ** size


def expected_informative(alpha: FloatArray, beta: FloatArray, size: int) -> FloatArray:
    """E[informative(p, size)] under p ~ Beta(alpha, beta), exactly."""
    right, wrong = np.ones_like(alpha), np.ones_like(alpha)
    for k in range(size):
        right = right * (alpha + k) / (alpha + beta + k)
        wrong = wrong * (beta + k) / (alpha + beta + k)
    return 1 - right - wrong


def rested(ages: IntArray, cooldown: float) -> FloatArray:
    """How far a prompt has come back after its last draw."""
    return 1 - np.exp(-ages / cooldown)


def directions(latents: np.ndarray, mean: Float32Array) -> Float32Array:
    """Unit vectors of latents (n, d) less the pool's mean (d,): raw ones are nearly parallel."""
    centred = latents.astype(np.float32) - mean
    norms = np.linalg.norm(centred, axis=1, keepdims=True)
    return centred / np.maximum(norms, np.float32(1e-30))


def weigh_neighbours(
    cosines: FloatArray, rates: FloatArray, ages: FloatArray, power: float, decay: float
) -> Neighbours:
    """Weights max(0, cos)^power decay^age over the last axis; every array is (n, k)."""
    weights = np.maximum(cosines, 0) ** power * decay**ages
    total = weights.sum(axis=-1)
    mean = np.divide((weights * rates).sum(axis=-1), total, out=np.zeros_like(total), where=total > 0)
    return Neighbours(total, mean)


def ask_neighbours(
    own: Float32Array,
    others: Float32Array,
    itself: IntArray,
    rates: FloatArray,
    ages: FloatArray,
    count: int,
    *,
    power: float,
    decay: float,
) -> Neighbours:
    """What the `count` nearest of `others` (m, d) say of each of `own` (n, d), all unit vectors.

    `itself` (n,): the place of a prompt among the others, which is no neighbour of its own; -1 where it is not there.
    """
    if not len(others) or not len(own):
        return no_neighbours(len(own))
    parts = []
    for start in range(0, len(own), CHUNK):
        cosines = own[start : start + CHUNK] @ others.T
        place = itself[start : start + CHUNK]
        known = np.flatnonzero(place >= 0)
        cosines[known, place[known]] = -1
        nearest = nearest_of(cosines, count)
        near = np.take_along_axis(cosines, nearest, axis=1).astype(np.float64)
        parts.append(weigh_neighbours(near, rates[nearest], ages[nearest], power, decay))
    return Neighbours(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def nearest_of(cosines: Float32Array, count: int) -> IntArray:
    """Columns of the `count` largest entries of each row."""
    if count >= cosines.shape[1]:
        return np.broadcast_to(np.arange(cosines.shape[1]), cosines.shape)
    return np.argpartition(-cosines, count - 1, axis=1)[:, :count]


def explore_beta(
    near: Neighbours, base_rate: float, a: FloatArray, b: FloatArray, size: int, max_pseudo: float, gate: float
) -> tuple[FloatArray, FloatArray]:
    """Beta of a prompt's pass rate: its neighbours as pseudo-rollouts, one of the base rate, half its own counts."""
    pseudo = np.minimum(max_pseudo, size * near.weight) * gate
    alpha = pseudo * near.rate + base_rate + 0.2 + a / 2
    beta = pseudo * (1 - near.rate) + 1 - base_rate + 0.2 + b / 2
    return alpha, beta


def mixed_rates(outcomes: IntArray) -> tuple[float, float]:
    """Share of mixed groups of each portfolio, over (steps, portfolio, (groups, mixed)), with one of two before any."""
    groups, mixed = outcomes.sum(axis=0).T
    exploit, explore = (1 + mixed) / (2 + groups)
    return float(exploit), float(explore)


def split(need: int, share: float, num_exploit: int, num_explore: int) -> tuple[int, int]:
    """How many of `need` prompts each portfolio gives; one that runs short is filled from the other."""
    exploit = min(round(share * need), num_exploit)
    explore = min(need - exploit, num_explore)
    return min(need - explore, num_exploit), explore


def top(scores: FloatArray, count: int) -> IntArray:
    """Places of the `count` largest scores, the first of equal ones."""
    return np.argsort(-scores, kind="stable")[:count]


def ranks(values: FloatArray) -> FloatArray:
    """Ranks from 1, equal values sharing their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def spearman(x: FloatArray, y: FloatArray) -> float:
    """Rank correlation; 0 where either is constant."""
    a, b = (ranks(values) - (len(values) + 1) / 2 for values in (x, y))
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else 0.0


def gate_of(predicted: FloatArray, found: FloatArray, least: int) -> float:
    """How far neighbours are believed: 0 up to a rank correlation of .1 or with too few pairs, 1 from .3."""
    if len(predicted) < least:
        return 0.0
    return min(max((spearman(predicted, found) - 0.1) / 0.2, 0.0), 1.0)


def is_mixed(rates: FloatArray) -> BoolArray:
    return (rates > 0) & (rates < 1)
