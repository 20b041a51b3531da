"""The records that travel between an op and what computes its chunks, and the seam between them.

Letters: T tokens, C rows of a chunk, k rows of it that take a gradient, H hidden size, V vocabulary. An op splits its
rows into chunks, and for each asks a `ChunkBackend` for the row statistics, makes coefficients of them, and hands
those back for the gradients. With u = scale (x W' + bias), c = softcap(u), z = c / tau, m = max z, p = softmax(z),
l = log p:

    logp_y = (z_y - m) - log sum e^(z-m)        ent = -sum p l        sum_sq = sum p^2
    dz_v = a (1[v=y] - p_v) - b p_v (l_v + ent) + 2 g p_v (p_v - sum_sq)
    dlin = dz (scale / tau) (1 - tanh(u / cap)^2)        dX = dlin W        dW = dlin' X        dbias = sum dlin
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Head(NamedTuple):
    weight: Tensor  # (V, H) as given
    bias: Tensor | None  # (V,); -inf bans an id
    logit_scale: float
    softcap: float | None


def make_head(weight: Tensor, bias: Tensor | None, logit_scale: float, softcap: float | None) -> Head:
    """Rows of the weight and the bias contiguous, as kernels read them; numbers as floats."""
    weight = weight.detach() if weight.stride(1) == 1 else weight.detach().contiguous()
    bias = bias.detach().contiguous() if bias is not None else None
    return Head(weight, bias, float(logit_scale), float(softcap) if softcap is not None else None)


class Rows(NamedTuple):
    hidden: Tensor  # (C, H) in the type of the weight
    temperature: Tensor  # (C,) fp32
    targets: Tensor  # (C,) int64, in [0, V) on a CPU; on CUDA a row with another target returns nan

    def pick(self, index: Tensor) -> Rows:
        return Rows(self.hidden[index], self.temperature[index], self.targets[index])


class RowStats(NamedTuple):
    logprobs: Tensor  # (C,) nats, never above 0
    lse: Tensor  # (C,) nats
    entropy: Tensor | None  # (C,) nats, centred
    sum_sq: Tensor | None  # (C,)
    top: Tensor  # (C,) the largest logit over temperature, in the backend's own base
    log_s: Tensor  # (C,) log of sum e^(z - top), in the backend's own base

    def pick(self, index: Tensor) -> RowStats:
        return RowStats(*(x[index] if x is not None else None for x in self))  # pyright: ignore[reportArgumentType]


class Upstream(NamedTuple):
    """Gradients of the loss by the three outputs of a row, (k,) each; None where there is none."""

    logprobs: Tensor | None
    entropy: Tensor | None
    sum_sq: Tensor | None

    def pick(self, index: Tensor) -> Upstream:
        return Upstream(*(x[index] if x is not None else None for x in self))


def target_gradient(head: Head, stats: RowStats, up: Upstream, temperature: Tensor) -> Tensor:
    """(k,) d(loss)/d(x W' + bias) at each row's target; a (1 - p) comes from expm1, where 1 - p would cancel."""
    p = stats.logprobs.exp()
    dz = torch.zeros_like(p)
    if up.logprobs is not None:
        dz -= up.logprobs * torch.expm1(stats.logprobs)
    if up.entropy is not None and stats.entropy is not None:
        dz -= up.entropy * p * (stats.logprobs.clamp(min=-1e30) + stats.entropy)
    if up.sum_sq is not None and stats.sum_sq is not None:
        dz += 2 * up.sum_sq * p * (p - stats.sum_sq)
    dlin = dz * (head.logit_scale / temperature)
    if head.softcap is not None:
        dlin *= 1 - ((stats.logprobs + stats.lse) * (temperature / head.softcap)).square()
    return dlin


class HeadGrads(NamedTuple):
    weight: Tensor | None  # (V, H) fp32, added into; None: not wanted
    bias: Tensor | None  # (V,) fp32, added into
    want_hidden: bool


class ChunkBackend(Protocol):
    """Statistics of a chunk, then its gradients while its logits are still at hand."""

    num_rows: int  # the largest chunk it takes

    def forward(self, rows: Rows, *, want_entropy: bool, want_sum_sq: bool, want_grad: bool) -> RowStats: ...

    def backward(self, keep: Tensor | None, up: Upstream, grads: HeadGrads) -> Tensor | None:
        """Of the chunk last seen by `forward(want_grad=True)`, once: add dW and dbias, return dX (k, H) fp32.

        keep (k,) int64, rising, are the rows that take a gradient (None: all); `up` is already cut to them.
        """
        ...
