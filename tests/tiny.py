"""A tiny random model and a byte-level tokenizer, made on the spot: the whole loop without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


SHAPE: dict[str, Any] = dict(
    vocab_size=257,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=0,
    initializer_range=0.2,
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<end>", *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Llama with 2 layers, grouped heads and tied embeddings, weights large enough that nothing is nearly uniform."""
    from e3fast import attention

    attention.register()
    torch.manual_seed(seed)
    config = LlamaConfig(**{**SHAPE, **changes}, attn_implementation="e3fast")
    return LlamaForCausalLM(config).to(dtype).eval()


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 12},
    "qwen2": {},  # Qwen2.5 is the same: biases on query, key and value
    "qwen2-windowed": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "qwen3": {},  # norms on query and key heads
    "phi3": {"sliding_window": 12},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 4.0},
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {"sliding_window": 12, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0},
    "gemma3_text": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
}


def make_family(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny random decoder of a family, with its windows and softcaps made short enough to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from e3fast import attention

    attention.register()
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.removesuffix("-windowed"), **{**SHAPE, **FAMILIES[name]})
    return AutoModelForCausalLM.from_config(config, attn_implementation="e3fast").to(dtype).eval()


def save_tiny(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A checkpoint folder of a one-million-parameter model, for runs through the command line."""
    make_model(
        dtype, hidden_size=128, intermediate_size=384, num_hidden_layers=4, head_dim=32, **changes
    ).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
