"""One-pass policy loss from hidden states and the LM head: the gradient is formed inside the forward, chunk by chunk.

A per-token loss needs only its row's log-probability and entropy, so both weight gradients of a chunk can be finished
while its logits are at hand: three products instead of four. Rows whose coefficient is exactly zero leave the two
backward products; that is exact. Twin: `reference.linear_grpo_loss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from csrc_triton.launch import (
    check_head,
    check_targets,
    chunk_rows,
    chunks,
    compute_dtype,
    row_temperatures,
    under_autocast,
)
from csrc_triton.logprobs import make_head
from csrc_triton.losses import TokenLoss
from csrc_triton.rows import Head, HeadGrads, RowStats, head_backward, head_logits, row_dz, row_stats


class LinearLoss(NamedTuple):
    loss: Tensor  # fp32 scalar, the only differentiable field
    logprobs: Tensor  # (T,), 0 at rows of weight 0
    entropy: Tensor | None  # (T,), 0 at rows of weight 0
    metrics: dict[str, Tensor]  # what the token loss reported, and num_rows
    num_live: Tensor  # rows with a non-zero coefficient


class Job(NamedTuple):
    targets: Tensor
    weights: Tensor
    token_data: Mapping[str, Tensor]
    token_loss: TokenLoss
    temperature: Tensor
    logit_scale: float
    softcap: float | None
    want_entropy: bool
    drop_zero_rows: bool
    loss_scale: Tensor | None
    num_chunk_rows: int
    metrics: dict[str, Tensor]  # filled by the forward


def coefficients(
    job: Job, rows: Tensor, logprobs: Tensor, entropy: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The chunk's weighted loss, and its gradients a by log-probability and b by entropy, by the token loss."""
    chunk = {name: value[rows] for name, value in job.token_data.items()}
    with torch.enable_grad():
        lp = logprobs.detach().requires_grad_()
        ent = entropy.detach().requires_grad_() if entropy is not None else None
        terms = job.token_loss(lp, ent, chunk)
        loss = (terms.loss * job.weights[rows]).sum()
        leaves = [lp] if ent is None else [lp, ent]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else (None, None)
    for name, value in terms.metrics.items():
        now = value.detach().max() if name.endswith("_max") else value.detach().sum()
        old = job.metrics.get(name)
        job.metrics[name] = now if old is None else torch.maximum(old, now) if name.endswith("_max") else old + now
    a = grads[0] if grads[0] is not None else torch.zeros_like(logprobs)
    return loss.detach(), a, grads[1] if len(grads) > 1 else None


class LinearGrpoLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job, dw_out: Tensor | None) -> Any:
        dtype = compute_dtype(hidden)
        head = make_head(weight, bias, job.logit_scale, job.softcap, dtype)
        need_x, need_w, need_b = (wanted for wanted in ctx.needs_input_grad[:3])
        grads = HeadGrads(
            torch.zeros_like(hidden, dtype=dtype) if need_x else None,
            (dw_out if dw_out is not None else torch.zeros_like(weight, dtype=dtype)) if need_w else None,
            torch.zeros_like(bias, dtype=dtype) if need_b and bias is not None else None,
        )
        logprobs = hidden.new_zeros(hidden.shape[0], dtype=dtype)
        entropy = torch.zeros_like(logprobs) if job.want_entropy else None
        loss, num_live = logprobs.new_zeros(()), torch.zeros((), dtype=torch.int64, device=hidden.device)
        live_rows = torch.nonzero(job.weights != 0)[:, 0]
        for rows in chunks(live_rows, job.num_chunk_rows):
            x, tau, y = hidden[rows].to(dtype), job.temperature[rows], job.targets[rows]
            z = head_logits(x, head, tau)
            stats = row_stats(z, y, None, entropy_over="vocab", want_entropy=job.want_entropy, want_sum_sq=False)
            logprobs[rows] = stats.logprobs
            if entropy is not None and stats.entropy is not None:
                entropy[rows] = stats.entropy
            chunk_loss, a, b = coefficients(job, rows, stats.logprobs, stats.entropy)
            loss += chunk_loss
            keep = (a != 0) if b is None else (a != 0) | (b != 0)
            num_live += keep.sum()
            if any(grad is not None for grad in grads):
                backward_rows(job, x, head, tau, stats, y, a, b, keep, rows, grads)
        job.metrics["num_rows"] = torch.tensor(float(live_rows.shape[0]), device=hidden.device)
        ctx.grads = HeadGrads(grads.hidden, None if dw_out is not None else grads.weight, grads.bias)
        ctx.like = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        ctx.mark_non_differentiable(logprobs, num_live, *([entropy] if entropy is not None else []))
        return loss, logprobs, entropy, num_live

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *_unused: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = (
            (grad * scale).to(dtype) if grad is not None else None
            for grad, dtype in zip(ctx.grads, ctx.like, strict=True)
        )
        return (*grads, None, None)


def backward_rows(
    job: Job,
    x: Tensor,
    head: Head,
    tau: Tensor,
    stats: RowStats,
    y: Tensor,
    a: Tensor,
    b: Tensor | None,
    keep: Tensor,
    rows: Tensor,
    grads: HeadGrads,
) -> None:
    """Add the chunk's gradients; rows with zero coefficients are left out of both products."""
    if job.loss_scale is not None:
        a, b = a * job.loss_scale, b * job.loss_scale if b is not None else None
    if job.drop_zero_rows and not bool(keep.all()):
        kept = torch.nonzero(keep)[:, 0]
        if kept.numel() == 0:
            return
        x, tau, y, a, rows = x[kept], tau[kept], y[kept], a[kept], rows[kept]
        b = b[kept] if b is not None else None
        stats = stats.pick(kept)
    dz, target = row_dz(stats, y, a, b, None, False)
    chunk_dx = torch.empty_like(x) if grads.hidden is not None else None
    head_backward(x, head, tau, stats, y, dz, target, HeadGrads(chunk_dx, grads.weight, grads.bias))
    if grads.hidden is not None and chunk_dx is not None:
        grads.hidden[rows] = chunk_dx


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_data: Mapping[str, Tensor],
    token_loss: TokenLoss,
    weights: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    want_entropy: bool = False,
    drop_zero_rows: bool = True,
    grad_weight_out: Tensor | None = None,
    loss_scale: Tensor | None = None,
    max_extra_bytes: int | None = None,
    backend: str = "auto",
) -> LinearLoss:
    """Sum over tokens of weights_t * token_loss_t, with gradients by hidden, weight and bias formed in the forward.

    hidden (T, H), weight (V, H), bias (V,), targets (T,), temperature a float or (T,). `weights` (T,) is mask times
    the global normaliser: there is no default. Rows of weight 0 never enter a product, and nothing of `token_data`
    (name -> (T, ...)) is read there. `grad_weight_out`, fp32 (V, H), takes the weight gradient directly; scale it by
    `loss_scale` and call backward with 1. Raises ValueError naming argument, value and what is allowed.
    """
    hidden, weight = under_autocast(hidden, weight)
    rows = {"targets": targets, "weights": weights, **token_data}
    check_head(hidden, weight, rows, bias=bias, temperature=temperature, softcap=softcap, backend=backend)
    asked = weights != 0
    check_targets(targets.masked_fill(~asked, -100), weight.shape[0], -100)
    if grad_weight_out is not None and (
        grad_weight_out.shape != weight.shape or grad_weight_out.dtype != torch.float32
    ):
        got = f"{tuple(grad_weight_out.shape)} {grad_weight_out.dtype}"
        raise ValueError(f"grad_weight_out must be fp32 {tuple(weight.shape)}, got {got}")
    dtype = compute_dtype(hidden)
    job = Job(
        targets.long(),
        weights.to(dtype),
        token_data,
        token_loss,
        row_temperatures(temperature, hidden, dtype),
        logit_scale,
        softcap,
        want_entropy,
        drop_zero_rows,
        loss_scale,
        chunk_rows(hidden.device, weight, dtype, max_extra_bytes),
        {},
    )
    loss, logprobs, entropy, num_live = LinearGrpoLoss.apply(hidden, weight, bias, job, grad_weight_out)
    return LinearLoss(loss, logprobs, entropy, job.metrics, num_live)
