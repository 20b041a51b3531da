"""Packed attention in plain PyTorch, tile by tile: any device and dtype, sliding windows and softcap.

No score outlives its tile: the backward pass makes them again from queries and keys, as flash attention does
(arXiv 2205.14135). Query heads share their key-value head's columns without copies of them. Scores have the inputs'
dtype, and the gradients of keys and values, which many queries share, are added up in fp32.

Letters: T packed tokens, B segments of a block, U queries and S key columns, m queries of a tile and s of its columns,
Hq query and Hk key-value heads, g = Hq / Hk, D head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from e3fast.attention_plan import AttentionPlan, Block, Tile


class Form(NamedTuple):
    """What the scores are: scaling q k', bounded by `softcap` (0 = not), within `window` tokens (0 = all)."""

    num_heads: int  # Hq
    num_kv_heads: int  # Hk
    scaling: float
    softcap: float
    window: int


def tiled_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, form: Form) -> Tensor:
    """(T, Hq * D), (T, Hk * D), (T, Hk * D) to (T, Hq * D); differentiable."""
    out: Tensor = TiledAttention.apply(query, key, value, plan, form)
    return out


class TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, form: Form) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.plan, ctx.form = plan, form
        out = torch.empty_like(query)
        for block, tiles in zip(plan.blocks, plan.tiles(form.window), strict=True):
            q, k, v = take(query, key, value, block, form)
            mixed = torch.empty_like(q)
            for tile in tiles:
                probs, _ = attend(fold(q, tile, form), k, tile, form)
                unfold(probs @ v[:, tile.start : tile.stop], mixed, tile, form)
            put(out, block, mixed)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        plan, form = ctx.plan, ctx.form
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros(x.shape, dtype=wide(x), device=x.device) for x in (key, value))
        for block, tiles in zip(plan.blocks, plan.tiles(form.window), strict=True):
            q, k, v = take(query, key, value, block, form)
            upstream = real_rows(grad, block)
            dq = torch.empty_like(q)
            dk, dv = (torch.zeros(x.shape, dtype=wide(x), device=x.device) for x in (k, v))
            for tile in tiles:
                at = slice(tile.start, tile.stop)
                tile_q, tile_grad = fold(q, tile, form), fold(upstream, tile, form)
                probs, bend = attend(tile_q, k, tile, form)
                d_probs = tile_grad @ v[:, at].transpose(1, 2)
                d_scores = torch.ops.aten._softmax_backward_data(d_probs, probs, -1, probs.dtype)
                if bend is not None:
                    d_scores = d_scores * bend
                dv[:, at] += probs.transpose(1, 2) @ tile_grad
                dk[:, at] += product(d_scores.transpose(1, 2), tile_q, form.scaling)
                unfold(product(d_scores, k[:, at], form.scaling), dq, tile, form)
            put(grad_query, block, dq)
            for total, part in ((grad_key, dk), (grad_value, dv)):
                total.index_add_(0, block.key_index.flatten(), rows_of(part, block))
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def attend(query: Tensor, key: Tensor, tile: Tile, form: Form) -> tuple[Tensor, Tensor | None]:
    """Probabilities (B Hk, g m, s) of a tile, and with a softcap its derivative by the uncapped scores."""
    scores, bend = product(query, key[:, tile.start : tile.stop].transpose(1, 2), form.scaling), None
    if form.softcap:
        bound = torch.tanh(scores / form.softcap)
        scores, bend = form.softcap * bound, 1 - bound * bound
    by_head = scores.view(len(tile.hidden), form.num_kv_heads, -1, tile.last - tile.first, scores.shape[-1])
    by_head[..., tile.masked - tile.start :].masked_fill_(tile.hidden, float("-inf"))
    return torch.softmax(scores, dim=-1), bend


def product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale (left @ right), scaled before it is rounded."""
    return torch.baddbmm(left.new_empty(1, 1, 1), left, right, beta=0, alpha=scale)


def take(query: Tensor, key: Tensor, value: Tensor, block: Block, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """A block's queries (B, U, Hq D), and its keys and values by head, (B Hk, S, D)."""
    index, heads = block.key_index, form.num_kv_heads
    by_head = lambda x: x.index_select(0, index.flatten()).view(*index.shape, heads, -1)  # noqa: E731
    k, v = (by_head(x).transpose(1, 2).flatten(0, 1) for x in (key, value))
    return query.index_select(0, block.query_index.flatten()).view(*block.query_index.shape, -1), k, v


def real_rows(grad: Tensor, block: Block) -> Tensor:
    """(T, Hq D) to the block's (B, U, Hq D), zero at padding: it must not count twice."""
    index = block.query_index.flatten()
    rows = grad.new_zeros(len(index), grad.shape[1]).index_copy_(0, block.real, grad.index_select(0, index[block.real]))
    return rows.view(*block.query_index.shape, -1)


def fold(rows: Tensor, tile: Tile, form: Form) -> Tensor:
    """Rows [first, last) of (B, U, Hq D) to (B Hk, g m, D)."""
    x = rows[:, tile.first : tile.last].unflatten(2, (form.num_kv_heads, form.num_heads // form.num_kv_heads, -1))
    b, m, h, g, d = x.shape
    return x.permute(0, 2, 3, 1, 4).reshape(b * h, g * m, d)


def unfold(x: Tensor, rows: Tensor, tile: Tile, form: Form) -> None:
    """The inverse of `fold`: (B Hk, g m, D) into rows [first, last) of (B, U, Hq D)."""
    here = rows[:, tile.first : tile.last].unflatten(2, (form.num_kv_heads, form.num_heads // form.num_kv_heads, -1))
    b, m, h, g, d = here.shape
    here.copy_(x.view(b, h, g, m, d).permute(0, 3, 1, 2, 4))


def rows_of(x: Tensor, block: Block) -> Tensor:
    """(B Hk, S, D) to (B S, Hk D)."""
    return x.unflatten(0, (len(block.own), -1)).transpose(1, 2).flatten(2).flatten(0, 1)


def put(out: Tensor, block: Block, rows: Tensor) -> None:
    """A block's rows (B, U, Hq D), without padding, to their places in (T, Hq D)."""
    index = block.query_index.flatten()
    out.index_copy_(0, index[block.real], rows.flatten(0, 1).index_select(0, block.real))


def wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
