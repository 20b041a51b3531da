"""One training step: against TRL's GRPOTrainer, with prompt sharing on and off, and by stages.

    python -m benchmarks.step --vs trl [--save]    same model, prompts, completions, rewards; both in one run
    python -m benchmarks.step --sharing [--save]   and --sharing gradients: see benchmarks/sharing.py
    python -m benchmarks.step --stages [--save]    share of the time of each stage of the quickstart's steps

Against TRL: 64 completions of 16 tokens (8 prompts x 8), one optimiser step a batch, AdamW, no KL. Each candidate runs
in a fresh process, one after the other. `update` is the step with stored completions: everything but sampling. `step`
samples with the candidate's own transformers generation at the same length. Extra memory is the peak of an update above
what stands before it, when weights, masters and optimizer state are in memory: gradients, activations, logits. Every
group has signal, so nothing of ours is skipped for want of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import sharing
from benchmarks.results import Row, save, show
from e3fast.machine import set_threads
from e3fast.memory import reset_resident_peak, resident_bytes

GROUPS, SIZE, LENGTH, WARM, REPEATS = 8, 8, 16, 1, 5
STAGE_WARM, STAGE_STEPS = 2, 8
QUICKSTART = Path(__file__).parents[1] / "runs" / "quickstart.toml"
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},  # fp32 with gradient checkpointing
    "fp32-no-checkpointing": {"gradient_checkpointing": False},
    "bf16-autocast-no-checkpointing": {"gradient_checkpointing": False, "bf16": True},
    "bf16-weights-no-checkpointing": {"gradient_checkpointing": False, "dtype": "bfloat16"},
}
TARGETS = {"update_speedup": 3.0, "extra_memory_ratio": 1 / 3}


def questions() -> list[list[dict[str, str]]]:
    system = {"role": "system", "content": "Answer with the number only."}
    return [[system, {"role": "user", "content": f"Calculate {3 + i} + {12 - i}."}] for i in range(GROUPS)]


def stored_completions(tokenizer: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Prompt ids of each group and the same made-up completions for both trainers; the last token ends each."""
    import torch

    prompts = [
        tokenizer.apply_chat_template(q, add_generation_prompt=True, tokenize=True, return_dict=False)
        for q in questions()
    ]
    drawn = torch.randint(100, 40_000, (GROUPS * SIZE, LENGTH), generator=torch.Generator().manual_seed(0))
    drawn[:, -1] = tokenizer.eos_token_id
    return prompts, drawn.tolist()


def reward_of(i: int) -> float:
    """Two of three right, in a different place each group: every group has signal."""
    return float((i + i // SIZE) % 3 != 0)


def timed(call: Any, repeats: int) -> dict[str, Any]:
    for _ in range(WARM):
        call()
    seconds, extra = [], []
    for _ in range(repeats):
        reset_resident_peak()
        before, start = resident_bytes(), time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
        extra.append((resident_bytes("VmHWM") - before) / 2**20)
    return {"seconds": seconds, "extra_mib": extra}


def run_e3fast(part: str) -> dict[str, Any]:
    import dataclasses

    import torch

    from e3fast.advantages import make_samples
    from e3fast.config import ModelConfig, TrainConfig
    from e3fast.learner import LocalLearner
    from e3fast.machine import find_compute_dtype
    from e3fast.model import load_policy
    from e3fast.objective import loss_weights
    from e3fast.packing import pack
    from e3fast.rollout.transformers import TransformersEngine
    from e3fast.types import Group, LossParams, Prompt, Request, Rollout, Score

    device = torch.device("cpu")
    model, tokenizer = load_policy(ModelConfig(), find_compute_dtype("auto", device), device)
    learner = LocalLearner(model, TrainConfig(), device)
    engine = TransformersEngine(model, tokenizer, GROUPS * SIZE)
    prompt_ids, completions = stored_completions(tokenizer)
    prompts = [Prompt(str(g), g, tuple(ids), (), "", "") for g, ids in enumerate(prompt_ids)]
    requests = [Request(p, SIZE, 1.0, LENGTH, p.row) for p in prompts]

    def stored(g: int, j: int) -> Rollout:
        return Rollout(requests[g], tuple(completions[g * SIZE + j]), "", (-1.0,) * LENGTH, "stop", 0)

    def update(rollouts: list[list[Rollout]]) -> None:
        scores = [tuple(Score(reward_of(g * SIZE + j), "wrong") for j in range(SIZE)) for g in range(GROUPS)]
        groups = [Group(g, requests[g], tuple(rollouts[g]), scores[g]) for g in range(GROUPS)]
        samples, loss = make_samples(groups, "grpo"), LossParams()
        batch = pack(samples, loss_weights(samples, loss, LENGTH), 4096, 1)
        stats = learner.update(batch, loss)
        assert stats.stepped and stats.entropy_tokens == GROUPS * SIZE * LENGTH

    fixed = [[stored(g, j) for j in range(SIZE)] for g in range(GROUPS)]
    if part == "update":
        return timed(lambda: update(fixed), REPEATS)
    engine.end_tokens = [0]  # never sampled in practice: every completion has the full length, as TRL's below
    fill = lambda own: [dataclasses.replace(r, token_ids=(r.token_ids * LENGTH)[:LENGTH]) for r in own]  # noqa: E731
    return timed(lambda: update([fill(own) for own in engine.generate(requests)]), REPEATS)


def run_trl(setting: str, part: str) -> dict[str, Any]:
    import os

    os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1")
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from e3fast.demo_model import demo_checkpoint

    knobs = dict(TRL_SETTINGS[setting])
    dtype = getattr(torch, knobs.pop("dtype", "float32"))
    folder = demo_checkpoint("demo:smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    prompt_ids, completions = stored_completions(tokenizer)
    repeats = 3 if part == "update" else 2  # 10 to 30 s each

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [prompt_ids[i // SIZE] for i in range(len(prompts))],
            "completion_ids": completions[: len(prompts)],
            "logprobs": None,
        }

    def reward(completions: list[Any], **kwargs: Any) -> list[float | None]:
        return [reward_of(i) for i in range(len(completions))]

    marks: dict[str, Any] = {"seconds": [], "extra_mib": []}

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            reset_resident_peak()
            marks["before"], marks["start"] = resident_bytes(), time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            marks["seconds"].append(time.perf_counter() - marks["start"])
            marks["extra_mib"].append((resident_bytes("VmHWM") - marks["before"]) / 2**20)

    more: dict[str, Any] = (
        {"bf16": False} | knobs | ({"generation_kwargs": {"min_new_tokens": LENGTH}} if part == "step" else {})
    )
    config: Any = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=GROUPS * SIZE,
        num_generations=SIZE,
        max_completion_length=LENGTH,
        max_steps=WARM + repeats,
        learning_rate=1e-6,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )
    data = Dataset.from_list([{"prompt": q} for q in questions()] * (WARM + repeats))
    extra: dict[str, Any] = {"rollout_func": rollouts} if part == "update" else {}
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=reward,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Clock()],
        **extra,
    )
    trainer.train()
    return {name: marks[name][WARM:] for name in ("seconds", "extra_mib")}


def measure(provider: str, part: str) -> dict[str, Any]:
    """One candidate in its own process."""
    command = [sys.executable, "-m", "benchmarks.step", "--one", provider, "--part", part]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{provider} {part} failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    median = statistics.median
    print(
        f"{provider:>40} {part:>7}: {median(found['seconds']):6.2f} s, extra {median(found['extra_mib']):6.0f} MiB",
        flush=True,
    )
    return found


def compare_trl() -> list[Row]:
    rows = []
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for provider in ("e3fast", *(f"trl:{setting}" for setting in TRL_SETTINGS)):
        for part in ("update", "step"):
            found[provider, part] = one = measure(provider, part)
            rows.append(Row("trl", provider, f"{part}_seconds", one["seconds"], "s"))
            if part == "update":
                rows.append(Row("trl", provider, "update_extra_mib", one["extra_mib"], "MiB"))
    trl = [f"trl:{setting}" for setting in TRL_SETTINGS]
    seconds = lambda provider, part: statistics.median(found[provider, part]["seconds"])  # noqa: E731
    for part in ("update", "step"):
        fastest = min(trl, key=lambda provider: seconds(provider, part))
        ours = found["e3fast", part]["seconds"]
        rows.append(
            Row("trl", "e3fast", f"{part}_speedup", [seconds(fastest, part) / s for s in ours], f"x of {fastest}")
        )
        default = "trl:default"
        rows.append(
            Row(
                "trl",
                "e3fast",
                f"{part}_speedup_over_default",
                [seconds(default, part) / s for s in ours],
                f"x of {default}",
            )
        )
        if part == "update":
            theirs = statistics.median(found[fastest, part]["extra_mib"])
            ratios = [mib / theirs for mib in found["e3fast", part]["extra_mib"]]
            rows.append(Row("trl", "e3fast", "extra_memory_ratio", ratios, f"of {fastest}"))
    return rows


def missed(rows: list[Row]) -> list[str]:
    """Targets that the figures do not reach."""
    value = {row.metric: statistics.median(row.values) for row in rows if row.provider == "e3fast"}
    out = []
    if value["update_speedup"] < TARGETS["update_speedup"]:
        out.append(f"update_speedup {value['update_speedup']:.2f} < {TARGETS['update_speedup']}")
    if value["extra_memory_ratio"] > TARGETS["extra_memory_ratio"]:
        out.append(f"extra_memory_ratio {value['extra_memory_ratio']:.2f} > {TARGETS['extra_memory_ratio']:.2f}")
    return out


def stages() -> list[Row]:
    """The quickstart's first steps, nothing evaluated: each stage's share of a step, and what an update is made of."""
    import dataclasses

    from e3fast.config import load_config
    from e3fast.runlog import read_metrics
    from e3fast.train import train

    config = load_config(QUICKSTART)
    folder = Path(tempfile.mkdtemp()) / "run"
    train(
        dataclasses.replace(
            config,
            output_dir=str(folder),
            train=dataclasses.replace(config.train, steps=STAGE_WARM + STAGE_STEPS),
            eval=dataclasses.replace(config.eval, num_prompts=0),
        )
    )
    shares: dict[str, list[float]] = {}
    for step in read_metrics(folder)[STAGE_WARM:]:
        stage = {key.removeprefix("seconds/"): v for key, v in step.items() if key.startswith("seconds/")}
        inside = {f"update_{kind}": step.get(f"fit/{kind}_seconds") or 0.0 for kind in ("trained", "scored")}
        for name, spent in (stage | inside).items():
            shares.setdefault(name, []).append(100 * spent / sum(stage.values()))
    return [Row("quickstart", "e3fast", f"{name}_share_pct", values, "%") for name, values in shares.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--vs", choices=["trl"])
    kind.add_argument("--sharing", nargs="?", const="speed", choices=["speed", "gradients"])
    kind.add_argument("--stages", action="store_true")
    kind.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/")
    args = parser.parse_args()
    set_threads()
    if args.one:
        found = run_e3fast(args.part) if args.one == "e3fast" else run_trl(args.one.removeprefix("trl:"), args.part)
        print(json.dumps(found))
        return 0
    name, rows, failed = "step", [], []
    if args.stages:
        rows = stages()
    elif args.sharing:
        part = sharing.measure if args.sharing == "speed" else sharing.compare_gradients
        name, rows = "sharing", [row for case in sharing.CASES for row in part(case)]
        failed = sharing.missed(rows)
    else:
        rows = compare_trl()
        failed = missed(rows)
    show(name, rows)
    if args.save:
        save(name, rows)
    for line in failed:
        print(f"missed: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
