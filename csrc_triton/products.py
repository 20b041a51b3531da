"""Matrix products that take bf16, fp16 or fp32 operands and give fp32, on CUDA; plain products elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def ieee_fp32(active: bool) -> Iterator[None]:
    """fp32 operands are multiplied as fp32, never as TF32; the switch is process-wide and put back."""
    if not active:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def mm_fp32(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """out = left @ right in fp32, whatever the operands' type."""
    if left.device.type == "cuda" and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32, out=out)  # pyright: ignore[reportCallIssue]
    with ieee_fp32(left.device.type == "cuda"):
        return torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def addmm_fp32_(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """out += left @ right in fp32, in place."""
    if left.device.type == "cuda" and left.dtype != torch.float32:
        return torch.addmm(out, left, right, out_dtype=torch.float32, out=out)  # pyright: ignore[reportCallIssue]
    with ieee_fp32(left.device.type == "cuda"):
        return out.addmm_(left.to(out.dtype), right.to(out.dtype))
