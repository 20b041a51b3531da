"""Error-bounded sparse backward of the PyTorch backend: probabilities up to `SMALLEST` leave both products.

After training most rows put their mass on a few ids. Larger entries stay, as a sparse matrix; the target's entry
travels beside, as always. With c_t = a_t scale / tau_t, row t leaves out the ids D_t, of mass m_t. The mass is known,
since a whole row of d(loss)/d(logits) sums to zero, and acts on dX as -c_t m_t w, with one row w for the whole chunk.
The error of row t of dX is then |c_t sum_D p_tv (W_v - w)|, and by Jensen, with sums over dropped entries alone,

    |error of dX|^2 <= sum_v q_v |W_v - w|^2      q_v = sum_t c_t^2 m_t p_tv      least at w = sum q_v W_v / sum q_v
    |error of dW|^2 <= sum_v r_v^2                r_v = sum_t |c_t| |x_t| p_tv    nothing stands in for it in dW

An error up to e in a result of norm n is at most e / (n - e) of the exact one. A chunk for which either of the two is
over the tolerance is done densely. So they bound what the dropping does to a chunk's dX and to its dW, in relative
Frobenius norm; the rounding, which the dense backward has too, comes on top.
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
        left = -(target.double() + totals(entries)).to(self.dtype)  # (k,) -c m
        x, largest = rows.hidden.to(self.dtype), a.abs().max()  # in units of it no c^2 underflows
        q, r = self.dropped(keep, rows, a / largest, entries, torch.stack((left.abs() / largest, x.norm(dim=-1))))
        mass = q.sum().clamp(min=1e-30)
        mean = (q.to(head.weight.dtype) @ head.weight).to(self.dtype) / mass
        dx = weighted_rows(head.weight, entries.ids, entries.values, entries.sizes).to(self.dtype)
        dx.addcmul_(target[:, None], head.weight[rows.targets].to(self.dtype)).addr_(left, mean)
        spread = (q @ self.norms - mass * mean.square().sum()).clamp(min=0)
        error = relative_bound(largest * spread.sqrt(), dx)
        ids, parts = rows.targets[:0], x[:0]
        if grads.weight is not None:
            ids, parts = weight_gradient(x, rows, target, entries)
            error = max(error, relative_bound(largest * r.norm(), parts))
        if not (error <= self.tolerance):
            self.num_dense += 1
            return super().backward(keep, up, grads)
        if grads.weight is not None:
            grads.weight.index_add_(0, ids, parts)
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

    def dropped(self, keep: Tensor | None, rows: Rows, c: Tensor, entries: Entries, factors: Tensor) -> Tensor:
        """sum_t |c_t| factors_t p_tv over what the chunk drops, (2, V): all but the kept entries and the targets'."""
        index = torch.arange(c.shape[0], device=c.device) if keep is None else keep
        weights = c.new_zeros(2, self.probs.shape[0]).index_copy_(1, index, factors * c.abs())
        row, column = torch.cat((index[entries.rows], index)), torch.cat((entries.ids, rows.targets))
        taken = -self.probs[row, column]
        sums = [torch.mv(self.probs.T, weight).index_add_(0, column, taken * weight[row]) for weight in weights]
        return torch.stack(sums).clamp_(min=0)


def totals(entries: Entries) -> Tensor:
    """Sum of each row's kept values, (k,) fp64: what is left of it is small."""
    zeros = entries.values.new_zeros(entries.sizes.shape[0], dtype=torch.float64)
    return zeros.index_add_(0, entries.rows, entries.values.double())


def weighted_rows(source: Tensor, index: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    """sum of weights[e] source[index[e]] over each run of `sizes` entries, (runs, H)."""
    offsets = pad(sizes.cumsum(0)[:-1], (1, 0))
    return embedding_bag(index, source, offsets, mode="sum", per_sample_weights=weights.to(source.dtype))


def weight_gradient(x: Tensor, rows: Rows, target: Tensor, entries: Entries) -> tuple[Tensor, Tensor]:
    """Rows of dW that are not zero, (U,) and (U, H); targets enter the product with nothing, and are added in full."""
    ids, order = torch.sort(torch.cat((entries.ids, rows.targets)), stable=True)
    ids, sizes = torch.unique_consecutive(ids, return_counts=True)
    index = torch.cat((entries.rows, torch.arange(target.shape[0], device=target.device)))[order]
    values = torch.cat((entries.values, torch.zeros_like(target)))[order]
    parts = weighted_rows(rows.hidden, index, values, sizes).to(x.dtype)
    return ids, parts.index_add_(0, torch.searchsorted(ids, rows.targets), target[:, None] * x)


def relative_bound(error: Tensor, result: Tensor) -> float:
    """Of an error in `result`, by the norm of what it should be; infinite where that may be nothing, or is unknown."""
    e, n = float(error), float(result.norm())
    return e / (n - e) if e < n < float("inf") else float("inf")
