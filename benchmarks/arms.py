"""The contestants of benchmarks.methods: run files that differ in their methods alone.

Hyper-parameters are the methods' own defaults (their papers') but where a comment says why not; learning rate, batch
and prompts are shared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import nano
from e3fast.config import DataConfig, EvalConfig, ModelConfig, RolloutConfig, RunConfig, SourceConfig, TrainConfig
from e3fast.methods import Method, make_method

INIT_STEPS = 3  # steps whose mean is H_init: one step's entropy is too noisy at these batches


@dataclass(frozen=True)
class Arm:
    name: str
    methods: tuple[dict[str, Any], ...] = ()
    loss: Mapping[str, float] = dataclasses.field(default_factory=dict)
    optimizer: str = "adamw"
    needs: str = ""  # an arm whose run of the same seed comes first
    fill: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] | None = None  # knobs from that run


TEMPERATURE = {"name": "entropy_temperature", "anneal": False, "init_steps": INIT_STEPS}
BUDGET = {"name": "rollout_budget"}


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
    Arm("b3po", ({"name": "perturbed_weights", "variant": "b3po"},)),
    Arm("m3po", ({"name": "perturbed_weights", "variant": "m3po", "draws": 2},)),  # groups of 4: of 2 say nothing
    # IVON's largest step is lr (h0 + delta) clip_radius: as large as AdamW's here, where its default is 1e-6.
    Arm(
        "c3po",
        ({"name": "perturbed_weights", "posterior": "ivon", "clip_radius": 0.3, "betas": [0.9, 0.9999]},),
        optimizer="ivon",
    ),
    Arm("noise-control", ({"name": "perturbed_weights"},)),
)


def find_arms(case: str) -> tuple[Arm, ...]:
    return {"nano": NANO}[case]


def nano_config(seed: int, tokens: int) -> RunConfig:
    grades = [(f"{terms} terms", nano.grade_options(terms)) for terms in nano.GRADES]
    source = lambda label, count, options: SourceConfig("gym:basic_arithmetic", label, count, options=options)  # noqa: E731
    return RunConfig(
        seed=seed,
        model=ModelConfig(str(nano.nano_checkpoint()), "fp32"),
        data=DataConfig(
            train=tuple(source(*grade[:1], count, grade[1]) for grade, count in zip(grades, (32, 64, 96, 96, 96), strict=True)),
            held_out=tuple(source(*grade[:1], 48, grade[1]) for grade in grades),
            max_prompt_tokens=40,
        ),
        rollout=RolloutConfig(max_new_tokens=28, max_sequences=256),
        train=TrainConfig(
            steps=10_000,
            prompts_per_step=16,
            tokens_per_micro_batch=8192,
            learning_rate=3e-4,
            warmup_steps=5,
            max_generated_tokens=tokens,
            save_every=0,
        ),
        eval=EvalConfig(num_prompts=240, samples=16, ks=(1, 16)),
    )


def make_config(base: RunConfig, arm: Arm, earlier: dict[str, Any] | None) -> RunConfig:
    """The arm's run; `earlier` is the record of the run that it needs."""
    tables = arm.methods
    if arm.fill:
        assert earlier is not None
        tables = tuple(arm.fill(dict(table), earlier) for table in tables)
    methods: tuple[Method, ...] = tuple(make_method(dict(table)) for table in tables)
    steps = earlier["steps"] if earlier and not arm.fill else base.train.steps
    return dataclasses.replace(
        base,
        methods=methods,
        loss=dataclasses.replace(base.loss, **arm.loss),
        train=dataclasses.replace(base.train, optimizer=arm.optimizer, steps=steps),  # pyright: ignore
    )
