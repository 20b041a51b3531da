"""Matrix products that take bf16, fp16 or fp32 operands and give fp32, on CUDA; plain products elsewhere."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

SWITCHING = threading.RLock()  # a product may stand inside another's setting


@contextlib.contextmanager
def ieee_fp32(active: bool) -> Iterator[None]:
    """fp32 operands are multiplied as fp32, never as TF32.

    The switch is process-wide, so it is put back, and one thread at a time holds it. It is the newer one: reading
    `torch.get_float32_matmul_precision()` raises for a user who has set this one.
    """
    if not active:
        yield
        return
    switch = torch.backends.cuda.matmul
    with SWITCHING:
        before = switch.fp32_precision
        switch.fp32_precision = "ieee"
        try:
            yield
        finally:
            switch.fp32_precision = before


@contextlib.contextmanager
def exact_products(hidden: Tensor) -> Iterator[None]:
    """fp32 products of operands that hold values of `hidden`'s type: none is rounded, the result is fp32.

    bf16 values may run on a CPU's bf16 units, for which fp32 tensors are allowed to be narrowed; others may not.
    """
    if hidden.device.type == "cuda":
        with ieee_fp32(True):
            yield
        return
    switch = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]  # set at run time
    with SWITCHING:
        before = switch.fp32_precision
        switch.fp32_precision = "bf16" if hidden.dtype == torch.bfloat16 else "ieee"
        try:
            yield
        finally:
            switch.fp32_precision = before


def mm_fp32(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """out = left @ right in fp32, whatever the operands' type."""
    if narrow_on_gpu(left) and mm_widens(left.device, left.dtype):
        return widening_mm(left, right, out)
    with ieee_fp32(left.device.type == "cuda"):
        return torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def addmm_fp32_(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """out += left @ right in fp32, in place."""
    if narrow_on_gpu(left):
        if addmm_widens(left.device, left.dtype):
            return widening_addmm_(left, right, out)
        if mm_widens(left.device, left.dtype):
            out += torch.mm(left, right, out_dtype=torch.float32)  # pyright: ignore[reportCallIssue]
            return out
    with ieee_fp32(left.device.type == "cuda"):
        return out.addmm_(left.to(out.dtype), right.to(out.dtype))


def narrow_on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype != torch.float32


def widening_mm(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    return torch.mm(left, right, out_dtype=torch.float32, out=out)  # pyright: ignore[reportCallIssue]


def widening_addmm_(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    return torch.addmm(out, left, right, out_dtype=torch.float32, out=out)  # pyright: ignore[reportCallIssue]


@functools.cache
def mm_widens(device: torch.device, dtype: torch.dtype) -> bool:
    """This PyTorch takes operands of the type to an fp32 product on this device; with a warning where it does not."""
    found = runs(widening_mm, device, dtype)
    if not found:
        warnings.warn(f"no product of {dtype} gives fp32 on {device}: operands are widened, slowly", stacklevel=3)
    return found


@functools.cache
def addmm_widens(device: torch.device, dtype: torch.dtype) -> bool:
    """The same, added to an fp32 matrix in place."""
    return runs(widening_addmm_, device, dtype)


def runs(product: Callable[[Tensor, Tensor, Tensor], Tensor], device: torch.device, dtype: torch.dtype) -> bool:
    operand = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        product(operand, operand, torch.zeros(16, 16, device=device))
    except RuntimeError:
        return False
    return True
