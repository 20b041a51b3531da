"""Attention for packed rows, and for decoding, behind transformers' attention interface under the name "e3fast".

With a plan, a packed row's segments attend to themselves and to their shared prefix, and to nothing else: by a
variable-length flash kernel on a GPU, by tiles of plain PyTorch everywhere else. Without a plan the call is ordinary:
one-token decoding runs on the key-value heads directly, all else is transformers' SDPA.

Letters: T packed tokens, B sequences, U queries and S keys, Hq query and Hk key-value heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from e3fast.attention_plan import AttentionPlan
from e3fast.attention_tiles import Form, tiled_attention
from e3fast.attention_varlen import find_kernel, varlen_attention


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,  # (1, Hq, T, D) packed, or (B, Hq, U, D)
    key: Tensor,  # (1, Hk, T, D), or (B, Hk, S, D)
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: returns ((B, U, Hq, D), None).

    ValueError for a packed row of a model that asks for more than windows and a softcap.
    """
    scaling = float(query.shape[-1] ** -0.5) if scaling is None else scaling
    softcap = kwargs.get("softcap") or 0.0
    if plan is not None:
        refuse_unknown(kwargs)
        window = kwargs.get("sliding_window") or 0
        form = Form(query.shape[1], key.shape[1], scaling, softcap, window if window < plan.longest else 0)
        return packed_attention(query[0], key[0], value[0], plan, form)[None], None
    if softcap or (query.shape[2] == 1 and attention_mask is not None and attention_mask.dtype == torch.bool):
        return attend(query, key, value, attention_mask, scaling, softcap).transpose(1, 2), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def refuse_unknown(options: dict[str, Any]) -> None:
    """An attention that asks for more must not be answered with less."""
    asked = [name for name in ("s_aux", "position_bias") if options.get(name) is not None]
    if asked:
        raise ValueError(f"packed attention does not support {', '.join(asked)} of this model")


def packed_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, form: Form) -> Tensor:
    """(Hq, T, D), (Hk, T, D), (Hk, T, D) to (T, Hq, D)."""
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    if find_kernel(q, plan, form):
        return varlen_attention(q, k, v, plan, form)
    return tiled_attention(q.flatten(1), k.flatten(1), v.flatten(1), plan, form).unflatten(1, (form.num_heads, -1))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float) -> Tensor:
    """(B, Hq, U, D) by (B, Hk, S, D) under a bool mask (None: causal); query heads share their key-value head."""
    (b, hq, u, d), s = query.shape, key.shape[2]
    if mask is None:
        mask = torch.ones(u, s, dtype=torch.bool, device=query.device).tril(s - u).expand(b, 1, u, s)
    folded = (query * scaling).reshape(b, key.shape[1], -1, d)
    scores = (folded @ key.transpose(-1, -2)).view(b, key.shape[1], -1, u, s)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # Not -inf: a padded position sees nothing at all, and its nan would reach the others through its value.
    hidden = torch.finfo(scores.dtype).min
    probs = torch.softmax(scores.masked_fill(~mask[:, :, None], hidden), dim=-1)
    return (probs.view(b, key.shape[1], -1, s) @ value).reshape(b, hq, u, d)


def register() -> None:
    """Make "e3fast" known to transformers as an attention implementation; idempotent."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register("e3fast", attention_forward)
    AttentionMaskInterface.register("e3fast", sdpa_mask)
