"""Where an op runs and with which tiles: backend, chunk size, configurations. No kernel is tuned at run time.

Backends: "torch" is chunked PyTorch on any device; "cublas" takes cuBLAS products and Triton row kernels; "triton" a
persistent streaming kernel for the first product. Triton itself is imported by the kernel files alone, and those
only where they run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MOST_ROWS = 8192  # of a chunk on CUDA: dW is then read and written seldom enough, for 3 % of the products' time
FEW_ROWS = 2048  # below, it takes more than an eighth of it: a warning
FEWEST_ROWS = 256  # below: an error
ROW_MULTIPLE, COLUMN_MULTIPLE = 128, 64  # whole tiles of rows; leading dimensions whose rows start on 128 bytes
BACKENDS = ("auto", "cublas", "triton", "torch")
DEFAULT_EXTRA_BYTES = {"cpu": 128 << 20, "cuda": 6 << 30}


class Config(NamedTuple):
    """Tiles of a matrix kernel: rows x columns x depth; of others, as their line says."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    warp_specialize: bool = False
    flatten: bool = False


# Free of spills under Triton 3.6 and 3.9 (benchmarks/aot.py). T changes with every micro-batch and is no key.
# (kernel, compute capability): configuration; the gate compiles every line. `_softcap` lines, where there is one, are
# for heads with a softcap. block_n of the stats kernels is one number per line of GPUs: statistics with and without a
# gradient then agree bit for bit. Hopper's tiles are tall: a value per column, as pad, bias and target compare need,
# costs a thread 32 registers at 256 x 128 and 64 at 128 x 256, which spills 8 to 440 bytes.
CONFIGS: dict[tuple[str, int], Config] = {
    ("stats", 80): Config(128, 128, 64, 8, 3),
    ("stats", 90): Config(256, 128, 64, 4, 4, warp_specialize=True),
    ("stats", 100): Config(128, 128, 64, 8, 3),
    ("stats_softcap", 100): Config(64, 128, 64, 4, 4),
    ("stats_store", 80): Config(128, 128, 64, 8, 3),
    ("stats_store", 90): Config(256, 128, 64, 4, 3, warp_specialize=True),
    ("stats_store_softcap", 90): Config(128, 128, 64, 4, 4, warp_specialize=True),
    ("stats_store", 100): Config(128, 128, 64, 8, 4),
    ("stats_store_softcap", 100): Config(64, 128, 64, 4, 4),
    ("slab_dz", 80): Config(128, 128, 64, 8, 3),
    ("slab_dz", 90): Config(256, 128, 64, 4, 3, warp_specialize=True),
    ("slab_dz_softcap", 90): Config(128, 128, 64, 4, 4, warp_specialize=True),
    ("slab_dz", 100): Config(128, 128, 64, 8, 3),
    ("combine", 80): Config(32, 0, 32, 4, 1),  # rows, -, tiles of V at a time
    ("combine", 90): Config(32, 0, 32, 4, 1),
    ("combine", 100): Config(32, 0, 32, 4, 1),
    ("dz", 80): Config(32, 128, 0, 8, 1),  # rows, columns at a time
    ("dz", 90): Config(32, 128, 0, 8, 1),
    ("dz", 100): Config(32, 128, 0, 8, 1),
}
# In place of every matrix line of the table:
FP32_CONFIG = Config(64, 64, 16, 4, 2)  # no tensor core multiplies IEEE fp32
POINTER_CONFIG = Config(64, 128, 32, 8, 3)  # rows that TMA cannot take: specialised warps do not compile, others spill


def interpreting() -> bool:
    """Triton's interpreter is on: kernels take CPU tensors, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def arch(device: torch.device) -> int:
    """80, 90 or 100: the newest line of the table that the device runs; the interpreter takes Hopper's."""
    if device.type != "cuda":
        return 90
    major, _ = torch.cuda.get_device_capability(device)
    return 80 if major < 9 else 90 if major < 10 else 100


def choose_backend(backend: str, hidden: Tensor) -> str:
    """The backend that runs, or ValueError saying why the one asked for cannot.

    The streaming kernel pays for small H, where passes over logits cost as much as the products.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    on_gpu = hidden.device.type == "cuda"
    if backend == "auto":
        fits = on_gpu and has_triton() and hidden.dtype != torch.float64
        if not fits or torch.cuda.get_device_capability(hidden.device) < (8, 0):
            return "torch"
        return "triton" if hidden.shape[1] <= 1024 else "cublas"
    if backend == "torch":
        return backend
    if not has_triton():
        raise ValueError(f"backend = {backend!r} needs the package triton; backend = 'torch' runs without it")
    if not on_gpu and not interpreting():
        raise ValueError(f"backend = {backend!r} needs CUDA tensors, got {hidden.device}; 'auto' and 'torch' run there")
    if hidden.dtype == torch.float64:
        raise ValueError(f"backend = {backend!r} takes bf16, fp16 or fp32, got fp64; 'auto' and 'torch' take it")
    return backend


def extra_bytes(device: torch.device, max_extra_bytes: int | None) -> int:
    default = DEFAULT_EXTRA_BYTES.get(device.type, DEFAULT_EXTRA_BYTES["cpu"])
    return max_extra_bytes if max_extra_bytes is not None else default


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@functools.cache
def warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def chunk_rows(hidden: Tensor, weight: Tensor, row_bytes: int, max_extra_bytes: int | None) -> int:
    """Rows of `row_bytes` each that fit the budget beside an fp32 (V, H) gradient; no more than there are, in tiles.

    On CUDA a multiple of 128, and ValueError with the bytes needed where fewer than 256 rows fit (or than there are).
    """
    fixed, budget = 4 * weight.numel(), extra_bytes(hidden.device, max_extra_bytes)
    there = round_up(max(1, hidden.shape[0]), ROW_MULTIPLE)
    rows = min(MOST_ROWS, there, (budget - fixed) // row_bytes)
    if hidden.device.type != "cuda":
        return max(1, rows)
    rows = rows // ROW_MULTIPLE * ROW_MULTIPLE
    wanted = min(FEWEST_ROWS, there)
    if rows < wanted:
        needed = fixed + wanted * row_bytes
        raise ValueError(f"max_extra_bytes must be at least {needed} for this head ({wanted} rows), got {budget}")
    if rows < min(FEW_ROWS, hidden.shape[0]):
        warn_once(f"chunks below {FEW_ROWS} rows are slow: max_extra_bytes leaves room for few logits")
    return rows


def split(rows: Tensor, num_rows: int) -> tuple[Tensor, ...]:
    """Row indices in equal chunks of at most `num_rows`, multiples of 16 but for the last; none for no rows."""
    if rows.numel() == 0:
        return ()
    count = -(-rows.shape[0] // num_rows)
    even = -(-rows.shape[0] // count)
    return rows.split(min(num_rows, -(-even // 16) * 16))


def row_temperatures(temperature: float | Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Temperature of each row, (T,)."""
    if isinstance(temperature, Tensor):
        return temperature.to(dtype)
    return torch.full((hidden.shape[0],), temperature, dtype=dtype, device=hidden.device)


def operand_dtype(device: torch.device) -> torch.dtype | None:
    """The type to which autocast, where it is on, casts the operands of a product."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@contextlib.contextmanager
def operands(hidden: Tensor, weight: Tensor, dtype: torch.dtype | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden and weight in autocast's type, cast once, and autocast off: nothing else of an op may be narrowed."""
    with torch.autocast(hidden.device.type, enabled=False):
        yield (hidden, weight) if dtype is None else (hidden.to(dtype), weight.to(dtype))


def scaled(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """grad * scale in `dtype`, a new tensor, without an fp32 copy of the whole."""
    out = torch.empty_like(grad, dtype=dtype)
    step = max(1, (1 << 20) // max(1, grad[:1].numel())) if grad.device.type == "cpu" else max(1, grad.shape[0])
    for start in range(0, grad.shape[0], step):
        torch.mul(grad[start : start + step], scale, out=out[start : start + step])
    return out
