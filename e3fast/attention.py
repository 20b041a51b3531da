"""Attention for packed rows, and for decoding, behind transformers' attention interface under the name "e3fast".

A packed row's segments are gathered into small padded blocks of like lengths, so a query can only ever meet its own
segment's tokens and those of its shared prefix: padding repeats the segment's own tokens, never a neighbour's.
Without a plan the call is ordinary: one-token decoding runs on the key-value heads directly, all else is
transformers' SDPA.

Letters: T packed tokens, B blocks' rows, U queries and S keys of a row, G query heads per key-value head, D head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL_BLOCK = 256 * 256  # U x S up to which explicit products beat SDPA on a CPU


class Block(NamedTuple):
    query_index: Tensor  # (B, U) positions in the packed row
    key_index: Tensor  # (B, S)
    mask: Tensor  # (B, 1, U, S) bool, True = visible


class AttentionPlan(NamedTuple):
    blocks: tuple[Block, ...]
    out_index: Tensor  # (T,) where each packed token stands among the blocks' queries laid end to end


def plan_attention(cu_seqlens: Tensor, prefix_of: Tensor) -> AttentionPlan:
    """Blocks of segments `cu_seqlens` (N+1,): each sees itself causally and its `prefix_of` (N,; -1 = none) whole."""
    starts, stops = cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()
    spans = [
        (stops[p] - starts[p] if p >= 0 else 0, b - a)
        for a, b, p in zip(starts, stops, prefix_of.tolist(), strict=True)
    ]
    order = sorted(range(len(spans)), key=lambda n: (-spans[n][1], -spans[n][0]))
    blocks, out_index, offset = [], torch.empty(stops[-1] if stops else 0, dtype=torch.int64), 0
    for members in alike(order, spans):
        u, s = max(spans[n][1] for n in members), max(sum(spans[n]) for n in members)
        queries, keys, visible = [], [], []
        for row, n in enumerate(members):
            prefix, own = spans[n]
            home = starts[int(prefix_of[n])] if prefix else 0
            mine = torch.arange(starts[n], stops[n])
            queries.append(pad(mine, u))
            keys.append(pad(torch.cat([torch.arange(home, home + prefix), mine]), s))
            visible.append(causal(prefix, own, u, s))
            out_index[mine] = offset + row * u + torch.arange(own)
        blocks.append(Block(torch.stack(queries), torch.stack(keys), torch.stack(visible)[:, None]))
        offset += len(members) * u
    device = cu_seqlens.device
    return AttentionPlan(tuple(Block(*(x.to(device) for x in block)) for block in blocks), out_index.to(device))


def alike(order: list[int], spans: list[tuple[int, int]]) -> list[list[int]]:
    """Segments in runs of similar size: padding a run to its largest costs at most a third more products."""
    runs: list[list[int]] = []
    area = num_queries = num_keys = 0
    for n in order:
        own, seen = spans[n][1], sum(spans[n])
        num_queries, num_keys, area = max(num_queries, own), max(num_keys, seen), area + own * seen
        if not runs or num_queries * num_keys * (len(runs[-1]) + 1) > 1.33 * area:
            runs.append([])
            num_queries, num_keys, area = own, seen, own * seen
        runs[-1].append(n)
    return runs


def pad(index: Tensor, length: int) -> Tensor:
    return F.pad(index, (0, length - len(index)), value=int(index[-1]))


def causal(prefix: int, own: int, num_queries: int, num_keys: int) -> Tensor:
    """(U, S): query i sees the prefix and own tokens up to i; padded keys are seen by none."""
    key = torch.arange(num_keys)
    last = prefix + torch.arange(num_queries).clamp(max=own - 1)
    return key[None, :] <= last[:, None]


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,  # (1, Hq, T, D) packed, or (B, Hq, U, D)
    key: Tensor,  # (1, Hk, T, D), or (B, Hk, S, D)
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: returns ((B, U, Hq, D), None)."""
    scaling = float(query.shape[-1] ** -0.5) if scaling is None else scaling
    if plan is not None:
        refuse_unknown(plan, kwargs)
        return packed_attention(query[0], key[0], value[0], scaling, plan)[None], None
    if query.shape[2] == 1 and attention_mask is not None and attention_mask.dtype == torch.bool:
        return attend(query, key, value, attention_mask, scaling).transpose(1, 2), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def refuse_unknown(plan: AttentionPlan, options: dict[str, Any]) -> None:
    """An attention that asks for more than a causal softmax must not be answered with one."""
    asked = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    window = options.get("sliding_window")
    if window is not None and window < max(block.key_index.shape[1] for block in plan.blocks):
        asked.append(f"sliding_window={window}")
    if asked:
        raise ValueError(f"packed attention does not support {', '.join(asked)} of this model")


def packed_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float, plan: AttentionPlan) -> Tensor:
    """(Hq, T, D), (Hk, T, D), (Hk, T, D) to (T, Hq, D)."""
    # Rows of (T, heads * D): the backward of index_select adds whole rows, which is fast.
    rows = [x.transpose(0, 1).flatten(1) for x in (query, key, value)]
    outputs = []
    for block in plan.blocks:
        q, k, v = (
            take(x, index, heads)
            for x, index, heads in zip(
                rows,
                (block.query_index, block.key_index, block.key_index),
                (len(query), len(key), len(value)),
                strict=True,
            )
        )
        outputs.append(attend(q, k, v, block.mask, scaling).transpose(1, 2).flatten(0, 1).flatten(1))
    mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return mixed.index_select(0, plan.out_index).unflatten(1, (len(query), -1))


def take(rows: Tensor, index: Tensor, num_heads: int) -> Tensor:
    """(T, heads * D) rows at (B, U) to (B, heads, U, D)."""
    picked = rows.index_select(0, index.flatten()).view(*index.shape, num_heads, -1)
    return picked.transpose(1, 2)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Masked attention, (B, Hq, U, D) by (B, Hk, S, D); query heads share their key-value head without copies of it."""
    b, hq, u, d = query.shape
    groups = hq // key.shape[1]
    if u * key.shape[2] > SMALL_BLOCK:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scaling)
    folded = (query * scaling).reshape(b, key.shape[1], groups * u, d)
    scores = (folded @ key.transpose(-1, -2)).view(b, key.shape[1], groups, u, -1)
    scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    return (probs.view(b, key.shape[1], groups * u, -1) @ value).reshape(b, hq, u, d)


def register() -> None:
    """Make "e3fast" known to transformers as an attention implementation; idempotent."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register("e3fast", attention_forward)
    AttentionMaskInterface.register("e3fast", sdpa_mask)
