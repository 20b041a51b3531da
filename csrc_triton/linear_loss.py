"""One-pass policy loss from hidden states and the LM head: the gradient is formed inside the forward, chunk by chunk.

A per-token loss needs only its row's log-probability and entropy, so both gradients of a chunk are finished while its
logits are at hand: three products instead of four. Rows whose coefficient is exactly zero leave the two backward
products; that is exact. A loss of whole sequences is cut at their ends; one of the whole batch, or a sequence longer
than a chunk, takes the second form: all statistics first, then each live chunk once more for its gradient. Formulas:
`head.py`. Twin: `reference.linear_grpo_loss`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from csrc_triton.backends import open_backend
from csrc_triton.checks import check_head, check_loss, check_targets
from csrc_triton.head import ChunkBackend, HeadGrads, Rows, RowStats, Upstream, make_head
from csrc_triton.launch import operand_dtype, operands, row_temperatures, scaled, split
from csrc_triton.losses import Chunk, TokenLoss, scope_of
from csrc_triton.rows import compute_dtype

log = logging.getLogger(__name__)


class LinearLoss(NamedTuple):
    loss: Tensor  # fp32 scalar, the only differentiable field
    logprobs: Tensor  # (T,), 0 at rows of weight 0
    entropy: Tensor | None  # (T,), 0 at rows of weight 0
    metrics: dict[str, Tensor]  # what the token loss reported, and num_rows
    num_live: Tensor  # rows with a non-zero coefficient


class Job(NamedTuple):
    targets: Tensor  # (T,)
    weights: Tensor  # (T,)
    temperature: Tensor  # (T,)
    token_data: Mapping[str, Tensor]
    token_loss: TokenLoss
    scope: str
    seq_ids: Tensor | None  # (T,)
    logit_scale: float
    softcap: float | None
    want_entropy: bool
    want_grad: bool
    drop_zero_rows: bool
    loss_scale: Tensor | None
    max_extra_bytes: int | None
    backend: str
    sparse_tolerance: float | None
    operand: torch.dtype | None  # autocast's
    metrics: dict[str, Tensor]  # filled by the forward


class Coefficients(NamedTuple):
    loss: Tensor  # scalar
    up: Upstream  # (C,)
    live: Tensor  # (C,) bool: a or b is not 0


def coefficients(job: Job, rows: Tensor, stats: RowStats) -> Coefficients:
    """The weighted loss of some rows and its gradients by log-probability and entropy, by the token loss itself."""
    seq_ids, num_seqs = None, 0
    if job.seq_ids is not None:
        found, seq_ids = torch.unique_consecutive(job.seq_ids[rows], return_inverse=True)
        num_seqs = found.shape[0]
    chunk = Chunk({name: value[rows] for name, value in job.token_data.items()}, job.weights[rows], seq_ids, num_seqs)
    with torch.enable_grad():
        logprobs = stats.logprobs.detach().requires_grad_()
        entropy = stats.entropy.detach().requires_grad_() if stats.entropy is not None else None
        terms = job.token_loss(logprobs, entropy, chunk)
        if terms.loss.shape != logprobs.shape:
            got, wanted = tuple(terms.loss.shape), tuple(logprobs.shape)
            raise ValueError(f"token_loss must return a loss of {wanted}, one number a row, got {got}")
        loss = (terms.loss * chunk.weights).sum()
        leaves = [logprobs] if entropy is None else [logprobs, entropy]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else (None, None)
    gather_metrics(job.metrics, terms.metrics)
    a = grads[0] if grads[0] is not None else torch.zeros_like(stats.logprobs)
    b = grads[1] if len(grads) > 1 else None
    if job.loss_scale is not None:
        a, b = a * job.loss_scale, b * job.loss_scale if b is not None else None
    return Coefficients(loss.detach(), Upstream(a, b, None), (a != 0) if b is None else (a != 0) | (b != 0))


def gather_metrics(into: dict[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name, value in found.items():
        value = value.detach() if value.dtype == torch.float64 else value.detach().float()
        now = value.amax() if name.endswith("_max") else value.sum()
        old = into.get(name)
        into[name] = now if old is None else torch.maximum(old, now) if name.endswith("_max") else old + now


class Output(NamedTuple):
    """What the passes fill, row by row."""

    logprobs: Tensor  # (T,)
    entropy: Tensor | None  # (T,)
    hidden: Tensor | None  # (T, H) gradient
    grads: HeadGrads

    def put(self, rows: Tensor, stats: RowStats) -> None:
        self.logprobs[rows] = stats.logprobs
        if self.entropy is not None and stats.entropy is not None:
            self.entropy[rows] = stats.entropy


def one_pass(
    job: Job, backend: ChunkBackend, hidden: Tensor, out: Output, cuts: Iterable[Tensor]
) -> list[Coefficients]:
    found = []
    for rows in cuts:
        chunk = Rows(hidden[rows], job.temperature[rows], job.targets[rows])
        stats = backend.forward(chunk, want_entropy=job.want_entropy, want_sum_sq=False, want_grad=job.want_grad)
        out.put(rows, stats)
        found.append(coefficients(job, rows, stats))
        if job.want_grad:
            backward_rows(job, backend, out, rows, found[-1])
    return found


def two_passes(job: Job, backend: ChunkBackend, hidden: Tensor, out: Output, live_rows: Tensor) -> list[Coefficients]:
    chunk = lambda rows: Rows(hidden[rows], job.temperature[rows], job.targets[rows])  # noqa: E731
    for rows in split(live_rows, backend.num_rows):
        out.put(rows, backend.forward(chunk(rows), want_entropy=job.want_entropy, want_sum_sq=False, want_grad=False))
    pick = lambda x: x[live_rows] if x is not None else None  # noqa: E731
    none = live_rows.new_empty(0)
    stats = RowStats(out.logprobs[live_rows], none, pick(out.entropy), None, none, none)
    found = coefficients(job, live_rows, stats)
    if job.want_grad:
        chosen = found.live if job.drop_zero_rows else torch.ones_like(found.live)
        for index in split(torch.nonzero(chosen)[:, 0], backend.num_rows):
            rows = live_rows[index]
            b = found.up.entropy
            backend.forward(chunk(rows), want_entropy=b is not None, want_sum_sq=False, want_grad=True)
            part = backend.backward(None, found.up.pick(index), out.grads)
            if out.hidden is not None and part is not None:
                out.hidden[rows] = part
    return [found]


def backward_rows(job: Job, backend: ChunkBackend, out: Output, rows: Tensor, found: Coefficients) -> None:
    """Add the chunk's gradients; rows with zero coefficients are left out of both products."""
    keep, up = None, found.up
    if job.drop_zero_rows:
        keep = torch.nonzero(found.live)[:, 0]
        if keep.shape[0] == 0:
            return
        if keep.shape[0] == rows.shape[0]:
            keep = None
    if keep is not None:
        rows, up = rows[keep], up.pick(keep)
    part = backend.backward(keep, up, out.grads)
    if out.hidden is not None and part is not None:
        out.hidden[rows] = part


def whole_sequences(live_rows: Tensor, seq_ids: Tensor, num_rows: int) -> list[Tensor] | None:
    """Chunks of whole sequences, as many as fit; None if one sequence alone does not."""
    sizes = torch.unique_consecutive(seq_ids[live_rows], return_counts=True)[1].tolist()
    if max(sizes, default=0) > num_rows:
        return None
    cuts, filled = [], 0
    for size in sizes:
        if not cuts or filled + size > num_rows:
            cuts.append(0)
            filled = 0
        cuts[-1] += size
        filled += size
    return list(live_rows.split(cuts)) if cuts else []


@functools.cache
def tell_of_long_sequences(num_rows: int) -> None:
    log.warning("a sequence is longer than a chunk of %d rows: two passes, 8THV in place of 6", num_rows)


def run_passes(job: Job, backend: ChunkBackend, hidden: Tensor, out: Output, live_rows: Tensor) -> list[Coefficients]:
    if job.scope == "batch":
        return two_passes(job, backend, hidden, out, live_rows)
    if job.scope == "token":
        return one_pass(job, backend, hidden, out, split(live_rows, backend.num_rows))
    assert job.seq_ids is not None
    cuts = whole_sequences(live_rows, job.seq_ids, backend.num_rows)
    if cuts is None:
        tell_of_long_sequences(backend.num_rows)
        return two_passes(job, backend, hidden, out, live_rows)
    return one_pass(job, backend, hidden, out, cuts)


class LinearGrpoLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job, dw_out: Tensor | None) -> Any:
        need_x, need_w, need_b = (job.want_grad and needed for needed in ctx.needs_input_grad[:3])
        job = job._replace(want_grad=need_x or need_w or need_b)
        with operands(hidden, weight, job.operand) as (x, w):
            dtype, head = compute_dtype(x), make_head(w, bias, job.logit_scale, job.softcap)
            backend = open_backend(job.backend, head, x, job.max_extra_bytes, job.sparse_tolerance)
            zeros = lambda like: torch.zeros_like(like, dtype=dtype)  # noqa: E731
            dw = (dw_out if dw_out is not None else zeros(weight)) if need_w else None
            grads = HeadGrads(dw, zeros(bias) if need_b and bias is not None else None, need_x)
            logprobs = x.new_zeros(x.shape[0], dtype=dtype)
            entropy = torch.zeros_like(logprobs) if job.want_entropy else None
            out = Output(logprobs, entropy, zeros(hidden) if need_x else None, grads)
            live_rows = torch.nonzero(job.weights != 0)[:, 0]
            found = run_passes(job, backend, x, out, live_rows) if live_rows.numel() else []
        loss = sum((part.loss for part in found), start=logprobs.new_zeros(()))
        num_live = sum((part.live.sum() for part in found), start=live_rows.new_zeros(()))
        job.metrics["num_rows"] = torch.tensor(float(live_rows.shape[0]), device=hidden.device)
        ctx.save_for_backward(out.hidden, None if dw_out is not None else grads.weight, grads.bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        ctx.mark_non_differentiable(logprobs, num_live, *([entropy] if entropy is not None else []))
        return loss, logprobs, entropy, num_live

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *_unused: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = (
            scaled(grad, scale, dtype) if grad is not None else None
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*grads, None, None)


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_data: Mapping[str, Tensor],
    token_loss: TokenLoss,
    weights: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
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
    sparse_tolerance: float | None = None,
) -> LinearLoss:
    """Sum over tokens of weights_t * token_loss_t, with gradients by hidden, weight and bias formed in the forward.

    hidden (T, H), weight (V, H), bias (V,), targets (T,), temperature a float or (T,). `weights` (T,) is mask times
    the global normaliser: there is no default. Rows of weight 0 never enter a product, and nothing of `token_data`
    (name -> (T, ...)) is read there. `cu_seqlens` (N+1,) are the sequences' ends, for losses of scope "sequence".
    `grad_weight_out`, fp32 (V, H), takes the weight gradient directly; scale it by `loss_scale` (0-d) and call
    backward with 1. With `sparse_tolerance`, on the "torch" backend, probabilities below 2^-14 leave the backward
    products of every chunk where a bound on the relative error of its gradients stays under it (`sparse.py`; None:
    exact). Not to be put inside activation checkpointing. Raises ValueError naming argument, value and what is allowed.
    """
    operand, rows = operand_dtype(hidden.device), {"targets": targets, "weights": weights, **token_data}
    check_head(hidden, weight, rows, bias=bias, temperature=temperature, softcap=softcap, operand_dtype=operand)
    check_targets(targets.masked_fill(weights == 0, 0), weight.shape[0], None)
    scope = scope_of(token_loss)
    check_loss(scope, cu_seqlens, grad_weight_out, sparse_tolerance, hidden, weight)
    dtype = compute_dtype(hidden) if operand is None else torch.float32
    seq_ids = None
    if cu_seqlens is not None:
        position = torch.arange(hidden.shape[0], device=hidden.device)
        seq_ids = torch.searchsorted(cu_seqlens.to(position), position, right=True)
    job = Job(
        targets.long(),
        weights.to(dtype),
        row_temperatures(temperature, hidden, dtype),
        token_data,
        token_loss,
        scope,
        seq_ids,
        logit_scale,
        softcap,
        want_entropy,
        torch.is_grad_enabled(),
        drop_zero_rows,
        loss_scale,
        max_extra_bytes,
        backend,
        sparse_tolerance,
        operand,
        {},
    )
    loss, logprobs, entropy, num_live = LinearGrpoLoss.apply(hidden, weight, bias, job, grad_weight_out)
    return LinearLoss(loss, logprobs, entropy, job.metrics, num_live)
