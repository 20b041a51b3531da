"""Checks of the ops' arguments, all before any work: ValueError naming argument, value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def check_head(
    hidden: Tensor,
    weight: Tensor,
    rows: Mapping[str, Tensor | None],
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    operand_dtype: torch.dtype | None,
) -> None:
    """Shapes, devices, types and ranges common to the ops; `rows` are arguments of length T.

    `operand_dtype` is autocast's, to which both operands will be cast. ValueError before any work.
    """
    if hidden.ndim != 2:
        raise ValueError(f"hidden must be (T, H), got shape {tuple(hidden.shape)}; flatten batch and sequence first")
    if weight.ndim != 2 or weight.numel() == 0:
        raise ValueError(f"weight must be (V, H) and not empty, got {tuple(weight.shape)}; gather a sharded head first")
    if hasattr(weight, "full_tensor"):
        raise ValueError(
            "weight is a DTensor; give weight.full_tensor(), or call the op where FSDP has unsharded the head"
        )
    if hidden.shape[1] != weight.shape[1]:
        looks = "; hidden looks like logits" if hidden.shape[1] == weight.shape[0] else ""
        raise ValueError(f"hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)}: H differs{looks}")
    same = hidden.dtype == weight.dtype or operand_dtype is not None
    if not hidden.is_floating_point() or not weight.is_floating_point() or not same:
        raise ValueError(f"hidden and weight must be of one float type, got {hidden.dtype} and {weight.dtype}")
    if weight.device != hidden.device:
        raise ValueError(f"weight must be on {hidden.device} like hidden, got {weight.device}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.device != weight.device):
        wanted = f"(V,) = {tuple(weight.shape[:1])} on {weight.device}"
        raise ValueError(f"bias must be {wanted}, got {tuple(bias.shape)} on {bias.device}")
    if isinstance(temperature, Tensor):
        rows = {**rows, "temperature": temperature}
    for name in ("targets", "weights", "temperature"):
        value = rows.get(name)
        if value is not None and value.ndim != 1:
            raise ValueError(f"{name} must be (T,) = ({hidden.shape[0]},), got {tuple(value.shape)}")
    for name, value in rows.items():
        if value is not None and (value.shape[:1] != hidden.shape[:1] or value.device != hidden.device):
            wanted = f"{hidden.shape[0]} rows on {hidden.device}"
            raise ValueError(f"{name} must have {wanted}, got {tuple(value.shape)} on {value.device}")
    check_positive("softcap", softcap)
    if not isinstance(temperature, Tensor):
        check_positive("temperature", temperature)
    elif temperature.device.type == "cpu" and not bool((temperature > 0).logical_and(temperature.isfinite()).all()):
        raise ValueError(f"temperature must be > 0 and finite, got {temperature.min().item()} as its smallest entry")


def check_positive(name: str, value: float | None) -> None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be > 0 and finite, got {value}")


def check_targets(targets: Tensor, num_classes: int, ignore_index: int | None) -> None:
    """Targets outside [0, V) are found where looking costs no device sync; `ignore_index` may be one of them."""
    if targets.dtype not in (torch.int32, torch.int64) or targets.ndim != 1:
        raise ValueError(f"targets must be (T,) int32 or int64, got {tuple(targets.shape)} {targets.dtype}")
    if targets.device.type != "cpu":
        return
    bad = (targets < 0) | (targets >= num_classes)
    bad = bad if ignore_index is None else bad & (targets != ignore_index)
    if bool(bad.any()):
        ignored = "" if ignore_index is None else f" or {ignore_index}"
        raise ValueError(f"targets must be in [0, {num_classes}){ignored}, got {targets[bad][0].item()}")


def check_loss(
    scope: str,
    cu_seqlens: Tensor | None,
    grad_weight_out: Tensor | None,
    sparse_tolerance: float | None,
    hidden: Tensor,
    weight: Tensor,
) -> None:
    check_positive("sparse_tolerance", sparse_tolerance)
    if scope == "sequence" and cu_seqlens is None:
        raise ValueError("token_loss has scope 'sequence': it needs cu_seqlens (N+1,)")
    if cu_seqlens is not None and (cu_seqlens.ndim != 1 or cu_seqlens.numel() == 0):
        raise ValueError(f"cu_seqlens must be (N+1,), got {tuple(cu_seqlens.shape)}")
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
        spans = int(cu_seqlens[0]) == 0 and int(cu_seqlens[-1]) == hidden.shape[0]
        if not spans or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(f"cu_seqlens must rise from 0 to T = {hidden.shape[0]}, got {cu_seqlens.tolist()[:8]}")
    if grad_weight_out is not None and (
        grad_weight_out.shape != weight.shape
        or grad_weight_out.dtype != torch.float32
        or grad_weight_out.device != weight.device
    ):
        got = f"{tuple(grad_weight_out.shape)} {grad_weight_out.dtype} on {grad_weight_out.device}"
        raise ValueError(f"grad_weight_out must be fp32 {tuple(weight.shape)} on {weight.device}, got {got}")
