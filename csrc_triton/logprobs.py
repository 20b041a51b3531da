"""Token log-probabilities and entropies from hidden states and the LM head, chunk by chunk: never a (T, V) tensor.

Forward keeps only its inputs; backward works each chunk's logits out again. Gradients accumulate in fp32 and are
rounded once. Formulas and their derivation: `rows.py`. Twin: `reference.linear_logprobs`.
"""

from __future__ import annotations

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
from csrc_triton.rows import Head, HeadGrads, RowStats, head_backward, head_logits, kept_rows, row_dz, row_stats


class LogProbs(NamedTuple):
    logprobs: Tensor  # (T,) nats
    entropy: Tensor | None  # (T,) nats
    lse: Tensor  # (T,) log-sum-exp of the logits over temperature; carries no gradient
    sum_sq: Tensor | None  # (T,) sum of squared probabilities


class Job(NamedTuple):
    """What does not change from chunk to chunk."""

    targets: Tensor
    rows: Tensor  # (R,) rows that are not ignored
    temperature: Tensor
    logit_scale: float
    softcap: float | None
    kept: tuple[Tensor, Tensor] | None
    entropy_over: str
    want_entropy: bool
    want_sum_sq: bool
    num_chunk_rows: int


def make_head(
    weight: Tensor, bias: Tensor | None, logit_scale: float, softcap: float | None, dtype: torch.dtype
) -> Head:
    bias = bias.detach().to(dtype) if bias is not None else None
    return Head(weight.detach().to(dtype), bias, logit_scale, softcap, weight.dtype == torch.bfloat16)


def chunk_stats(rows: Tensor, hidden: Tensor, head: Head, job: Job) -> RowStats:
    targets = job.targets[rows]
    z = head_logits(hidden, head, job.temperature[rows])
    mask = kept_rows(job.kept, rows, targets, head.weight.shape[0]) if job.kept is not None else None
    return row_stats(
        z, targets, mask, entropy_over=job.entropy_over, want_entropy=job.want_entropy, want_sum_sq=job.want_sum_sq
    )


class LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job) -> tuple[Tensor | None, ...]:
        dtype = compute_dtype(hidden)
        head = make_head(weight, bias, job.logit_scale, job.softcap, dtype)
        new = lambda wanted: hidden.new_zeros(hidden.shape[0], dtype=dtype) if wanted else None  # noqa: E731
        logprobs, lse, entropy, sum_sq = new(True), new(True), new(job.want_entropy), new(job.want_sum_sq)
        for rows in chunks(job.rows, job.num_chunk_rows):
            stats = chunk_stats(rows, hidden[rows].to(dtype), head, job)
            found = (stats.logprobs, stats.lse, stats.entropy, stats.sum_sq)
            for out, value in zip((logprobs, lse, entropy, sum_sq), found, strict=True):
                if out is not None and value is not None:
                    out[rows] = value
        ctx.save_for_backward(hidden, weight, bias)
        ctx.job = job
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse)
        return logprobs, entropy, lse, sum_sq

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, a: Tensor | None, b: Tensor | None, _lse: Tensor | None, g: Tensor | None
    ) -> tuple[Any, ...]:
        hidden, weight, bias = ctx.saved_tensors
        job, dtype = ctx.job, compute_dtype(hidden)
        head = make_head(weight, bias, job.logit_scale, job.softcap, dtype)
        dx = torch.zeros_like(hidden, dtype=dtype) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        db = torch.zeros_like(bias, dtype=dtype) if bias is not None and ctx.needs_input_grad[2] else None
        upstream = [grad.to(dtype) if grad is not None else None for grad in (a, b, g)]
        live = sum((grad[job.rows] != 0 for grad in upstream if grad is not None), start=torch.zeros_like(job.rows))
        for rows in chunks(job.rows[live > 0], job.num_chunk_rows):
            x = hidden[rows].to(dtype)
            stats = chunk_stats(rows, x, head, job)
            a, b, g = (grad[rows] if grad is not None else None for grad in upstream)
            dz, target = row_dz(stats, job.targets[rows], a, b, g, job.entropy_over == "kept")
            chunk_dx = torch.empty_like(x) if dx is not None else None
            buffers = HeadGrads(chunk_dx, dw, db)
            head_backward(x, head, job.temperature[rows], stats, job.targets[rows], dz, target, buffers)
            if dx is not None and chunk_dx is not None:
                dx[rows] = chunk_dx
        cast = lambda grad, like: grad.to(like.dtype) if grad is not None else None  # noqa: E731
        return cast(dx, hidden), cast(dw, weight), cast(db, bias), None


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    kept: tuple[Tensor, Tensor] | None = None,
    entropy_over: str = "vocab",
    want_entropy: bool = False,
    want_sum_sq: bool = False,
    ignore_index: int = -100,
    max_extra_bytes: int | None = None,
    backend: str = "auto",
) -> LogProbs:
    """Log-probability of each target and, on request, the entropy and sum of squares of its distribution.

    hidden (T, H), weight (V, H), bias (V,); targets (T,) aligned by the caller; temperature > 0, a float or (T,).
    `kept` is `(indptr (T+1,), ids)`: log-probabilities are then over each row's kept set, the target always a member.
    Rows whose target is `ignore_index` return 0 and add nothing. Differentiable in hidden, weight and bias. Nats,
    fp32 (fp64 for fp64 inputs). Raises ValueError naming argument, value and what is allowed.
    """
    hidden, weight = under_autocast(hidden, weight)
    rows = {"targets": targets}
    check_head(hidden, weight, rows, bias=bias, temperature=temperature, softcap=softcap, backend=backend)
    check_targets(targets, weight.shape[0], ignore_index)
    if entropy_over not in ("vocab", "kept"):
        raise ValueError(f"entropy_over must be 'vocab' or 'kept', got {entropy_over!r}")
    if kept is not None and kept[0].shape != (hidden.shape[0] + 1,):
        raise ValueError(f"kept[0] must be (T+1,) = ({hidden.shape[0] + 1},), got {tuple(kept[0].shape)}")
    if kept is not None and not (int(kept[0][0]) == 0 and bool((kept[0].diff() >= 0).all())):
        raise ValueError("kept[0] must start at 0 and never fall")
    dtype = compute_dtype(hidden)
    job = Job(
        targets.long(),
        torch.nonzero(targets != ignore_index)[:, 0],
        row_temperatures(temperature, hidden, dtype),
        logit_scale,
        softcap,
        kept,
        entropy_over,
        want_entropy,
        want_sum_sq,
        chunk_rows(hidden.device, weight, dtype, max_extra_bytes),
    )
    return LogProbs(*LinearLogProbs.apply(hidden, weight, bias, job))
