"""Row maths on one chunk of logits: statistics forward, d(loss)/d(logits) backward.

Letters: C rows of a chunk, H hidden size, V vocabulary. Everything is fp32, or fp64 where the inputs are. With z the
logits over temperature, m = max z, p = softmax(z), l = log p:

    logp_y = (z_y - m) - log sum e^(z-m)        ent = -sum p l        sum_sq = sum p^2
    dz_v = a (1[v=y] - p_v) - b p_v (l_v + ent) + 2 g p_v (p_v - sum_sq)

for upstream gradients a, b, g of the three. A kept set K replaces p by softmax over K in the `a` term; entropy and
sum_sq follow it only on request.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_triton.launch import exact_bf16_products

CACHED_ROWS = 16  # 16 rows of 50,000 fp32 logits stay in a CPU's cache from pass to pass


class Head(NamedTuple):
    weight: Tensor  # (V, H) in the compute type
    bias: Tensor | None  # (V,)
    logit_scale: float
    softcap: float | None
    bf16_values: bool  # operands hold bf16 values: products may run on bf16 units


class RowStats(NamedTuple):
    logprobs: Tensor  # (C,)
    lse: Tensor  # (C,)
    entropy: Tensor | None
    sum_sq: Tensor | None
    centred: Tensor  # (C, V) z - m
    log_s: Tensor  # (C,) log sum e^(z-m) over the vocabulary
    kept: Tensor | None  # (C, V) membership, or None for all
    log_s_kept: Tensor  # (C,) the same sum over the kept set

    def pick(self, rows: Tensor) -> RowStats:
        """The same of some rows."""
        found: Any = (value[rows] if value is not None else None for value in self)
        return RowStats(*found)


def kept_rows(kept: tuple[Tensor, Tensor], rows: Tensor, targets: Tensor, num_classes: int) -> Tensor:
    """(C, V) membership of the kept sets of `rows`; the target is always a member."""
    indptr, ids = kept
    starts, sizes = indptr[rows], indptr[rows + 1] - indptr[rows]
    mask = torch.zeros(rows.shape[0], num_classes, dtype=torch.bool, device=targets.device)
    row = torch.repeat_interleave(torch.arange(rows.shape[0], device=targets.device), sizes)
    offset = torch.arange(row.shape[0], device=targets.device) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    mask[row, ids[starts[row] + offset].long()] = True
    mask[torch.arange(rows.shape[0], device=targets.device), targets] = True
    return mask


def head_logits(hidden: Tensor, head: Head, temperature: Tensor) -> Tensor:
    """z = softcap(scale (x W' + bias)) / temperature, (C, V).

    Temperature divides fp32 logits, never the hidden states.
    """
    with exact_bf16_products(head.bf16_values and hidden.device.type == "cpu"):
        z = hidden @ head.weight.T
    if head.bias is not None:
        z += head.bias
    if head.logit_scale != 1.0:
        z *= head.logit_scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return z.div_(temperature[:, None])


def row_stats(
    z: Tensor, targets: Tensor, kept: Tensor | None, *, entropy_over: str, want_entropy: bool, want_sum_sq: bool
) -> RowStats:
    """Statistics of each row; `z` is centred in place. A few rows at a time stay in the cache from pass to pass."""
    new = lambda wanted=True: z.new_empty(z.shape[0]) if wanted else None  # noqa: E731
    out = RowStats(
        z.new_empty(z.shape[0]),
        z.new_empty(z.shape[0]),
        new(want_entropy),
        new(want_sum_sq),
        z,
        z.new_empty(z.shape[0]),
        kept,
        z.new_empty(z.shape[0]),
    )
    for start in range(0, z.shape[0], CACHED_ROWS):
        at = slice(start, start + CACHED_ROWS)
        stats_block(out, at, targets[at, None], entropy_over == "kept")
    return out


def stats_block(out: RowStats, at: slice, y: Tensor, over_kept: bool) -> None:
    z, member = out.centred[at], out.kept[at] if out.kept is not None else None
    top = z.amax(-1, keepdim=True)
    z -= top
    e = z.exp()
    s = e.sum(-1)
    out.log_s[at] = s.log()
    if member is not None:
        e_kept = e.masked_fill(~member, 0.0)
        out.log_s_kept[at] = e_kept.sum(-1).log()
        if over_kept:
            e, s = e_kept, out.log_s_kept[at].exp()
    else:
        out.log_s_kept[at] = out.log_s[at]
    out.logprobs[at] = (z.gather(1, y)[:, 0] - out.log_s_kept[at]).clamp(max=0)
    out.lse[at] = top[:, 0] + out.log_s_kept[at]
    if out.entropy is not None:
        # a banned id has z - m = -inf and weight 0: -1e30 keeps 0 * inf out
        out.entropy[at] = s.log() - torch.linalg.vecdot(e, z.clamp(min=-1e30)) / s
    if out.sum_sq is not None:
        out.sum_sq[at] = torch.linalg.vecdot(e, e) / s.square()


def row_dz(
    stats: RowStats, targets: Tensor, a: Tensor | None, b: Tensor | None, g: Tensor | None, over_kept: bool
) -> tuple[Tensor, Tensor]:
    """d(loss)/dz with the target entry taken out: (C, V) without it, and (C,) that entry alone.

    The target's 1 - p would lose its digits when the matrix is rounded for a bf16 product, so it travels beside.
    """
    dz = torch.empty_like(stats.centred)
    for start in range(0, dz.shape[0], CACHED_ROWS):
        at = slice(start, start + CACHED_ROWS)
        block, member = dz[at], stats.kept[at] if stats.kept is not None else None
        torch.sub(stats.centred[at], stats.log_s_kept[at, None], out=block).exp_()
        if member is not None:
            block.masked_fill_(~member, 0.0)
        need_p = b is not None or g is not None
        own = over_kept or member is None  # entropy and sum_sq are over the same set as the log-probability
        p = (block.clone() if own else (stats.centred[at] - stats.log_s[at, None]).exp()) if need_p else block
        block *= -a[at, None] if a is not None else 0.0
        if b is not None and stats.entropy is not None:
            log_p = stats.centred[at] - (stats.log_s_kept if over_kept else stats.log_s)[at, None]
            block -= b[at, None] * p * (log_p.clamp(min=-1e30) + stats.entropy[at, None])
        if g is not None and stats.sum_sq is not None:
            block += 2 * g[at, None] * p * (p - stats.sum_sq[at, None])
    y = targets[:, None]
    target = dz.gather(1, y)[:, 0]
    if a is not None:
        target = target + a
    return dz.scatter_(1, y, 0.0), target


class HeadGrads(NamedTuple):
    hidden: Tensor | None  # (C, H)
    weight: Tensor | None  # (V, H), added into
    bias: Tensor | None  # (V,), added into


def head_backward(
    hidden: Tensor,
    head: Head,
    temperature: Tensor,
    stats: RowStats,
    targets: Tensor,
    dz: Tensor,
    target: Tensor,
    grads: HeadGrads,
) -> None:
    """Chain dz through temperature, softcap and scale into the given gradient buffers; dz is used up."""
    factor = head.logit_scale / temperature
    y = targets[:, None]
    if head.softcap is not None:
        z = stats.centred + (stats.lse - stats.log_s_kept)[:, None]
        slope = 1 - (z * (temperature[:, None] / head.softcap)).square()
        dz, target = dz * slope, target * slope.gather(1, y)[:, 0]
    if head.logit_scale != 1.0 or bool((temperature != 1.0).any()):
        dz *= factor[:, None]
    target = (target * factor)[:, None]
    with exact_bf16_products(head.bf16_values and hidden.device.type == "cpu"):
        if grads.hidden is not None:
            torch.mm(dz, head.weight, out=grads.hidden)
        if grads.weight is not None:
            grads.weight.addmm_(dz.T, hidden)
    if grads.hidden is not None:
        grads.hidden.addcmul_(target, head.weight[targets])
    if grads.weight is not None:
        grads.weight.index_add_(0, targets, target * hidden)
    if grads.bias is not None:
        grads.bias.add_(dz.sum(0)).index_add_(0, targets, target[:, 0])
