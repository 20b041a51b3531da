"""Token log-probabilities and entropies from hidden states and the LM head, chunk by chunk: never a (T, V) tensor.

Forward keeps three numbers a row beside its inputs; backward works each chunk's logits out again, and only for rows
with a gradient. Gradients add up in fp32 and are rounded once. A kept set (top-p or top-k of the sampler) takes the
gather path of `kept.py`; entropy over the whole vocabulary is then a second, independent op. Formulas: `head.py`.
Twin: `reference.linear_logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_triton.backends import open_backend
from csrc_triton.checks import check_head, check_targets
from csrc_triton.head import Head, HeadGrads, Rows, RowStats, Upstream, make_head
from csrc_triton.kept import check_kept, kept_backward, kept_logprobs, kept_of_rows
from csrc_triton.launch import choose_backend, operand_dtype, operands, row_temperatures, scaled, split
from csrc_triton.rows import compute_dtype

ENTROPY_OVER = ("vocab", "kept")


class LogProbs(NamedTuple):
    logprobs: Tensor  # (T,) nats
    entropy: Tensor | None  # (T,) nats
    lse: Tensor  # (T,) log-sum-exp of the logits over temperature; carries no gradient
    sum_sq: Tensor | None  # (T,) sum of squared probabilities


def spread(rows: Tensor, values: Tensor | None, num_rows: int, like: Tensor) -> Tensor:
    """(T,) with `values` at `rows` and 0 elsewhere; empty where there are no values."""
    if values is None:
        return like.new_empty(0, dtype=compute_dtype(like))
    return values.new_zeros(num_rows).index_copy_(0, rows, values)


def live_rows(upstream: Upstream, targets: Tensor, ignore_index: int) -> Tensor:
    """Rows that are not ignored and have any gradient."""
    live = torch.zeros_like(targets, dtype=torch.bool)
    for grad in upstream:
        live = live if grad is None else live | (grad != 0)
    return torch.nonzero(live & (targets != ignore_index))[:, 0]


def new_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: list[bool], dtype: torch.dtype
) -> tuple[Tensor | None, HeadGrads]:
    new = lambda like, wanted: torch.zeros_like(like, dtype=dtype) if wanted and like is not None else None  # noqa: E731
    return new(hidden, needed[0]), HeadGrads(new(weight, needed[1]), new(bias, needed[2]), needed[0])


def rounded(grad: Tensor | None, like: Tensor | None) -> Tensor:
    """The gradient in its parameter's type; empty for None, which a custom op cannot return."""
    if grad is None or like is None:
        return torch.empty(0)
    return grad if grad.dtype == like.dtype else scaled(grad, grad.new_ones(()), like.dtype)


def fake_vector(hidden: Tensor, operand: torch.dtype | None) -> Callable[..., Tensor]:
    dtype = compute_dtype(hidden) if operand is None else torch.float32
    return lambda wanted=True: hidden.new_empty(hidden.shape[0] if wanted else 0, dtype=dtype)


def fake_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    like = lambda x, wanted: torch.empty_like(x) if wanted and x is not None else torch.empty(0)  # noqa: E731
    return like(hidden, needed[0]), like(weight, needed[1]), like(bias, needed[2])


@torch.library.custom_op("e3fast::linear_logprobs", mutates_args=())
def forward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    logit_scale: float,
    softcap: float | None,
    want_entropy: bool,
    want_sum_sq: bool,
    ignore_index: int,
    max_extra_bytes: int | None,
    backend: str,
    operand: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logprobs, lse, entropy, sum_sq, top, log_s, (T,) each; empty where not wanted."""
    check_targets(targets, weight.shape[0], ignore_index)
    asked = torch.nonzero(targets != ignore_index)[:, 0]
    found: list[RowStats] = []
    with operands(hidden, weight, operand) as (x, w):
        chunks = open_backend(backend, make_head(w, bias, logit_scale, softcap), x, max_extra_bytes)
        for rows in split(asked, chunks.num_rows):
            chunk = Rows(x[rows], temperature[rows], targets[rows].long())
            found.append(chunks.forward(chunk, want_entropy=want_entropy, want_sum_sq=want_sum_sq, want_grad=False))
    joined = [torch.cat(values) if values[0] is not None else None for values in zip(*found, strict=True)]
    if not found:
        empty = x.new_empty(0, dtype=compute_dtype(x))
        joined = [empty, empty, empty if want_entropy else None, empty if want_sum_sq else None, empty, empty]
    logprobs, lse, entropy, sum_sq, top, log_s = (spread(asked, v, hidden.shape[0], x) for v in joined)
    return logprobs, lse, entropy, sum_sq, top, log_s


@forward_op.register_fake
def _(
    hidden: Tensor, weight: Any, bias: Any, targets: Any, temperature: Any, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, _, want_entropy, want_sum_sq, *_, operand = options
    new = fake_vector(hidden, operand)
    return new(), new(), new(want_entropy), new(want_sum_sq), new(), new()


def gradients_of(
    rows: Tensor,
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: Tensor,
    stats: list[Tensor],
    upstream: Upstream,
    grads: HeadGrads,
    max_extra_bytes: int | None,
    backend: str,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Rows and their dX, part by part; dW and dbias are added into `grads`. `stats` are what the forward returned."""

    def cut(part: Tensor) -> tuple[Rows, Upstream]:
        return Rows(hidden[part], temperature[part], targets[part].long()), upstream.pick(part)

    if choose_backend(backend, hidden) == "triton":
        from csrc_triton.stream import SLAB, slab_backward

        logprobs, lse, entropy, sum_sq, top, log_s = (value[rows] if value.numel() else None for value in stats)
        chunk, up = cut(rows)
        known = RowStats(logprobs, lse, entropy, sum_sq, top, log_s)  # pyright: ignore[reportArgumentType]
        yield rows, slab_backward(head, chunk, known, up, grads, SLAB)
        return
    chunks = open_backend(backend, head, hidden, max_extra_bytes)
    for part in split(rows, chunks.num_rows):
        chunk, up = cut(part)
        wanted = {"want_entropy": up.entropy is not None, "want_sum_sq": up.sum_sq is not None}
        chunks.forward(chunk, **wanted, want_grad=True)
        yield part, chunks.backward(None, up, grads)


@torch.library.custom_op("e3fast::linear_logprobs_backward", mutates_args=())
def backward_op(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_sum_sq: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    stats: list[Tensor],
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    max_extra_bytes: int | None,
    backend: str,
    operand: torch.dtype | None,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by hidden, weight and bias in their types; empty where not needed."""
    with operands(hidden, weight, operand) as (x, w):
        dtype, head = compute_dtype(x), make_head(w, bias, logit_scale, softcap)
        given = (grad_logprobs, grad_entropy, grad_sum_sq)
        upstream = Upstream(*(grad.to(dtype) if grad is not None else None for grad in given))
        rows = live_rows(upstream, targets, ignore_index)
        dx, grads = new_gradients(hidden, weight, bias, needed, dtype)
        for part, found in gradients_of(
            rows, x, head, targets, temperature, stats, upstream, grads, max_extra_bytes, backend
        ):
            if dx is not None and found is not None:
                dx[part] = found
    return rounded(dx, hidden), rounded(grads.weight, weight), rounded(grads.bias, bias)


@backward_op.register_fake
def _(
    grad_logprobs: Any, grad_entropy: Any, grad_sum_sq: Any, hidden: Tensor, weight: Tensor, bias: Any, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(hidden, weight, bias, rest[-1])


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.options = inputs[5:]
    ctx.save_for_backward(*inputs[:5], *output)
    _, lse, _, _, top, log_s = output
    ctx.mark_non_differentiable(lse, top, log_s)
    ctx.set_materialize_grads(False)


def backward(ctx: Any, a: Tensor | None, _lse: Any, b: Tensor | None, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
    hidden, weight, bias, targets, temperature, *stats = ctx.saved_tensors
    logit_scale, softcap, want_entropy, want_sum_sq, ignore_index, max_extra_bytes, backend, operand = ctx.options
    needed = list(ctx.needs_input_grad[:3])
    b, g = b if want_entropy else None, g if want_sum_sq else None
    if a is None and b is None and g is None:
        return (None,) * 13
    grads = backward_op(
        a, b, g, hidden, weight, bias, targets, temperature, stats, logit_scale, softcap, ignore_index, max_extra_bytes,
        backend, operand, needed,
    )  # fmt: skip
    return *(grad if wanted else None for grad, wanted in zip(grads, needed, strict=True)), *(None,) * 10


forward_op.register_autograd(backward, setup_context=save)


@torch.library.custom_op("e3fast::kept_logprobs", mutates_args=())
def kept_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    indptr: Tensor,
    ids: Tensor,
    logit_scale: float,
    softcap: float | None,
    want_entropy: bool,
    want_sum_sq: bool,
    ignore_index: int,
    backend: str,
    operand: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprobs, lse, entropy, sum_sq over each row's kept set, (T,) each; empty where not wanted."""
    check_targets(targets, weight.shape[0], ignore_index)
    check_kept((indptr, ids), hidden.shape[0], weight.shape[0])
    rows = torch.nonzero(targets != ignore_index)[:, 0]
    with operands(hidden, weight, operand) as (x, w):
        chunk, kept = Rows(x[rows], temperature[rows], targets[rows].long()), kept_of_rows((indptr, ids), rows)
        head = make_head(w, bias, logit_scale, softcap)
        found = kept_logprobs(head, chunk, kept, want_entropy, want_sum_sq, backend)
    values = (found.logprobs, found.lse, found.entropy, found.sum_sq)
    logprobs, lse, entropy, sum_sq = (spread(rows, value, hidden.shape[0], x) for value in values)
    return logprobs, lse, entropy, sum_sq


@kept_op.register_fake
def _(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    want_entropy, want_sum_sq, *_, operand = rest[8:]
    new = fake_vector(hidden, operand)
    return new(), new(), new(want_entropy), new(want_sum_sq)


@torch.library.custom_op("e3fast::kept_logprobs_backward", mutates_args=())
def kept_backward_op(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_sum_sq: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    indptr: Tensor,
    ids: Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    backend: str,
    operand: torch.dtype | None,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by hidden, weight and bias in their types; empty where not needed. The sets are gathered once more."""
    with operands(hidden, weight, operand) as (x, w):
        dtype, head = compute_dtype(x), make_head(w, bias, logit_scale, softcap)
        given = (grad_logprobs, grad_entropy, grad_sum_sq)
        upstream = Upstream(*(grad.to(dtype) if grad is not None else None for grad in given))
        rows = live_rows(upstream, targets, ignore_index)
        dx, grads = new_gradients(hidden, weight, bias, needed, dtype)
        chunk, kept = Rows(x[rows], temperature[rows], targets[rows].long()), kept_of_rows((indptr, ids), rows)
        wanted = (upstream.entropy is not None, upstream.sum_sq is not None)
        stats = kept_logprobs(head, chunk, kept, *wanted, backend)
        found = kept_backward(head, chunk, stats, upstream.pick(rows), grads, backend)
    if dx is not None and found is not None:
        dx[rows] = found
    return rounded(dx, hidden), rounded(grads.weight, weight), rounded(grads.bias, bias)


@kept_backward_op.register_fake
def _(
    grad_logprobs: Any, grad_entropy: Any, grad_sum_sq: Any, hidden: Tensor, weight: Tensor, bias: Any, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(hidden, weight, bias, rest[-1])


def save_kept(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, logit_scale, softcap, want_entropy, want_sum_sq, ignore_index, backend, operand = inputs
    ctx.options = (logit_scale, softcap, ignore_index, backend, operand)
    ctx.wanted = (want_entropy, want_sum_sq)
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def backward_kept(ctx: Any, a: Tensor | None, _lse: Any, b: Tensor | None, g: Tensor | None) -> tuple[Any, ...]:
    b, g = b if ctx.wanted[0] else None, g if ctx.wanted[1] else None
    needed = list(ctx.needs_input_grad[:3])
    if a is None and b is None and g is None:
        return (None,) * 14
    grads = kept_backward_op(a, b, g, *ctx.saved_tensors, *ctx.options, needed)
    return *(grad if wanted else None for grad, wanted in zip(grads, needed, strict=True)), *(None,) * 11


kept_op.register_autograd(backward_kept, setup_context=save_kept)


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
    fp32 (fp64 for fp64 inputs). On the "triton" backend a row's values do not depend on the other rows of the call,
    bit for bit; on the others products may be tiled by shape. Raises ValueError naming argument, value and what is
    allowed.
    """
    operand, rows = operand_dtype(hidden.device), {"targets": targets}
    check_head(hidden, weight, rows, bias=bias, temperature=temperature, softcap=softcap, operand_dtype=operand)
    choose_backend(backend, hidden)
    if kept is not None and kept[0].shape != (hidden.shape[0] + 1,):
        raise ValueError(f"kept[0] must be (T+1,) = ({hidden.shape[0] + 1},), got {tuple(kept[0].shape)}")
    if entropy_over not in ENTROPY_OVER:
        raise ValueError(f"entropy_over must be 'vocab' or 'kept', got {entropy_over!r}")
    if kept is not None and not kept[0].device == kept[1].device == hidden.device:
        raise ValueError(f"kept must be on {hidden.device}, got {kept[0].device} and {kept[1].device}")
    tau = row_temperatures(temperature, hidden, compute_dtype(hidden) if operand is None else torch.float32)
    start = (hidden, weight, bias, targets, tau)
    if kept is None:
        logprobs, lse, entropy, sum_sq, _, _ = forward_op(
            *start, logit_scale, softcap, want_entropy, want_sum_sq, ignore_index, max_extra_bytes, backend, operand
        )
        return LogProbs(logprobs, entropy if want_entropy else None, lse, sum_sq if want_sum_sq else None)
    over_kept = entropy_over == "kept"
    wanted = (want_entropy and over_kept, want_sum_sq and over_kept)
    logprobs, lse, entropy, sum_sq = kept_op(
        *start, *kept, logit_scale, softcap, *wanted, ignore_index, backend, operand
    )
    if (want_entropy or want_sum_sq) and not over_kept:
        _, _, entropy, sum_sq, _, _ = forward_op(
            *start, logit_scale, softcap, want_entropy, want_sum_sq, ignore_index, max_extra_bytes, backend, operand
        )
    return LogProbs(logprobs, entropy if want_entropy else None, lse, sum_sq if want_sum_sq else None)
