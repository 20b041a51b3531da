"""Row maths on one chunk of logits: statistics forward, d(loss)/d(logits) backward (KERNELS.md section 3).

Letters: C rows of a chunk, H hidden size, V vocabulary. Everything is fp32, or fp64 where the inputs are. With z the logits
over temperature, m = max z, p = softmax(z), l = log p:

    logp_y = (z_y - m) - log sum e^(z-m)        ent = -sum p l        sum_sq = sum p^2
    dz_v = a (1[v=y] - p_v) - b p_v (l_v + ent) + 2 g p_v (p_v - sum_sq)

for upstream gradients a, b, g of the three. A kept set K replaces p by softmax over K in the `a` term; entropy and sum_sq
follow it only on request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csrc_triton.launch import exact_bf16_products


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
    log_target: Tensor  # (C, V) log p over the kept set (-inf outside), or over the vocabulary
    log_full: Tensor  # (C, V) log p that entropy and sum_sq are taken over


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
    """z = softcap(scale (x W' + bias)) / temperature, (C, V). Temperature divides fp32 logits, never the hidden states."""
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
    z: Tensor, targets: Tensor, mask: Tensor | None, *, entropy_over: str, want_entropy: bool, want_sum_sq: bool
) -> RowStats:
    log_full = torch.log_softmax(z, dim=-1)
    log_target = log_full if mask is None else torch.log_softmax(z.masked_fill(~mask, float("-inf")), dim=-1)
    if entropy_over == "kept":
        log_full = log_target
    y = targets[:, None]
    logprobs = log_target.gather(1, y)[:, 0].clamp(max=0)
    entropy = sum_sq = None
    if want_entropy or want_sum_sq:
        p = log_full.exp()
        # p = 0 rows of a ban (-inf logit) add 0, not 0 * inf
        entropy = -(p * log_full.clamp(min=-1e30)).sum(-1) if want_entropy else None
        sum_sq = (p * p).sum(-1) if want_sum_sq else None
    lse = z.gather(1, y)[:, 0] - logprobs
    return RowStats(logprobs, lse, entropy, sum_sq, log_target, log_full)


def row_dz(stats: RowStats, targets: Tensor, a: Tensor | None, b: Tensor | None, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """d(loss)/dz with the target entry taken out: (C, V) without it, and (C,) that entry alone.

    The target's 1 - p would lose its digits when the matrix is rounded for a bf16 product, so it travels beside.
    """
    dz = torch.zeros_like(stats.log_full)
    if a is not None:
        dz -= a[:, None] * stats.log_target.exp()
    if b is not None or g is not None:
        p = stats.log_full.exp()
        if b is not None and stats.entropy is not None:
            dz -= b[:, None] * p * (stats.log_full.clamp(min=-1e30) + stats.entropy[:, None])
        if g is not None and stats.sum_sq is not None:
            dz += 2 * g[:, None] * p * (p - stats.sum_sq[:, None])
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
    hidden: Tensor, head: Head, temperature: Tensor, z: Tensor, targets: Tensor, dz: Tensor, target: Tensor, grads: HeadGrads
) -> None:
    """Chain dz through temperature, softcap and scale into the given gradient buffers, in place."""
    factor = head.logit_scale / temperature
    y = targets[:, None]
    if head.softcap is not None:
        slope = 1 - (z * (temperature[:, None] / head.softcap)).square()
        dz, target = dz * slope, target * slope.gather(1, y)[:, 0]
    dz, target = dz * factor[:, None], (target * factor)[:, None]
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
