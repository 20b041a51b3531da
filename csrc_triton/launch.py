"""What every op does before its first product: checks of its arguments, the chunk size, the mode of fp32 products."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

DEFAULT_EXTRA_BYTES = {"cpu": 160 << 20, "cuda": 6 << 30}


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Logits are never rounded below fp32; fp64 inputs (gradcheck) stay fp64."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


@contextlib.contextmanager
def exact_bf16_products(active: bool) -> Iterator[None]:
    """fp32 tensors that hold bf16 values multiply on bf16 units with an fp32 result: exact operands, no rounded logits.

    The switch is process-wide, so it is set around the product alone and put back.
    """
    if not active:
        yield
        return
    switch = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]  # set at run time
    before = switch.fp32_precision
    switch.fp32_precision = "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before


def chunk_rows(device: torch.device, weight: Tensor, dtype: torch.dtype, max_extra_bytes: int | None) -> int:
    """Rows of logits worked on at a time.

    Two (C, V) buffers and, unless it is one already, a weight copy fit the budget.
    """
    budget = (
        max_extra_bytes
        if max_extra_bytes is not None
        else DEFAULT_EXTRA_BYTES.get(device.type, DEFAULT_EXTRA_BYTES["cpu"])
    )
    size = torch.finfo(dtype).bits // 8
    copy = 0 if weight.dtype == dtype else weight.numel() * size
    rows = (budget - copy) // (2 * size * weight.shape[0])
    return max(64, rows // 16 * 16)


def chunks(rows: Tensor, num_rows: int) -> tuple[Tensor, ...]:
    """Row indices in chunks of `num_rows`; none at all for no rows."""
    return rows.split(num_rows) if rows.numel() else ()


def row_temperatures(temperature: float | Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Temperature of each row, (T,)."""
    if isinstance(temperature, Tensor):
        return temperature.to(dtype)
    return torch.full((hidden.shape[0],), temperature, dtype=dtype, device=hidden.device)


def under_autocast(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden and weight in the autocast type, cast once a call, where autocast is on."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return hidden, weight
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype)


def check_head(
    hidden: Tensor,
    weight: Tensor,
    rows: Mapping[str, Tensor | None],
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    backend: str,
) -> None:
    """Shapes, devices, types and ranges common to the ops; `rows` are arguments of length T.

    ValueError before any work.
    """
    if backend not in ("auto", "torch"):
        raise ValueError(f"backend must be 'auto' or 'torch', got {backend!r}")
    if hidden.ndim != 2:
        raise ValueError(f"hidden must be (T, H), got shape {tuple(hidden.shape)}; flatten batch and sequence first")
    if weight.ndim != 2 or weight.numel() == 0:
        raise ValueError(f"weight must be (V, H) and not empty, got {tuple(weight.shape)}; gather a sharded head first")
    if hidden.shape[1] != weight.shape[1]:
        looks = "; hidden looks like logits" if hidden.shape[1] == weight.shape[0] else ""
        raise ValueError(f"hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)}: H differs{looks}")
    if not hidden.is_floating_point() or hidden.dtype != weight.dtype:
        raise ValueError(f"hidden and weight must be of one float type, got {hidden.dtype} and {weight.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be (V,) = {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    if isinstance(temperature, Tensor):
        rows = {**rows, "temperature": temperature}
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


def check_targets(targets: Tensor, num_classes: int, ignore_index: int) -> None:
    """Targets outside [0, V) are found where looking costs no device sync."""
    if targets.dtype not in (torch.int32, torch.int64) or targets.ndim != 1:
        raise ValueError(f"targets must be (T,) int32 or int64, got {tuple(targets.shape)} {targets.dtype}")
    if targets.device.type != "cpu":
        return
    bad = ((targets < 0) | (targets >= num_classes)) & (targets != ignore_index)
    if bool(bad.any()):
        raise ValueError(f"targets must be in [0, {num_classes}) or {ignore_index}, got {targets[bad][0].item()}")
