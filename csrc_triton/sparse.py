"""Error-bounded sparse backward of the PyTorch backend: probabilities up to `SMALLEST` leave both products.

After training most rows put their mass on a few ids. Larger entries stay, as a sparse matrix; the target's entry
travels beside, as always. What a row leaves out has a mass m_t that is known exactly, since a whole row of
d(loss)/d(logits) sums to zero, and acts on dX as -a_t m_t w, with w the chunk's own mean dropped row of W:

    q_v = sum_t |a_t| p_tv over dropped entries        w = sum_v q_v W_v / sum_v q_v

Nothing stands in for it in dW. Two bounds on the relative error in Frobenius norm cost next to nothing: of dX,
sqrt(sum_t (a_t m_t)^2 sum_v q_v |W_v - w|^2 / sum_v q_v) over |dX|; of dW, |q| max_t |x_t| over the norm of the
targets' part of dW. They were 4 to 9 times the error on real hidden states. A chunk over the tolerance is done densely.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from csrc_triton.head import Head, HeadGrads, Rows, Upstream
from csrc_triton.rows import TorchBackend, row_blocks

SMALLEST = 2.0**-14


class Entries(NamedTuple):
    """Kept entries of k rows, row by row, without the targets'."""

    rows: Tensor  # (N,) int64, rising
    ids: Tensor  # (N,) int64
    values: Tensor  # (N,) -a p
    sizes: Tensor  # (k,) entries a row


class SparseBackend(TorchBackend):
    """Dense where an entropy gradient, a softcap or a bias makes a row of gradients more than -a p."""

    def __init__(self, head: Head, hidden: Tensor, max_extra_bytes: int | None, tolerance: float) -> None:
        super().__init__(head, hidden, max_extra_bytes)
        self.tolerance = tolerance
        self.norms = torch.cat([w.to(self.dtype).square().sum(-1) for w in head.weight.split(4096)])  # (V,) |W_v|^2
        self.num_dense = 0  # chunks over the tolerance

    def backward(self, keep: Tensor | None, up: Upstream, grads: HeadGrads) -> Tensor | None:
        head, rows = self.head, self.rows if keep is None else self.rows.pick(keep)
        if up.logprobs is None or up.entropy is not None or head.softcap is not None or head.bias is not None:
            return super().backward(keep, up, grads)
        a = up.logprobs * (head.logit_scale / rows.temperature.to(self.dtype))
        target = -a * torch.expm1(self.stats.logprobs if keep is None else self.stats.logprobs[keep])
        entries = self.entries(keep, rows, a)
        dropped = self.dropped(keep, rows, a, target, entries)
        mass = dropped.sum().clamp(min=1e-30)
        mean = (dropped.to(head.weight.dtype) @ head.weight).to(self.dtype) / mass
        left = -(target.double() + totals(entries)).to(self.dtype)  # (k,) -a m
        dx = weighted_rows(head.weight, entries.ids, entries.values, entries.sizes).to(self.dtype)
        dx.addcmul_(target[:, None], head.weight[rows.targets].to(self.dtype)).addr_(left, mean)
        spread = ((dropped @ self.norms) / mass - mean.square().sum()).clamp(min=0)
        x = rows.hidden.to(self.dtype)
        error_dx = left.norm() * spread.sqrt() / dx.norm()
        error_dw = dropped.norm() * x.norm(dim=-1).max() / (target[:, None] * x).norm()
        if float(torch.maximum(error_dx, error_dw)) > self.tolerance:
            self.num_dense += 1
            return super().backward(keep, up, grads)
        if grads.weight is not None:
            grads.weight.index_add_(0, rows.targets, target[:, None] * x)
            add_weight_gradient(grads.weight, rows.hidden, entries)
        return dx if grads.want_hidden else None

    def entries(self, keep: Tensor | None, rows: Rows, a: Tensor) -> Entries:
        ids, values, sizes = [], [], []
        for at in row_blocks(rows.targets.shape[0], self.block_rows):
            p = self.probs[at] if keep is None else self.probs[keep[at]]
            large = (p > SMALLEST).scatter_(1, rows.targets[at, None], False)
            row, column = torch.nonzero(large, as_tuple=True)
            ids.append(column)
            values.append(-p[row, column] * a[at][row])
            sizes.append(torch.bincount(row, minlength=p.shape[0]))
        size = torch.cat(sizes)
        return Entries(torch.repeat_interleave(size), torch.cat(ids), torch.cat(values), size)

    def dropped(self, keep: Tensor | None, rows: Rows, a: Tensor, target: Tensor, entries: Entries) -> Tensor:
        """q, (V,): all of |a| p in the chunk but the kept entries and the targets'."""
        weights = a.abs()
        if keep is not None:
            weights = a.new_zeros(self.probs.shape[0]).index_copy_(0, keep, weights)
        q = torch.mv(self.probs.T, weights)
        q.index_add_(0, entries.ids, -entries.values.abs())
        return q.index_add_(0, rows.targets, target.abs() - a.abs()).clamp_(min=0)


def totals(entries: Entries) -> Tensor:
    """Sum of each row's kept values, (k,) fp64: what is left of it is small."""
    zeros = entries.values.new_zeros(entries.sizes.shape[0], dtype=torch.float64)
    return zeros.index_add_(0, entries.rows, entries.values.double())


def weighted_rows(source: Tensor, index: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    """sum of weights[e] source[index[e]] over each run of `sizes` entries, (runs, H)."""
    offsets = pad(sizes.cumsum(0)[:-1], (1, 0))
    return embedding_bag(index, source, offsets, mode="sum", per_sample_weights=weights.to(source.dtype))


def add_weight_gradient(out: Tensor, hidden: Tensor, entries: Entries) -> None:
    ids, order = torch.sort(entries.ids, stable=True)
    ids, sizes = torch.unique_consecutive(ids, return_counts=True)
    if ids.shape[0]:
        parts = weighted_rows(hidden, entries.rows[order], entries.values[order], sizes)
        out.index_add_(0, ids, parts.to(out.dtype))
