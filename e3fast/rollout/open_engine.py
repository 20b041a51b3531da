"""The engine that a run file asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from e3fast.config import RunConfig
from e3fast.demo_model import demo_checkpoint
from e3fast.memory import GIB, available_bytes
from e3fast.rollout.engine import Engine
from e3fast.rollout.peers import ProcessPeer
from e3fast.rollout.proof import make_proof
from e3fast.rollout.transformers import TransformersEngine, end_of_sequence
from e3fast.rollout.vllm import VllmEngine
from e3fast.rollout.vllm_api import BLOCK, EngineSettings, check_version, installed_version
from e3fast.types import Prompt

PROBE_CHOICE = 16  # prompts of which the longest becomes the probe
KV_SHARE = 0.5  # of the free memory that the key-value cache may take where the run file does not say


def check_engine(config: RunConfig) -> None:
    """ValueError where the engine cannot run here: before a model is loaded."""
    if config.rollout.engine == "vllm":
        check_version(installed_version())


def open_engine(config: RunConfig, model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> Engine:
    """Of the policy's weights; a vLLM is up and proven when it returns. `prompts`: any of the run's, to probe with."""
    if config.rollout.engine == "transformers":
        return TransformersEngine(model, tokenizer, config.rollout.max_sequences)
    settings = engine_settings(config, model, tokenizer)
    probe = max((prompt.token_ids for prompt in prompts[:PROBE_CHOICE]), key=len)
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    peer = ProcessPeer(settings, folder / "vllm.log", config.rollout.deadline)
    engine = VllmEngine(peer, make_proof(model, probe), tokenizer, settings.max_model_len)
    try:
        engine.start()
    except BaseException:
        engine.close()
        raise
    return engine


def engine_settings(config: RunConfig, model: Any, tokenizer: Any) -> EngineSettings:
    name, rollout = config.model.name, config.rollout
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    wanted = kv_bytes(model.config.get_text_config(), model.dtype, longest, rollout.max_sequences)
    free = available_bytes(model.device)
    room = wanted if free is None else min(wanted, int(KV_SHARE * free))
    return EngineSettings(
        model=str(demo_checkpoint(name)) if name.startswith("demo:") else name,
        dtype="fp32" if model.dtype == torch.float32 else "bf16",
        max_model_len=longest,
        max_sequences=rollout.max_sequences,
        kv_cache_bytes=int(rollout.kv_cache_gib * GIB) or room,
        end_tokens=tuple(end_of_sequence(model, tokenizer)),
        trust_remote_code=config.model.trust_remote_code,
        sleep_mode=model.device.type == "cuda",
    )


def kv_bytes(config: Any, dtype: torch.dtype, length: int, sequences: int) -> int:
    """Keys and values of `sequences` of `length` tokens, in whole blocks, and a block to spare."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize
    return token * BLOCK * (sequences * -(-length // BLOCK) + 1)
