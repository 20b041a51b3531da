"""The contestants of benchmarks.methods: run files that differ in their methods alone.

Hyper-parameters are the methods' own defaults (their papers') but where a comment says why not; learning rate, batch
and prompts are shared.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks import nano
from e3fast.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    SourceConfig,
    TrainConfig,
    load_config,
)
from e3fast.methods import make_method

INIT_STEPS = 3  # steps whose mean is H_init: one step's entropy is too noisy at these batches


@dataclass(frozen=True)
class Arm:
    name: str
    methods: tuple[dict[str, Any], ...] = ()
    loss: Mapping[str, float] = field(default_factory=dict)
    optimizer: Literal["adamw", "ivon"] = "adamw"
    needs: str = ""  # an arm whose run of the same seed comes first
    fill: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] | None = None  # a method's knobs from that run


@dataclass(frozen=True)
class Case:
    name: str
    base: Callable[[], RunConfig]
    arms: tuple[Arm, ...]
    controls: Mapping[str, tuple[str, ...]]  # beside grpo
    first_pass: int  # steps of the first pass of the pool

    @property
    def names(self) -> list[str]:
        return [arm.name for arm in self.arms]


TEMPERATURE = {"name": "entropy_temperature", "anneal": False, "init_steps": INIT_STEPS}
BUDGET = {"name": "rollout_budget"}
# With a dozen tokens a completion the papers' noise (1e-3) moves nothing: the mask keeps every sequence.
SIGMA = 3e-3
NOISE = {"name": "perturbed_weights"}


def mean_temperature(method: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    return {**method, "temperature": round(run["mean_temperature"], 4)}


NANO = (
    Arm("grpo"),
    Arm("dapo", ({"name": "dynamic_sampling"},)),
    Arm("e3-budgets", (BUDGET,)),
    Arm("e3-budgets-prompt", ({**BUDGET, "group_weight": "prompt"},)),
    Arm("e3-temperature", (TEMPERATURE,)),
    Arm("e3", (BUDGET, TEMPERATURE)),
    # A schedule needs to know its end: as many steps as the same arm without annealing took.
    Arm("e3-annealed", (BUDGET, {"name": "entropy_temperature", "init_steps": INIT_STEPS}), needs="e3"),
    Arm("fixed-temperature", ({"name": "fixed_temperature"},), needs="e3-temperature", fill=mean_temperature),
    Arm("entropy-bonus", loss={"entropy_bonus": 1e-4}),
    Arm("expo", ({"name": "accuracy_kl"}, {"name": "gaussian_curriculum"})),
    Arm("expo-control", ({"name": "accuracy_kl", "curve": "constant"}, {"name": "gaussian_curriculum"})),
    Arm("leeps", ({"name": "portfolio_sampler"},)),
    Arm("mopps", ({"name": "posterior_sampler"},)),
    Arm("greso", ({"name": "skip_trivial"},)),
    Arm("b3po", ({**NOISE, "variant": "b3po", "sigma": SIGMA},)),
    Arm("m3po", ({**NOISE, "variant": "m3po", "draws": 2, "sigma": SIGMA},)),  # groups of 4: those of 2 say little
    # IVON's noise at the start is SIGMA. Its largest step is lr (h0 + delta) clip_radius, and nearly every weight
    # takes it, where AdamW's steps are a fraction of its learning rate: 1e-4 unlearns the task (LOG.md), 3e-5 does not.
    Arm("c3po", ({**NOISE, "posterior": "ivon", "ess": 1e8, "clip_radius": 0.03},), optimizer="ivon"),
    Arm("noise-control", ({**NOISE, "sigma": SIGMA},)),
)
RETRY = {"name": "lorem_retry", "num_prefixes": 2}
PLAIN_RETRY = {**RETRY, "prefix": "none", "policy_shaping": False, "advantage_shaping": False}
DEMO = (
    Arm("grpo"),
    # Fewer and shorter prefixes than the paper's 100 to 300 words: a prompt here has 40 tokens, and a CPU reads them.
    Arm("lope", ({**RETRY, "min_words": 20, "max_words": 60},)),
    Arm("lope-control", (PLAIN_RETRY,)),
    Arm("lope-control-shaped", ({**RETRY, "prefix": "none"},)),
)
CONTROLS = {
    "e3-temperature": ("fixed-temperature", "entropy-bonus"),
    "e3": ("e3-budgets", "e3-temperature"),
    "e3-annealed": ("e3",),
    "expo": ("expo-control",),
    "leeps": ("mopps", "dapo"),
    "b3po": ("fixed-temperature",),
    "m3po": ("fixed-temperature",),
    "c3po": ("noise-control", "fixed-temperature"),
    "lope": ("lope-control", "lope-control-shaped"),
}
QUICK = {"nano": ("grpo", "e3", "leeps", "c3po"), "demo": ("grpo", "lope")}


def find_case(name: str, quick: bool) -> Case:
    if name == "nano":
        return Case("nano", functools.partial(nano_config, quick), NANO, CONTROLS, NANO_POOL // NANO_BATCH)
    return Case("demo", functools.partial(demo_config, quick), DEMO, CONTROLS, 0)


NANO_COUNTS, NANO_BATCH = (72, 72, 80, 80, 80), 16  # training prompts of each grade; prompts a step
NANO_POOL = sum(NANO_COUNTS)


def nano_config(quick: bool) -> RunConfig:
    def sources(counts: Sequence[int]) -> tuple[SourceConfig, ...]:
        pairs = zip(nano.GRADES, counts, strict=True)
        options = nano.grade_options
        return tuple(
            SourceConfig("gym:basic_arithmetic", f"{terms} terms", count, options=options(terms))
            for terms, count in pairs
        )

    return RunConfig(
        model=ModelConfig(str(nano.nano_checkpoint()), "fp32"),
        data=DataConfig(sources(NANO_COUNTS), sources([12 if quick else 48] * len(nano.GRADES)), max_prompt_tokens=40),
        rollout=RolloutConfig(max_new_tokens=28, max_sequences=256),
        train=TrainConfig(
            steps=10_000,
            prompts_per_step=NANO_BATCH,
            tokens_per_micro_batch=8192,
            learning_rate=1e-4,
            warmup_steps=5,
            max_generated_tokens=40_000 if quick else 300_000,
            save_every=0,
        ),
        eval=EvalConfig(num_prompts=1000, samples=16, ks=(1, 16)),
    )


def demo_config(quick: bool) -> RunConfig:
    """The quickstart's task and model on fewer tokens, with room for a prefix."""
    base = load_config(Path(__file__).parents[1] / "runs" / "quickstart.toml")
    limit = 4_000 if quick else 32_000
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, max_prompt_tokens=256),
        train=dataclasses.replace(base.train, steps=1000, max_generated_tokens=limit, tokens_per_micro_batch=2048),
        eval=EvalConfig(num_prompts=16 if quick else 64, samples=16, ks=(1, 16)),
    )


def make_config(case: Case, arm: Arm, seed: int, earlier: dict[str, Any] | None) -> RunConfig:
    """The arm's run; `earlier` is the record of the run that it needs."""
    base, tables = case.base(), arm.methods
    if arm.fill:
        assert earlier is not None
        tables = tuple(arm.fill(dict(table), earlier) for table in tables)
    steps = earlier["steps"] if earlier and not arm.fill else base.train.steps
    return dataclasses.replace(
        base,
        seed=seed,
        methods=tuple(make_method(dict(table)) for table in tables),
        loss=dataclasses.replace(base.loss, **arm.loss),
        train=dataclasses.replace(base.train, optimizer=arm.optimizer, steps=steps),
    )
