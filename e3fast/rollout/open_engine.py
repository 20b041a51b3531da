"""The engine that a run file asks for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from e3fast import machine
from e3fast.config import RunConfig
from e3fast.demo_model import checkpoint_of
from e3fast.memory import GIB, available_bytes
from e3fast.rollout.engine import Engine
from e3fast.rollout.peers import Peer, ProcessPeer
from e3fast.rollout.proof import make_proof
from e3fast.rollout.transformers import TransformersEngine, end_of_sequence
from e3fast.rollout.vllm import VllmEngine
from e3fast.rollout.vllm_api import BLOCK, EngineSettings, check_version, installed_version, server_command
from e3fast.rollout.vllm_server import ServerPeer
from e3fast.types import Prompt

PROBE_CHOICE = 16  # prompts of which the longest becomes the probe
KV_SHARE = 0.5  # of the free memory that the key-value cache may take where the run file does not say


def check_engine(config: RunConfig) -> None:
    """ValueError where the engine cannot run here: before a model is loaded."""
    if config.rollout.engine == "vllm":
        check_version(installed_version())
    if config.rollout.engine == "vllm-server" and not config.rollout.server_url:
        raise ValueError('rollout.engine = "vllm-server" needs rollout.server_url, for example http://127.0.0.1:8000')


def open_engine(config: RunConfig, model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> Engine:
    """Of the policy's weights; a vLLM is up and proven when it returns. `prompts`: any of the run's, to probe with."""
    if config.rollout.engine == "transformers":
        return TransformersEngine(model, tokenizer, config.rollout.max_sequences)
    probe = max((prompt.token_ids for prompt in prompts[:PROBE_CHOICE]), key=len)
    engine = VllmEngine(
        open_peer(config, model, tokenizer), make_proof(model, probe), tokenizer, context_length(config)
    )
    try:
        engine.start()
    except BaseException:
        engine.close()
        raise
    return engine


def open_peer(config: RunConfig, model: Any, tokenizer: Any) -> Peer:
    rollout, end_tokens = config.rollout, end_of_sequence(model, tokenizer)
    if rollout.engine == "vllm-server":
        length = context_length(config)
        return ServerPeer(rollout.server_url, length, rollout.max_sequences, end_tokens, rollout.deadline)
    settings = engine_settings(config, model.config, model.dtype, model.device, end_tokens)
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return ProcessPeer(settings, folder / "vllm.log", rollout.deadline)


def context_length(config: RunConfig) -> int:
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def engine_settings(
    config: RunConfig, model_config: Any, dtype: torch.dtype, device: torch.device, end_tokens: Sequence[int] = ()
) -> EngineSettings:
    rollout = config.rollout
    wanted = kv_bytes(model_config.get_text_config(), dtype, context_length(config), rollout.max_sequences)
    free = available_bytes(device)
    room = wanted if free is None else min(wanted, int(KV_SHARE * free))
    return EngineSettings(
        model=checkpoint_of(config.model.name),
        dtype="fp32" if dtype == torch.float32 else "bf16",
        max_model_len=context_length(config),
        max_sequences=rollout.max_sequences,
        kv_cache_bytes=int(rollout.kv_cache_gib * GIB) or room,
        end_tokens=tuple(end_tokens),
        trust_remote_code=config.model.trust_remote_code,
        sleep_mode=device.type == "cuda" and rollout.engine == "vllm",
        share_prompts=device.type == "cpu",
    )


def serve(config: RunConfig) -> None:
    """Become vLLM's server for a run file, at its rollout.server_url. Weights come from the run that calls it."""
    from transformers import AutoConfig

    check_version(installed_version())
    check_engine(dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, engine="vllm-server")))
    device = machine.find_device()
    dtype = machine.find_compute_dtype(config.model.compute_dtype, device)
    name = checkpoint_of(config.model.name)
    model_config = AutoConfig.from_pretrained(name, trust_remote_code=config.model.trust_remote_code)
    url = urlsplit(config.rollout.server_url)
    settings = engine_settings(config, model_config, dtype, device)
    command, environment = server_command(settings, url.hostname or "", url.port or 80)
    os.execve(command[0], command, os.environ | environment)


def kv_bytes(config: Any, dtype: torch.dtype, length: int, sequences: int) -> int:
    """Keys and values of `sequences` of `length` tokens, in whole blocks, and a block to spare."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize
    return token * BLOCK * (sequences * -(-length // BLOCK) + 1)
