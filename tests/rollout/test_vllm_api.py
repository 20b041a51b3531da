"""Which versions of vLLM are taken, and what an engine is started with."""

import dataclasses

import pytest
import torch

from e3fast.config import DataConfig, ModelConfig, RolloutConfig, RunConfig
from e3fast.rollout import open_engine
from e3fast.rollout.open_engine import check_engine, engine_settings, kv_bytes
from e3fast.rollout.vllm_api import check_version, engine_arguments
from tests.tiny import make_model


@pytest.mark.parametrize("version", ["0.32.0", "0.32.4", "0.32.1+cpu", "0.32.0rc1"])
def test_supported_versions(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "0.9.2"])
def test_other_versions_are_refused_in_words(version):
    with pytest.raises(
        ValueError, match=rf"vLLM {version} is installed; .* with 0.32 up to, not including, 0.33: install vllm>=0.32"
    ):
        check_version(version)


def test_a_missing_vllm_is_said_with_what_to_do():
    with pytest.raises(ValueError, match=r"which is not installed here: install vllm>=0.32,<0.33 .*make setup-vllm"):
        check_version(None)


def test_a_run_asks_before_it_loads_a_model(monkeypatch):
    monkeypatch.setattr(open_engine, "installed_version", lambda: None)
    with pytest.raises(ValueError, match="not installed"):
        check_engine(RunConfig(rollout=RolloutConfig(engine="vllm")))
    check_engine(RunConfig())


def test_the_context_is_the_runs_own_limits():
    config = RunConfig(
        model=ModelConfig(name="folder"),
        data=DataConfig(max_prompt_tokens=40),
        rollout=RolloutConfig(engine="vllm", max_new_tokens=24, max_sequences=6),
    )
    model = make_model(torch.bfloat16)
    settings = engine_settings(config, model.config, model.dtype, model.device, [0])
    assert (settings.max_model_len, settings.max_sequences, settings.dtype) == (64, 6, "bf16")
    assert settings.end_tokens == (0,) and not settings.sleep_mode
    # 2 layers, 2 key-value heads of 8, keys and values, 2 bytes; 6 sequences of 2 blocks of 32, and one block
    assert settings.kv_cache_bytes == 2 * 2 * 2 * 8 * 2 * 32 * 13
    asked = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, kv_cache_gib=0.5))
    assert engine_settings(asked, model.config, model.dtype, model.device).kv_cache_bytes == 2**29
    arguments = engine_arguments(settings)
    assert arguments["logprobs_mode"] == "processed_logprobs" and arguments["max_model_len"] == 64


def test_kv_bytes_of_the_demo_model():
    """SmolLM2-135M: 30 layers, 3 key-value heads of 64: 23,040 bytes a token in bf16."""
    config = make_model(num_hidden_layers=1).config
    config.num_hidden_layers, config.num_key_value_heads, config.head_dim = 30, 3, 64
    assert kv_bytes(config, torch.bfloat16, 32, 1) == 23_040 * 64
