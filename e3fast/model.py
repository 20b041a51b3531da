"""A transformers causal language model with packed attention and an exposed head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from e3fast import attention
from e3fast.attention_plan import AttentionPlan
from e3fast.config import ModelConfig
from e3fast.demo_model import DEMO_MODELS, checkpoint_of
from e3fast.types import MicroBatch


@dataclass(frozen=True)
class OutputHead:
    """The last linear layer: logits = softcap(scale (hidden weight' + bias))."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    logit_scale: float
    softcap: float | None


def load_policy(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """Model (in eval mode: no dropout) and tokenizer of a hub id, a local folder or "demo:<name>".

    ValueError with what to do where the model cannot be found, or has no chat template.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    attention.register()
    name = checkpoint_of(config.name)
    trust = config.trust_remote_code
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
        model: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, attn_implementation="e3fast", trust_remote_code=trust
        )
    except (OSError, ValueError) as error:
        known = ", ".join(DEMO_MODELS)
        first_line = str(error).strip().splitlines()[0]
        raise ValueError(
            f"cannot load model {config.name!r}: {first_line} "
            f"Give a hub id, a folder with config.json, or one of {known}"
        ) from None
    if config.chat_template:
        tokenizer.chat_template = read_template(config.chat_template)
    model.to(device).eval()
    output_head(model)  # refuses heads the loss cannot use, now rather than in step 1
    check_packing(model)
    return model, tokenizer


def read_template(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ValueError(f"cannot read model.chat_template {path}: {error.strerror}") from None


def output_head(model: Any) -> OutputHead:
    """The model's head; ValueError if it is not one plain linear layer."""
    layer = model.get_output_embeddings()
    if type(layer) is not torch.nn.Linear:
        kind = type(layer).__name__
        raise ValueError(
            f"{type(model).__name__} has a head of type {kind}; the fused loss needs a plain torch.nn.Linear"
        )
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return OutputHead(layer.weight, layer.bias, float(scale), getattr(config, "final_logit_softcapping", None))


def packed_hidden(model: Any, micro_batch: MicroBatch) -> Tensor:
    """Last hidden states of every token of a packed row, (T, H); segments do not see each other (attention.py)."""
    plan = AttentionPlan(micro_batch.cu_seqlens, micro_batch.prefix_of)
    return trunk(model, micro_batch.token_ids, micro_batch.position_ids, plan)


def trunk(model: Any, token_ids: Tensor, position_ids: Tensor, plan: AttentionPlan) -> Tensor:
    """(T,), (T,) to (T, H)."""
    # A 4-D mask goes through transformers untouched, so no (T, T) one is made; the plan holds what may be seen.
    unused = token_ids.new_zeros(1, 1, 1, 1)
    out = model.base_model(
        input_ids=token_ids[None], position_ids=position_ids[None], attention_mask=unused, use_cache=False, plan=plan
    )
    return out.last_hidden_state[0]


@torch.no_grad()
def check_packing(model: Any) -> None:
    """Refuse a model that does not give packed samples what it gives them alone: here two behind one prompt tell."""
    # Tokens from all over the vocabulary: on its first, special ones a bf16 model's own rounding is past the limit.
    ids = (1000 + 7919 * torch.arange(14, device=model.device)) % model.config.get_text_config().vocab_size
    positions = torch.cat([torch.arange(4), torch.arange(4, 9), torch.arange(4, 9)]).to(model.device)
    plan = AttentionPlan(torch.tensor([0, 4, 9, 14], device=model.device), torch.tensor([-1, 0, 0]))
    packed = trunk(model, ids, positions, plan)[9:]
    last = torch.cat([ids[:4], ids[9:]])
    alone = model.base_model(input_ids=last[None], use_cache=False).last_hidden_state[0, 4:]
    off = float((packed - alone).float().norm() / alone.float().norm())
    if not off < (0.05 if model.dtype == torch.bfloat16 else 1e-3):
        raise ValueError(f"{type(model).__name__} gives other hidden states when samples are packed (off by {off:.1%})")


def check_lengths(model: Any, max_prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuse lengths beyond the model's positions before anything is sampled."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_prompt_tokens + max_new_tokens > positions:
        raise ValueError(
            f"data.max_prompt_tokens={max_prompt_tokens} + rollout.max_new_tokens={max_new_tokens} exceed the model's "
            f"{positions} positions; lower one of them"
        )
