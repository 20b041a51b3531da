"""Chunked PyTorch on any device: the fast path on a CPU, the fallback elsewhere. Formulas: `head.py`.

On a CPU an element-wise pass over logits costs as much as a good part of a product. So the passes go over a few rows
at a time, which stay in the cache from one to the next; every buffer serves all chunks; and a bf16 head is widened
slab by slab inside the one product that must not round its result, the logits. The two backward products take bf16
operands, as any bf16 kernel does; the target's own entry, whose 1 - p would lose its digits there, travels beside the
matrix in fp32, and the weight gradient is added up in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from csrc_triton.head import Head, HeadGrads, Rows, RowStats, Upstream, target_gradient
from csrc_triton.launch import extra_bytes
from csrc_triton.products import exact_products

CACHED_ROWS = 16  # of 50,000 fp32 logits: 3 MB
SLAB_NUMBERS = 1 << 20  # numbers of W, or of its gradient, worked on at a time: 4 MB in fp32
ON_GPU = 32  # times as much of both on a GPU, where few large launches count


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Logits are never rounded below fp32; fp64 inputs (gradcheck) stay fp64."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def fitting_rows(hidden: Tensor, num_classes: int, max_extra_bytes: int | None) -> int:
    """Rows whose logits fit the budget beside the small buffers; a multiple of 16, at least 64."""
    size = compute_dtype(hidden).itemsize * (1 if hidden.device.type == "cpu" else ON_GPU)
    fixed = (2 * CACHED_ROWS * num_classes + 2 * SLAB_NUMBERS) * size
    rows = (extra_bytes(hidden.device, max_extra_bytes) - fixed) // (num_classes * compute_dtype(hidden).itemsize)
    return max(64, rows // 16 * 16)


def row_blocks(num_rows: int, step: int) -> Iterator[slice]:
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


class TorchBackend:
    def __init__(self, head: Head, hidden: Tensor, max_extra_bytes: int | None) -> None:
        self.head, self.dtype = head, compute_dtype(hidden)
        self.bias = head.bias.to(self.dtype) if head.bias is not None else None
        times = 1 if hidden.device.type == "cpu" else ON_GPU
        self.block_rows, self.slab_numbers = CACHED_ROWS * times, SLAB_NUMBERS * times
        self.num_rows = fitting_rows(hidden, head.weight.shape[0], max_extra_bytes)
        self.buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, num_rows: int, dtype: torch.dtype) -> Tensor:
        """(num_rows, V), uninitialised; the same memory for every chunk."""
        have = self.buffers.get(name)
        if have is None or have.shape[0] < num_rows:
            have = self.head.weight.new_empty(num_rows, self.head.weight.shape[0], dtype=dtype)
            self.buffers[name] = have
        return have[:num_rows]

    def slabs(self) -> Iterator[slice]:
        """Columns of the vocabulary worked on at a time; all at once where nothing is to be widened."""
        num_classes, width = self.head.weight.shape
        step = num_classes if self.head.weight.dtype == self.dtype else max(1, self.slab_numbers // width)
        for start in range(0, num_classes, step):
            yield slice(start, min(start + step, num_classes))

    def logits(self, hidden: Tensor) -> Tensor:
        """x W' in fp32, (C, V)."""
        z, x = self.buffer("logits", hidden.shape[0], self.dtype), hidden.to(self.dtype)
        with exact_products(hidden):
            for slab in self.slabs():
                torch.mm(x, self.head.weight[slab].to(self.dtype).T, out=z[:, slab])
        return z

    def finish_logits(self, block: Tensor, scale: Tensor, temperature: Tensor) -> None:
        """softcap(scale (x W' + bias)) / temperature in place; temperature divides fp32 logits, never hidden states."""
        if self.bias is not None:
            block += self.bias
        if self.head.softcap is None:
            block *= scale
        else:
            block.mul_(self.head.logit_scale / self.head.softcap).tanh_().mul_(self.head.softcap / temperature)

    def forward(self, rows: Rows, *, want_entropy: bool, want_sum_sq: bool, want_grad: bool) -> RowStats:
        """The logits' buffer holds p afterwards."""
        num_classes = self.head.weight.shape[0]
        known = rows.targets.clamp(0, num_classes - 1)  # on a CPU all are; elsewhere finding out would cost a sync
        z = self.logits(rows.hidden)
        new = lambda wanted=True: z.new_empty(z.shape[0]) if wanted else None  # noqa: E731
        top, log_s, logprobs = z.new_empty(z.shape[0]), z.new_empty(z.shape[0]), z.new_empty(z.shape[0])
        entropy, sum_sq = new(want_entropy), new(want_sum_sq)
        temperature = rows.temperature.to(self.dtype)[:, None]
        scale = self.head.logit_scale / temperature
        plain = self.head.softcap is None and self.bias is None and bool((scale == 1).all())
        for at in row_blocks(z.shape[0], self.block_rows):
            block = z[at]
            if not plain:
                self.finish_logits(block, scale[at], temperature[at])
            torch.amax(block, -1, out=top[at])
            own = block.gather(1, known[at, None])[:, 0] - top[at]
            if entropy is None:
                p = torch.softmax(block, -1, out=block)
            else:
                block -= top[at, None]
                p = torch.softmax(block, -1, out=self.buffer("scratch", self.block_rows, self.dtype)[: block.shape[0]])
            torch.neg(p.amax(-1).log_(), out=log_s[at])  # the largest p is e^0 / s
            torch.clamp(own - log_s[at], max=0, out=logprobs[at])
            if entropy is not None:
                # a banned id has z - top = -inf and p = 0: -1e30 keeps 0 * inf out
                centred = block if self.bias is None else block.clamp_(min=-1e30)
                torch.sub(log_s[at], torch.linalg.vecdot(p, centred), out=entropy[at])
                block.copy_(p)
            if sum_sq is not None:
                torch.linalg.vecdot(p, p, out=sum_sq[at])
        logprobs.masked_fill_(rows.targets != known, float("nan"))
        self.rows, self.probs = rows._replace(targets=known), z
        self.stats = RowStats(logprobs, top + log_s, entropy, sum_sq, top, log_s)
        return self.stats

    def backward(self, keep: Tensor | None, up: Upstream, grads: HeadGrads) -> Tensor | None:
        rows, stats = (self.rows, self.stats) if keep is None else (self.rows.pick(keep), self.stats.pick(keep))
        num_rows, scratch = rows.targets.shape[0], self.buffer("scratch", self.block_rows, self.dtype)
        # narrower values take the first half of each row that they come from; kept rows move up over those left out
        dlin = self.probs.view(self.head.weight.dtype)[:num_rows, : scratch.shape[1]]
        target = target_gradient(self.head, stats, up, rows.temperature.to(self.dtype))
        for at in row_blocks(num_rows, self.block_rows):
            index = torch.arange(at.start, at.stop, device=target.device) if keep is None else keep[at]
            p = torch.index_select(self.probs, 0, index, out=scratch[: index.shape[0]])
            row_gradient(p, self.head, rows, stats, up, at)
            dlin[at] = p.scatter_(1, rows.targets[at, None], 0.0)
        if grads.weight is not None:
            self.add_weight_gradient(grads.weight, dlin, rows.hidden)
            grads.weight.index_add_(0, rows.targets, target[:, None] * rows.hidden)
        if grads.bias is not None:
            grads.bias.add_(dlin.sum(0, dtype=self.dtype)).index_add_(0, rows.targets, target)
        if not grads.want_hidden:
            return None
        with exact_products(rows.hidden):
            dx = (dlin @ self.head.weight).to(self.dtype)
        return dx.addcmul_(target[:, None], self.head.weight[rows.targets].to(self.dtype))

    def add_weight_gradient(self, out: Tensor, dlin: Tensor, hidden: Tensor) -> None:
        with exact_products(hidden):
            for slab in self.slabs():
                if dlin.dtype == self.dtype:
                    out[slab].addmm_(dlin[:, slab].T, hidden)
                else:
                    out[slab] += dlin[:, slab].T @ hidden


def row_gradient(p: Tensor, head: Head, rows: Rows, stats: RowStats, up: Upstream, at: slice) -> None:
    """d(loss)/d(x W' + bias) of a few rows in place of their p, but for the target's entry, which nobody reads."""
    temperature = rows.temperature[at, None].to(p.dtype)
    a, b, g = (None if value is None else value[at, None] * (head.logit_scale / temperature) for value in up)
    slope = None
    if head.softcap is not None:  # 1 - tanh^2, of z = log p + lse
        z = p.log().add_(stats.lse[at, None])
        slope = z.mul_(temperature / head.softcap).clamp_(min=-1).square_().neg_().add_(1)
    if b is None and g is None:
        p *= -a if a is not None else 0.0
    else:
        inner = p.new_zeros(p.shape) if a is None else (-a).repeat(1, p.shape[1])
        if b is not None and stats.entropy is not None:
            inner -= b * (p.log().clamp_(min=-1e30) + stats.entropy[at, None])
        if g is not None and stats.sum_sq is not None:
            inner += 2 * g * (p - stats.sum_sq[at, None])
        p *= inner
    if slope is not None:
        p *= slope
