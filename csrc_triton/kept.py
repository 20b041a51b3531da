"""Log-probabilities over kept sets of ids, by gathering: work and memory grow with the members, never with T x V.

A sampler that cut its distribution (top-p, top-k) drew from softmax over the ids it kept; the ratio to it needs the
same softmax. Each row's set comes as CSR, `(indptr (T+1,) int64, ids (nnz,) int32 or int64)`; the target is always a
member, and an id listed twice counts once. Formulas: `head.py`, with the set in place of the vocabulary.

Letters: T rows, H hidden size, V vocabulary, N members of all sets together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csrc_triton.head import Head, HeadGrads, Rows, Upstream
from csrc_triton.launch import has_triton

LOWEST = -1e30  # z of a banned id; finite, so that 0 * LOWEST is 0 and never nan
CHUNK_NUMBERS = 1 << 20  # numbers of gathered rows held at a time on a CPU
STATS_LAUNCH: dict[str, Any] = {"BLOCK_K": 8, "BLOCK_H": 256, "num_warps": 4, "enable_fp_fusion": True}
SUMS_LAUNCH: dict[str, Any] = {"BLOCK_E": 16, "BLOCK_H": 256, "num_warps": 4, "enable_fp_fusion": True}


def check_kept(kept: tuple[Tensor, Tensor], num_rows: int, num_classes: int) -> None:
    """Shapes and types; values where looking costs no device sync. ValueError before any work."""
    indptr, ids = kept
    if indptr.shape != (num_rows + 1,):
        raise ValueError(f"kept[0] must be (T+1,) = ({num_rows + 1},), got {tuple(indptr.shape)}")
    if indptr.dtype != torch.int64:
        raise ValueError(f"kept[0] must be int64, got {indptr.dtype}")
    if ids.ndim != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"kept[1] must be (nnz,) int32 or int64, got {tuple(ids.shape)} {ids.dtype}")
    if indptr.device.type != "cpu":
        return
    if int(indptr[0]) != 0 or bool((indptr.diff() < 0).any()):
        raise ValueError("kept[0] must start at 0 and never fall")
    if int(indptr[-1]) != ids.shape[0]:
        raise ValueError(f"kept[1] must hold kept[0][-1] = {int(indptr[-1])} ids, got {ids.shape[0]}")
    bad = (ids < 0) | (ids >= num_classes)
    if bool(bad.any()):
        raise ValueError(f"kept[1] must be in [0, {num_classes}), got {int(ids[bad][0])}")


def kept_of_rows(kept: tuple[Tensor, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    """The sets of some rows (R,) int64, in their order."""
    indptr, ids = kept
    sizes = indptr.diff()[rows]
    ends = sizes.cumsum(0)
    shift = torch.repeat_interleave(indptr[rows] - (ends - sizes), sizes)
    at = torch.arange(shift.shape[0], device=ids.device) + shift
    return torch.cat([ends.new_zeros(1), ends]), ids[at]


class Members(NamedTuple):
    """Sets row by row, each id once and rising; an id of V is one that was not in [0, V) and makes its row nan."""

    indptr: Tensor  # (T + 1,) int64
    ids: Tensor  # (N,) int64
    rows: Tensor  # (N,) int64, rising


class KeptStats(NamedTuple):
    logprobs: Tensor  # (T,) nats, never above 0, as all that follows over the row's set
    lse: Tensor  # (T,) nats
    entropy: Tensor | None  # (T,) nats, centred
    sum_sq: Tensor | None  # (T,)
    top: Tensor  # (T,) the largest z
    log_s: Tensor  # (T,) log of sum e^(z - top)
    z: Tensor  # (N,) logits over temperature
    members: Members


def make_members(kept: tuple[Tensor, Tensor], targets: Tensor, num_classes: int) -> Members:
    """The sets with their targets, without repetitions; one device sync, for their number."""
    indptr, ids = kept
    every = torch.arange(targets.shape[0], device=targets.device)
    rows = torch.cat([torch.repeat_interleave(every, indptr.diff(), output_size=ids.shape[0]), every])
    ids = torch.cat([ids.long(), targets.long()])
    ids = torch.where((ids < 0) | (ids >= num_classes), num_classes, ids)
    unique = torch.unique(rows * (num_classes + 1) + ids)
    rows = unique // (num_classes + 1)
    ends = torch.arange(targets.shape[0] + 1, device=targets.device)
    return Members(torch.searchsorted(rows, ends), unique - rows * (num_classes + 1), rows)


def use_kernels(hidden: Tensor, backend: str) -> bool:
    return backend != "torch" and hidden.device.type == "cuda" and hidden.dtype != torch.float64 and has_triton()


def kept_logprobs(
    head: Head,
    rows: Rows,
    kept: tuple[Tensor, Tensor],
    want_entropy: bool,
    want_sum_sq: bool,
    backend: str = "auto",
) -> KeptStats:
    """Statistics of each row over its kept set; what `kept_backward` needs lies in the result. See `check_kept`.

    A set of one gives log-probability and entropy exactly 0. fp32, fp64 for fp64 hidden states.
    """
    members = make_members(kept, rows.targets, head.weight.shape[0])
    stats = launch_stats if use_kernels(rows.hidden, backend) else torch_stats
    return stats(head, rows, members, want_entropy, want_sum_sq)


def kept_backward(
    head: Head, rows: Rows, stats: KeptStats, up: Upstream, grads: HeadGrads, backend: str = "auto"
) -> Tensor | None:
    """Add dW and dbias, return dX (T, H) fp32 (fp64 for fp64). Rows without upstream gradient add exactly nothing."""
    dlin = member_dlin(head, rows, stats, up)
    if use_kernels(rows.hidden, backend):
        return launch_backward(head, rows, stats.members, dlin, grads)
    return torch_backward(head, rows, stats.members, dlin, grads)


def member_dlin(head: Head, rows: Rows, stats: KeptStats, up: Upstream) -> Tensor:
    """d(loss)/d(x W') of every member, (N,). The target's 1 - p comes without cancellation."""
    row, ids = stats.members.rows, stats.members.ids
    log_p = (stats.z - stats.top[row]) - stats.log_s[row]
    p = log_p.exp()
    dz = torch.zeros_like(p)
    if up.logprobs is not None:
        dz = up.logprobs[row] * torch.where(ids == rows.targets[row], -torch.expm1(log_p), -p)
    if up.entropy is not None:
        assert stats.entropy is not None, "a gradient of what was not asked for"
        dz -= up.entropy[row] * p * (log_p + stats.entropy[row])
    if up.sum_sq is not None:
        assert stats.sum_sq is not None, "a gradient of what was not asked for"
        dz += 2 * up.sum_sq[row] * p * (p - stats.sum_sq[row])
    tau = rows.temperature[row]
    if head.softcap is not None:
        dz *= 1 - (stats.z * (tau / head.softcap)).clamp(-1, 1).square()
    return dz * (head.logit_scale / tau)


def launch_stats(head: Head, rows: Rows, members: Members, want_entropy: bool, want_sum_sq: bool) -> KeptStats:
    """Statistics by the gather kernel, one program per row."""
    from csrc_triton.kept_kernels import kept_stats_kernel

    num_rows = rows.hidden.shape[0]
    new = lambda size=num_rows: torch.empty(size, dtype=torch.float32, device=rows.hidden.device)  # noqa: E731
    entropy, sum_sq = new() if want_entropy else None, new() if want_sum_sq else None
    stats = KeptStats(new(), new(), entropy, sum_sq, new(), new(), new(members.ids.shape[0]), members)
    if num_rows == 0:
        return stats
    with torch.cuda.device_of(stats.z):
        kept_stats_kernel[(num_rows,)](
            rows.hidden,
            head.weight,
            head.bias,
            rows.temperature.contiguous(),
            rows.targets.contiguous(),
            members.indptr,
            members.ids,
            stats.z,
            stats.logprobs,
            stats.lse,
            stats.entropy,
            stats.sum_sq,
            stats.top,
            stats.log_s,
            head.weight.shape[0],
            head.weight.shape[1],
            rows.hidden.stride(0),
            head.weight.stride(0),
            float(head.logit_scale),
            head.softcap,
            **STATS_LAUNCH,
        )
    return stats


def launch_sums(
    source: Tensor, index: Tensor, weights: Tensor, indptr: Tensor, out_rows: Tensor | None, out: Tensor
) -> None:
    """out[s] = sum of weights[e] source[index[e]] over the entries of segment s; added to out[out_rows[s]] if given."""
    from csrc_triton.kept_kernels import weighted_sums_kernel

    num_segments, width = indptr.shape[0] - 1, source.shape[1]
    tiles = (width + SUMS_LAUNCH["BLOCK_H"] - 1) // SUMS_LAUNCH["BLOCK_H"]
    if num_segments == 0:
        return
    with torch.cuda.device_of(out):
        weighted_sums_kernel[(num_segments * tiles,)](
            source,
            index,
            weights,
            indptr,
            out_rows,
            out,
            source.shape[0],
            out.shape[0],
            width,
            source.stride(0),
            out.stride(0),
            **SUMS_LAUNCH,
        )


def launch_backward(head: Head, rows: Rows, members: Members, dlin: Tensor, grads: HeadGrads) -> Tensor | None:
    """dX by rows, dW by ids: members sorted by id, so that each sum has one owner and a fixed order."""
    dx = None
    if grads.want_hidden:
        dx = torch.empty(rows.hidden.shape, dtype=torch.float32, device=dlin.device)
        launch_sums(head.weight, members.ids, dlin, members.indptr, None, dx)
    if grads.weight is None and grads.bias is None:
        return dx
    ids, order = torch.sort(members.ids, stable=True)
    ids, counts = torch.unique_consecutive(ids, return_counts=True)
    by_id = dlin[order]
    if grads.weight is not None:
        indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        launch_sums(rows.hidden, members.rows[order], by_id, indptr, ids, grads.weight)
    if grads.bias is not None:
        sums = torch.segment_reduce(by_id, "sum", lengths=counts)
        grads.bias.index_add_(0, ids.clamp(max=grads.bias.shape[0] - 1), sums)  # V: nan, whose row is nan anyhow
    return dx


def chunks(num: int, width: int) -> Iterator[slice]:
    """Members in chunks whose gathered rows stay small."""
    step = max(1, CHUNK_NUMBERS // width)
    return (slice(start, start + step) for start in range(0, num, step))


def torch_stats(head: Head, rows: Rows, members: Members, want_entropy: bool, want_sum_sq: bool) -> KeptStats:
    """Statistics in PyTorch on any device."""
    dtype = torch.float64 if rows.hidden.dtype == torch.float64 else torch.float32
    ids, row = members.ids, members.rows
    z = torch.empty(ids.shape[0], dtype=dtype, device=ids.device)
    known = ids.clamp(max=head.weight.shape[0] - 1)
    for at in chunks(ids.shape[0], rows.hidden.shape[1]):
        torch.linalg.vecdot(head.weight[known[at]].to(dtype), rows.hidden[row[at]].to(dtype), out=z[at])
    if head.bias is not None:
        z += head.bias[known]
    z *= head.logit_scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    z = (z / rows.temperature[row]).clamp(min=LOWEST).masked_fill(ids != known, float("nan"))

    reduce = lambda value, how="sum": torch.segment_reduce(value, how, offsets=members.indptr)  # noqa: E731
    top = reduce(z, "max")
    d = z - top[row]
    e = d.exp()
    s = reduce(e)
    log_s = s.log()
    z_y = reduce(z.masked_fill(ids != rows.targets[row], 0.0))
    return KeptStats(
        (z_y - top) - log_s,
        top + log_s,
        log_s - reduce(e * d) / s if want_entropy else None,
        reduce(e.square()) / s.square() if want_sum_sq else None,
        top,
        log_s,
        z,
        members,
    )


def torch_backward(head: Head, rows: Rows, members: Members, dlin: Tensor, grads: HeadGrads) -> Tensor | None:
    """Members of coefficient 0 are left out, which is exact. Deterministic on a CPU."""
    live = torch.nonzero(dlin)[:, 0]
    ids, row, dlin = members.ids[live].clamp(max=head.weight.shape[0] - 1), members.rows[live], dlin[live]
    dx = torch.zeros(rows.hidden.shape, dtype=dlin.dtype, device=dlin.device) if grads.want_hidden else None
    for at in chunks(ids.shape[0], rows.hidden.shape[1]):
        if dx is not None:
            dx.index_add_(0, row[at], dlin[at, None] * head.weight[ids[at]])
        if grads.weight is not None:
            grads.weight.index_add_(0, ids[at], dlin[at, None] * rows.hidden[row[at]])
    if grads.bias is not None:
        grads.bias.index_add_(0, ids, dlin)
    return dx
