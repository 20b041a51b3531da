"""Every knob of a run, once, with its unit. A run is a TOML file; flags override it.

`load_config` reads and checks a file before anything is loaded: an unknown key, a wrong type or a value outside its
range is a ValueError that names the path, what is allowed and the nearest spelling.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from e3fast.methods import Method, make_method
from e3fast.tables import build, build_table, check
from e3fast.types import LossConfig, LossParams


@dataclass(frozen=True)
class ModelConfig:
    name: str = "demo:smollm2-135m"
    """Hub id, local folder, or demo:smollm2-135m (a 135 M model that comes with a PyPI package: no hub needed)."""
    compute_dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of forward and backward; "auto" takes what this machine multiplies fastest.

    Masters are always fp32.
    """
    chat_template: str = ""
    """File with a Jinja chat template, for a model that has none."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


SOURCE_DEFAULTS = {"options": {}, "split": "train", "prompt_column": "prompt", "answer_column": "answer"}


@dataclass(frozen=True)
class SourceConfig:
    source: str = ""
    """gym:<task of reasoning-gym>, a .jsonl, .json (one object a line) or .parquet file, hub:<id>[:<configuration>]."""
    label: str = ""
    """What tables and plots call these prompts, beside the source."""
    count: int = 0
    """Prompts to take; 0 = all (a gym source needs a number)."""
    split: str = "train"
    """Split of a hub data set."""
    prompt_column: str = "prompt"
    """Column with the question: a text, or a list of chat messages."""
    answer_column: str = "answer"
    """Column with the reference answer."""
    options: dict[str, Any] = field(default_factory=dict)
    """A gym task's own options, for example {min_terms = 2, max_terms = 2}."""

    def __post_init__(self) -> None:
        check(bool(self.source), "data source", 'a name like "gym:chain_sum" or "questions.jsonl"', self.source)
        check(self.count >= 0, f"count of {self.source}", ">= 0", self.count)
        gym, hub = self.source.startswith("gym:"), self.source.startswith("hub:")
        for name, kind, used in (("options", "gym:", gym), ("split", "hub:", hub)):
            if not used and getattr(self, name) != SOURCE_DEFAULTS[name]:
                raise ValueError(f"{name} of {self.source} does nothing: it belongs to {kind} sources")
        for name in ("prompt_column", "answer_column"):
            if gym and getattr(self, name) != SOURCE_DEFAULTS[name]:
                raise ValueError(f"{name} of {self.source} does nothing: a gym task names its own")


@dataclass(frozen=True)
class DataConfig:
    train: Annotated[tuple[SourceConfig, ...], tyro.conf.Fixed] = ()
    """Sources of the training pool, mixed."""
    held_out: Annotated[tuple[SourceConfig, ...], tyro.conf.Fixed] = ()
    """Sources of the held-out set. A prompt that stands here is taken out of the training pool."""
    system: str = ""
    """System message of each prompt, in place of a row's own; empty leaves that, or the chat template's."""
    suffix: str = ""
    """Text behind each question, for example an instruction to box the answer."""
    max_prompt_tokens: int = 512
    """Longer prompts are left out at load, with a count; never cut."""

    def __post_init__(self) -> None:
        check(self.max_prompt_tokens >= 1, "data.max_prompt_tokens", ">= 1", self.max_prompt_tokens)


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["transformers", "vllm", "vllm-server"] = "transformers"
    """Program that samples: transformers' own generation, in process; vLLM, in a process beside it; or its server."""
    server_url: str = ""
    """http://host:port of a server started by `e3fast serve RUN.toml`, for engine "vllm-server"."""
    rollouts_per_prompt: int = 8
    """Group size G; methods may move rollouts between prompts at the same total."""
    temperature: float = 1.0
    """Sampling temperature, carried per token into the loss."""
    max_new_tokens: int = 512
    """Longest completion, tokens."""
    max_sequences: int = 128
    """Sequences decoded together; more are done in turns. Bounds the key-value cache."""
    deadline: float = 120.0
    """Seconds without a sign of life after which vLLM counts as dead; five times as many while it starts."""
    kv_cache_gib: float = 0.0
    """vLLM's key-value cache, GiB; 0 = max_sequences at full length, at most half of what is free."""

    def __post_init__(self) -> None:
        check(self.rollouts_per_prompt >= 1, "rollout.rollouts_per_prompt", ">= 1", self.rollouts_per_prompt)
        check(self.temperature > 0, "rollout.temperature", "> 0", self.temperature)
        check(self.max_new_tokens >= 1, "rollout.max_new_tokens", ">= 1", self.max_new_tokens)
        check(self.max_sequences >= 1, "rollout.max_sequences", ">= 1", self.max_sequences)
        if self.server_url:
            known = re.fullmatch(r"http://[^/:]+:\d+/?", self.server_url) is not None
            check(known, "rollout.server_url", "http://host:port", self.server_url)
        check(self.deadline > 0, "rollout.deadline", "> 0 seconds", self.deadline)
        check(self.kv_cache_gib >= 0, "rollout.kv_cache_gib", ">= 0", self.kv_cache_gib)


@dataclass(frozen=True)
class RewardConfig:
    name: str = "auto"
    """auto (a gym prompt's own verifier, math-verify for others), gym, math, or your own: package.module:function."""
    format_weight: float = 0.0
    """Reward added when the answer stands in the asked form. Accuracy, and every statistic made of it, ignores it."""
    deadline: float = 10.0
    """Seconds a rollout's verifier may take.

    Past it the worker process is killed, the rollout tried once more, then `failed`.
    """
    num_workers: int = 1
    """Worker processes."""

    def __post_init__(self) -> None:
        check(self.format_weight >= 0, "reward.format_weight", ">= 0", self.format_weight)
        check(self.deadline > 0, "reward.deadline", "> 0 seconds", self.deadline)
        check(self.num_workers >= 1, "reward.num_workers", ">= 1", self.num_workers)


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 100
    """Optimiser steps T."""
    prompts_per_step: int = 64
    """Prompts B drawn each step."""
    tokens_per_micro_batch: int = 4096
    """Hard cap on the tokens of a micro-batch; peak memory follows it."""
    forward_tokens_per_micro_batch: int = 0
    """Hard cap of micro-batches without a backward pass; 0 = twice tokens_per_micro_batch."""
    over_long: Literal["refuse", "own_bin", "cut"] = "refuse"
    """Samples longer than tokens_per_micro_batch, where prompts and completions may be.

    An error at start; a micro-batch of their own, up to hard_cap; or the completion's tail is cut, and counted.
    """
    hard_cap: int = 0
    """Tokens of the longest sample with a micro-batch of its own, for over_long "own_bin"."""
    probe_memory: bool = True
    """Run a full micro-batch before step 1, so that a cap that memory does not hold fails there."""
    deterministic: bool = True
    """Let micro-batches follow from lengths alone.

    Off, they also follow from measured times, which differ from run to run.
    """
    share_prompts: bool = True
    """Compute a prompt once for the completions of its group that meet in a micro-batch (same values and gradients)."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """How a group's rewards become advantages."""
    learning_rate: float = 1e-6
    """AdamW's peak step size."""
    optimizer: Literal["adamw", "ivon"] = "adamw"
    """AdamW, or IVON, whose knobs are those of the method perturbed_weights."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    max_grad_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down."""
    max_generated_tokens: int = 0
    """Stop once this many tokens have been generated in all; 0 = no limit.

    For comparisons at equal generated tokens.
    """
    entropy_rows: Literal["all", "trained"] = "all"
    """Tokens the step's entropy is measured over.

    "trained" skips the forward pass of samples without signal: cheaper, and biased toward prompts of mixed outcome.
    """
    probe_every: int = 20
    """Steps between probes: entropy at temperature 1, and how entropy answers the temperature; 0 = never."""
    save_every: int = 100
    """Steps between checkpoints; 0 = only at the end and on Ctrl-C."""

    def __post_init__(self) -> None:
        for name in ("steps", "prompts_per_step", "tokens_per_micro_batch"):
            check(getattr(self, name) >= 1, f"train.{name}", ">= 1", getattr(self, name))
        for name in (
            "learning_rate",
            "warmup_steps",
            "weight_decay",
            "max_generated_tokens",
            "save_every",
            "probe_every",
        ):
            check(getattr(self, name) >= 0, f"train.{name}", ">= 0", getattr(self, name))
        cap = self.tokens_per_micro_batch
        check(
            self.forward_tokens_per_micro_batch >= 0,
            "train.forward_tokens_per_micro_batch",
            ">= 0",
            self.forward_tokens_per_micro_batch,
        )
        if (self.over_long == "own_bin") != (self.hard_cap > 0):
            raise ValueError('train.hard_cap and train.over_long = "own_bin" need each other')
        check(
            not self.hard_cap or self.hard_cap > cap, "train.hard_cap", f"> tokens_per_micro_batch={cap}", self.hard_cap
        )
        check(self.max_grad_norm > 0, "train.max_grad_norm", "> 0", self.max_grad_norm)
        check(all(0 <= b < 1 for b in self.betas), "train.betas", "in [0, 1)", self.betas)


@dataclass(frozen=True)
class EvalConfig:
    num_prompts: int = 256
    """Held-out prompts evaluated before and after; 0 = no evaluation."""
    samples: int = 4
    """Completions of each, n of pass@k."""
    ks: tuple[int, ...] = (1, 4)
    """The k of each unbiased pass@k; at most `samples`."""
    temperature: float = 1.0
    """Evaluation's own temperature, whatever training does; 0 = greedy."""

    def __post_init__(self) -> None:
        check(self.num_prompts >= 0, "eval.num_prompts", ">= 0", self.num_prompts)
        check(self.samples >= 1, "eval.samples", ">= 1", self.samples)
        check(all(1 <= k <= self.samples for k in self.ks), "eval.ks", f"in [1, eval.samples={self.samples}]", self.ks)
        check(self.temperature >= 0, "eval.temperature", ">= 0", self.temperature)


@dataclass(frozen=True)
class RunConfig:
    seed: int = 0
    """Every random draw of the run follows from it."""
    output_dir: str = "outputs/run"
    """Folder of the resolved config, metrics, rollouts, checkpoint and report."""
    resume: bool = False
    """Go on from the checkpoint in output_dir."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    train: TrainConfig = TrainConfig()
    loss: LossConfig = field(default_factory=LossConfig)
    eval: EvalConfig = EvalConfig()
    methods: Annotated[tuple[Method, ...], tyro.conf.Fixed] = ()
    """[[methods]] tables, called in file order; none is plain GRPO."""

    def start_loss(self) -> LossParams:
        """The loss of a step before methods tune it."""
        asked = dataclasses.asdict(self.loss)
        if self.loss.importance_sampling == "auto":
            asked["importance_sampling"] = "off" if self.rollout.engine == "transformers" else "token"
        return LossParams(**asked)


def load_config(path: Path) -> RunConfig:
    """Read a run file. ValueError names the file, the path of the key, and what is allowed."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"cannot read run file {path}: {error.strerror}") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    methods = table.pop("methods", [])
    try:
        methods = tuple(make_method(entry) for entry in build(list[dict[str, Any]], methods, "methods"))
        return dataclasses.replace(build_table(RunConfig, table, ""), methods=methods)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
