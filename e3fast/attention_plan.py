"""Which tokens of a packed row see which: blocks of like segments, and the tiles of their queries.

A segment's keys are its prefix's tokens, then its own, so key column j stands at position j of the sequence, and a
query of position i sees columns (i - window, i]. A block holds segments of like lengths; padding repeats the segment's
own last token, never a neighbour's, so a query can only ever meet its own segment and its own prefix.

Letters: T packed tokens, N segments, B segments of a block, U queries and S key columns of its longest.
"""

from __future__ import annotations

import functools
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 128  # queries whose scores are held at once; 64 to 256 are as fast on a CPU (LOG.md)
MAX_COLUMNS = 2**15  # key columns of a block: they are gathered, so memory follows them and not the tokens laid out
SPARE = 4096  # scores a segment may waste on padding: about what a product's call costs


class Block(NamedTuple):
    """B segments side by side; row r has `prefix[r]` prefix tokens and `own[r]` of its own."""

    prefix: Tensor  # (B,) on the host, as is the next
    own: Tensor  # (B,)
    query_index: Tensor  # (B, U) positions in the packed row
    key_index: Tensor  # (B, S)
    real: Tensor  # (R,) entries of the flattened (B, U) that are no padding


class Tile(NamedTuple):
    """Queries [first, last) of a block's rows against key columns [start, stop), from `masked` on under a mask."""

    first: int
    last: int
    start: int
    masked: int
    stop: int
    hidden: Tensor  # (B, 1, 1, last - first, stop - masked) bool, True = not seen


class AttentionPlan:
    """Segments of one packed row: as blocks and tiles, and as variable-length kernels ask for them."""

    def __init__(self, cu_seqlens: Tensor, prefix_of: Tensor) -> None:
        self.device = cu_seqlens.device
        ends = cu_seqlens.tolist()
        self.queries = [torch.arange(a, b) for a, b in pairwise(ends)]
        self.keys = [
            torch.cat([self.queries[p], own]) if p >= 0 else own
            for p, own in zip(prefix_of.tolist(), self.queries, strict=True)
        ]
        self.num_columns = list(map(len, self.keys))
        self.longest_own, self.longest = max(map(len, self.queries), default=0), max(self.num_columns, default=0)
        self.tiles_of: dict[int, tuple[tuple[Tile, ...], ...]] = {}

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        own = list(map(len, self.queries))
        return tuple(self.block(members) for members in alike(own, self.num_columns))

    def block(self, members: list[int]) -> Block:
        queries, keys = [self.queries[n] for n in members], [self.keys[n] for n in members]
        u, s = max(map(len, queries)), max(map(len, keys))
        own = torch.tensor(list(map(len, queries)))
        return Block(
            prefix=torch.tensor(list(map(len, keys))) - own,
            own=own,
            query_index=torch.stack([pad(index, u) for index in queries]).to(self.device),
            key_index=torch.stack([pad(index, s) for index in keys]).to(self.device),
            real=torch.nonzero((torch.arange(u) < own[:, None]).flatten())[:, 0].to(self.device),
        )

    def tiles(self, window: int) -> tuple[tuple[Tile, ...], ...]:
        """Tiles of each block; every layer with that window (0 = none) uses the same."""
        if window not in self.tiles_of:
            self.tiles_of[window] = tuple(
                tuple(tile._replace(hidden=tile.hidden.to(self.device)) for tile in tiles_of(block, window))
                for block in self.blocks
            )
        return self.tiles_of[window]

    @functools.cached_property
    def key_index(self) -> Tensor:
        """Packed positions of every segment's keys, segment by segment."""
        return torch.cat(self.keys).to(self.device)

    @functools.cached_property
    def cu_queries(self) -> Tensor:
        """(N+1,) int32."""
        return self.ends(list(map(len, self.queries)))

    @functools.cached_property
    def cu_keys(self) -> Tensor:
        """(N+1,) int32."""
        return self.ends(self.num_columns)

    def ends(self, lengths: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)


def alike(own: list[int], num_columns: list[int]) -> list[list[int]]:
    """Segments in runs of like size: padding costs a run at most a third, and each segment at most SPARE scores."""
    runs: list[list[int]] = []
    area = widest = deepest = 0
    for n in sorted(range(len(own)), key=lambda n: (-own[n], -num_columns[n])):
        scores = own[n] * num_columns[n]
        widest, deepest, area = max(widest, num_columns[n]), max(deepest, own[n]), area + scores
        size = len(runs[-1]) if runs else 0
        wasted = widest * deepest * (size + 1) - area
        if not runs or wasted > min(area / 3, SPARE * size) or widest * (size + 1) > MAX_COLUMNS:
            runs.append([])
            widest, deepest, area = num_columns[n], own[n], scores
        runs[-1].append(n)
    return runs


def pad(index: Tensor, length: int) -> Tensor:
    return F.pad(index, (0, length - len(index)), value=int(index[-1]))


def tiles_of(block: Block, window: int) -> list[Tile]:
    """Only the columns that some row does not see are masked: with no window, those past the first query's own."""
    tiles, num_queries = [], block.query_index.shape[1]
    for first in range(0, num_queries, TILE):
        last = min(first + TILE, num_queries)
        offset = torch.arange(first, last)
        position = block.prefix[:, None] + torch.minimum(offset[None, :], block.own[:, None] - 1)  # (B, m)
        start = max(0, int(position.min()) - window + 1) if window else 0
        masked = start if window else int(position[:, 0].min()) + 1
        stop = int(position.max()) + 1
        column = torch.arange(masked, stop)
        hidden = column > position[:, :, None]
        if window:
            hidden |= column <= position[:, :, None] - window
        tiles.append(Tile(first, last, start, masked, stop, hidden[:, None, None]))
    return tiles
