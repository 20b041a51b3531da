"""Packed attention by a variable-length flash kernel: flash-attn where it is installed, else PyTorch's own.

A segment's keys are gathered behind one another, its prefix's first, so that one causal call, aligned at the segment's
end, serves segments with and without a prefix. Keys and values are repeated, and kept for the backward pass: a row
where they are many times its tokens is left to tiles, which keep nothing.

Letters: T packed tokens, Hq query and Hk key-value heads, D head width.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from e3fast.attention_plan import AttentionPlan
from e3fast.attention_tiles import Form

MAX_WIDTH = 256  # head width of flash attention's kernels
MAX_REPEAT = 8  # gathered keys over tokens


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, form: Form) -> Tensor:
    """(T, Hq, D), (T, Hk, D), (T, Hk, D) to (T, Hq, D); differentiable. For what `find_kernel` names a kernel for."""
    k, v = (x.index_select(0, plan.key_index) for x in (key, value))
    kernel = {"flash_attn": flash_attn, "torch": torch_varlen}[find_kernel(query, plan, form)]
    return kernel(query, k, v, plan, form)


def find_kernel(query: Tensor, plan: AttentionPlan, form: Form) -> str:
    """Name of the kernel for these inputs: flash_attn, torch, or empty where neither takes them."""
    width, half = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    if query.device.type != "cuda" or not half or width > MAX_WIDTH or width % 8:
        return ""
    if torch.cuda.get_device_capability(query.device) < (8, 0) or sum(plan.num_columns) > MAX_REPEAT * len(query):
        return ""
    if flash_attn_has_softcap():
        return "flash_attn"
    return "torch" if not form.softcap and torch_takes_groups() else ""


@functools.cache
def flash_attn_has_softcap() -> bool:
    """Whether flash-attn 2.6 or later is installed."""
    try:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return "softcap" in inspect.signature(flash_attn_varlen_func).parameters


@functools.cache
def torch_takes_groups() -> bool:
    """Whether this torch's varlen_attn has grouped heads, scale and windows (2.12 has)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


def flash_attn(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, form: Form) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    out: Tensor = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=plan.cu_queries,
        cu_seqlens_k=plan.cu_keys,
        max_seqlen_q=plan.longest_own,
        max_seqlen_k=plan.longest,
        softmax_scale=form.scaling,
        causal=True,
        window_size=(form.window - 1, 0) if form.window else (-1, 0),
        softcap=form.softcap,
    )
    return out


def torch_varlen(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, form: Form) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out: Any = varlen_attn(
        query,
        key,
        value,
        plan.cu_queries,
        plan.cu_keys,
        plan.longest_own,
        plan.longest,
        scale=form.scaling,
        window_size=(form.window - 1, 0) if form.window else (-1, 0),
        enable_gqa=form.num_heads != form.num_kv_heads,
    )
    return out
