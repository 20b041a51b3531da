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
    shape = dict(
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
    config = LlamaConfig(**{**shape, **changes}, attn_implementation="e3fast")
    return LlamaForCausalLM(config).to(dtype).eval()


def save_tiny(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A checkpoint folder of a one-million-parameter model, for runs through the command line."""
    make_model(
        dtype, hidden_size=128, intermediate_size=384, num_hidden_layers=4, head_dim=32, **changes
    ).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
