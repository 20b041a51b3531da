"""A run's parts, opened together and closed together: model, data, engine, learner, scorer, log, checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from e3fast import machine
from e3fast.agreement import check_mask, check_ratio
from e3fast.allocator import Allocator
from e3fast.checkpoint import load_checkpoint, save_checkpoint
from e3fast.config import RunConfig
from e3fast.config_text import config_text
from e3fast.costs import model_coefficients
from e3fast.evaluate import evaluate
from e3fast.learner import LocalLearner
from e3fast.methods import Method, PerturbedWeights, check_combination, combination_notes
from e3fast.metrics import peak_gib
from e3fast.model import check_lengths, load_policy
from e3fast.planning import describe_plan
from e3fast.progress import ProgressBar, summary_table
from e3fast.prompts import LoadedPrompts, PromptPool, encode_messages, load_prompts, question_texts
from e3fast.requests import make_context
from e3fast.rewards import find_reward
from e3fast.rewards.workers import RewardPool
from e3fast.rollout.open_engine import check_engine, open_engine
from e3fast.runlog import RunLog, read_evals, read_metrics, replace_file
from e3fast.streams import stream_key, uniforms
from e3fast.trials import Trials, try_caps
from e3fast.types import Prompt, StepContext

FAILED_ALARM = 0.01  # share of a step's rollouts without a verdict from which the user is told: a model can learn it


class Session:
    """Everything a run holds while it lives. The step itself is in train.py."""

    def __init__(self, config: RunConfig, scorer: RewardPool, log: RunLog, resources: contextlib.ExitStack) -> None:
        """`resources` ends what must not outlive the run."""
        self.config, self.scorer, self.log, self.folder = config, scorer, log, Path(config.output_dir)
        self.model, self.tokenizer, dtype, device = open_model(config)
        held_out, loaded = load_data(config, self.tokenizer)
        self.held_out, self.pool = held_out, PromptPool(loaded.prompts, config.seed)
        check_room(config, len(loaded.prompts))
        self.learner = make_learner(config, self.model, device)
        self.allocator = Allocator(config.train, model_coefficients(self.model.config.get_text_config()))
        engine = open_engine(config, self.model, self.tokenizer, loaded.prompts)
        self.engine = resources.enter_context(contextlib.closing(engine))
        self.next_step, self.generated_tokens, self.seconds = 0, 0, 0.0
        self.interrupted = False
        notes = [f"{machine.describe()}; compute {str(dtype).removeprefix('torch.')}, {len(loaded.prompts)} prompts"]
        notes += data_notes(loaded)
        if config.eval.num_prompts and not config.data.held_out:
            notes.append("no [[data.held_out]] source: nothing is evaluated before and after")
        notes += combination_notes(config)
        for method in config.methods:
            notes += method.start(config, len(loaded.prompts))
        saved = load_checkpoint(self.folder / "checkpoint") if config.resume else None
        if saved:
            self.check_saved(saved[1])
            self.allocator.restore(saved[1]["allocator"])  # a halved cap is tried as it stands
        self.told, self.packed_once = self.allocator.num_replans, False  # what the user knows of packing
        notes += self.confirm_caps()
        notes += self.confirm_agreement()
        if saved:
            self.restore(*saved)
        self.write_facts()
        self.bar = ProgressBar(config.train.steps, self.next_step)
        for note in notes:
            self.bar.note(note)
        self.started = time.perf_counter() - self.seconds

    def confirm_caps(self) -> list[str]:
        """Run full micro-batches before anything is sampled. ValueError where memory does not hold them."""
        config = self.config
        if not config.train.probe_memory:
            return []
        allocator, longest = self.allocator, config.data.max_prompt_tokens + config.rollout.max_new_tokens
        perturbed = find_perturbed(config.methods)
        at_draw = perturbed if perturbed and not perturbed.at_mean else None
        perturb = functools.partial(at_draw.perturb, self.context()) if at_draw else None
        vocab_size = self.model.config.get_text_config().vocab_size
        trials = Trials(self.learner, vocab_size, allocator.trained, perturb)
        plan = try_caps(self.learner, config.train, allocator.cap, allocator.forward_cap, longest, trials)
        return [plan.describe(allocator.cap)] if plan else []

    def confirm_agreement(self) -> list[str]:
        """The engine's log-probs are the learner's; where a mask goes by them, it keeps what has no noise."""
        parts = (self.config, self.pool, self.engine, self.learner, self.allocator)
        dtype = "bf16" if self.model.dtype == torch.bfloat16 else "fp32"
        notes = []
        perturbed = find_perturbed(self.config.methods)
        if perturbed and perturbed.band is not None and perturbed.behaviour_logprobs != "learner":
            notes.append(check_mask(*parts, perturbed.band))  # first: its limit is the tighter, its advice the nearer
        return [*notes, check_ratio(*parts, dtype)]

    def context(self) -> StepContext:
        """Of the step that comes next."""
        encode = functools.partial(encode_messages, self.tokenizer)
        return make_context(self.config, self.pool, self.next_step, encode, self.learner.latents)

    @property
    def finished(self) -> bool:
        limit = self.config.train.max_generated_tokens
        spent = bool(limit) and self.generated_tokens >= limit
        return self.interrupted or spent or self.next_step >= self.config.train.steps

    def end_step(self, metrics: dict[str, Any]) -> None:
        """Count, log and show a step; save where it is due."""
        self.next_step += 1
        self.generated_tokens += int(metrics["generated_tokens"])
        self.seconds = time.perf_counter() - self.started
        reports = {
            f"{snake(method)}/{key}": value for method in self.config.methods for key, value in method.report().items()
        }
        line = (
            metrics
            | reports
            | {
                "time": self.seconds,
                "tokens_per_second": metrics["generated_tokens"]
                / sum(v for k, v in metrics.items() if k.startswith("seconds/")),
                "total_generated_tokens": self.generated_tokens,
                "learning_rate": self.learner.optimizer.param_groups[0]["lr"],
                "peak_gib": peak_gib(),
                "entropy_target": reports.get("entropy_temperature/target"),
            }
        )
        self.log.write_step(line)
        self.bar.update(line)
        self.tell(metrics)
        failed = metrics["verdict/failed"]
        if failed > FAILED_ALARM * metrics["rollouts"]:
            self.bar.note(f"step {self.next_step}: {failed} rollouts without a verdict (reward raised or hung twice)")
        every = self.config.train.save_every
        if every and self.next_step % every == 0 and self.next_step < self.config.train.steps:
            self.save()

    def tell(self, metrics: dict[str, Any]) -> None:
        """How the first step was packed; later, what the allocator had to change."""
        step, allocator = self.next_step, self.allocator
        if not self.packed_once and allocator.last_plan:
            self.packed_once = True
            self.bar.note(f"step {step}: {describe_plan(allocator.last_plan)}")
        if allocator.num_replans > self.told:
            self.bar.note(f"step {step} did not fit in memory: micro-batches of {allocator.cap} tokens from now on")
        self.told = allocator.num_replans
        if metrics["samples_cut"]:
            self.bar.note(f"step {step}: {metrics['samples_cut']} completions cut to train.tokens_per_micro_batch")

    def write_facts(self) -> None:
        """What this run is, once nothing refuses it any more."""
        texts = {
            "config.toml": config_text(dataclasses.replace(self.config, resume=False)),
            "versions.json": json.dumps(machine.versions(), indent=1),
        }
        for name, text in texts.items():
            replace_file(self.folder / name, lambda path, text=text: path.write_text(text))

    def evaluate(self, step: int) -> None:
        """Held-out pass@k, logged; nothing where evaluation is off, or was done at this step before a resume."""
        if any(row.get("step") == step for row in read_evals(self.folder)):
            return
        prompts = choose(self.held_out.prompts, self.config.eval.num_prompts, self.config.seed)
        if not prompts:
            return
        self.bar.note(f"evaluating {len(prompts)} held-out prompts, {self.config.eval.samples} completions each")
        length, seed = self.config.rollout.max_new_tokens, self.config.seed
        result = evaluate(self.engine, self.scorer, prompts, self.config.eval, length, seed)
        self.log.write_eval({"step": step, **result})
        shares = ", ".join(f"{key} {value:.1%}" for key, value in result.items() if key.startswith("pass@"))
        self.bar.note(f"held out at step {step}: {shares} ({result['seconds']:.0f} s)")
        self.started += result["seconds"]  # a run's time is its training time

    def save(self) -> None:
        state = {
            "next_step": self.next_step,
            "generated_tokens": self.generated_tokens,
            "seconds": self.seconds,
            "pool": self.pool.state(),
            "methods": [method.state() for method in self.config.methods],
            "allocator": self.allocator.state(),
            "model": self.config.model.name,
        }
        save_checkpoint(self.folder / "checkpoint", self.model, self.tokenizer, self.learner.state(), state)

    def check_saved(self, state: dict[str, Any]) -> None:
        """ValueError where model or methods are not the ones that the checkpoint was made with."""
        if state["model"] != self.config.model.name or len(state["methods"]) != len(self.config.methods):
            raise ValueError(f"the checkpoint in {self.folder} was made with another model or other methods")

    def restore(self, learner: dict[str, Any], state: dict[str, Any]) -> None:
        """Go on from the run's checkpoint."""
        self.learner.load_state(learner)
        self.pool.restore(state["pool"])
        for method, saved in zip(self.config.methods, state["methods"], strict=True):
            method.restore(saved)
        self.next_step, self.generated_tokens = state["next_step"], state["generated_tokens"]
        self.seconds = state["seconds"]
        self.engine.load_weights(self.learner.weights(), policy_version=self.next_step)
        self.log.truncate_after(self.next_step)

    def close_with(self, report: Path) -> None:
        """The last words of a run: what it reached and where it is."""
        self.bar.close()
        evals, metrics = read_evals(self.folder), read_metrics(self.folder)
        after = evals[-1] if len(evals) > 1 else None
        self.bar.console.print(summary_table(evals[0] if evals else None, after, metrics))
        self.bar.note(f"report: {report}")
        self.bar.note(f"trained model: {self.folder / 'checkpoint' / 'model'}")
        if self.interrupted:
            self.bar.note(f"interrupted after step {self.next_step}: go on with --resume")


@contextlib.contextmanager
def open_session(config: RunConfig) -> Iterator[Session]:
    """A session that ends after the step under way on Ctrl-C or SIGTERM; a second one ends it at once."""
    check_combination(config)
    check_engine(config)
    log = open_log(config)
    with (
        RewardPool(find_reward(config.reward), config.reward.num_workers, config.reward.deadline) as scorer,
        contextlib.ExitStack() as resources,
    ):
        session = Session(config, scorer, log, resources)

        def stop(number: int, frame: FrameType | None) -> None:
            if session.interrupted:
                raise KeyboardInterrupt
            session.interrupted = True
            session.bar.note("interrupted: finishing this step, then saving (once more to stop at once)")

        # Python gives signals to the main thread alone; a run in another thread has none to catch.
        caught = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        before = [(number, signal.signal(number, stop)) for number in caught]
        try:
            yield session
        finally:
            for number, handler in before:
                signal.signal(number, handler)
            session.bar.close()


def open_log(config: RunConfig) -> RunLog:
    """The run's folder. A new run never writes over an old one's."""
    folder = Path(config.output_dir)
    if not config.resume:
        saved = (folder / "checkpoint").exists()
        if saved or (folder / "metrics.jsonl").exists():
            advice = "choose another --output-dir, delete it" + (", or add --resume" if saved else "")
            raise ValueError(f"{folder} holds a run already: {advice}")
        (folder / "eval.jsonl").unlink(missing_ok=True)  # of a run that ended before its first step
    return RunLog(folder)


def open_model(config: RunConfig) -> tuple[Any, Any, torch.dtype, torch.device]:
    """The run's model and tokenizer on this machine's device, in its number format."""
    print(f"loading {config.model.name}", flush=True)
    device = machine.find_device()
    dtype = machine.find_compute_dtype(config.model.compute_dtype, device)
    model, tokenizer = load_policy(config.model, dtype, device)
    check_lengths(model, config.data.max_prompt_tokens, config.rollout.max_new_tokens)
    return model, tokenizer, dtype, device


def find_perturbed(methods: Sequence[Method]) -> PerturbedWeights | None:
    return next((method for method in methods if isinstance(method, PerturbedWeights)), None)


def make_learner(config: RunConfig, model: Any, device: torch.device) -> LocalLearner:
    """The learner, with what the run's methods and loss need of it."""
    perturbed = find_perturbed(config.methods)
    learner = LocalLearner(model, config.train, device, perturbed.ivon if perturbed else None)
    needed = frozenset().union(*(method.needs for method in config.methods))
    if config.loss.beta or "reference" in needed:
        learner.keep_reference()
    if "latents" in needed:
        learner.measure_latents(config.seed)
    return learner


def load_data(config: RunConfig, tokenizer: Any) -> tuple[LoadedPrompts, LoadedPrompts]:
    """Held-out prompts, and the training pool without them."""
    data = config.data
    if not data.train:
        raise ValueError("no training data: add at least one [[data.train]] table with a source")
    held_out = LoadedPrompts((), 0, 0, ())
    if data.held_out:  # with evaluation off too: what is trained on must not depend on it
        held_out = load_prompts(data.held_out, data, tokenizer, config.seed, role="held_out")
    known = question_texts(held_out.prompts)
    return held_out, load_prompts(data.train, data, tokenizer, config.seed, "train", known)


def choose(prompts: Sequence[Prompt], num_prompts: int, seed: int) -> list[Prompt]:
    """A fixed random `num_prompts` of them (all, if there are fewer), in their own order: no source goes short."""
    order = np.argsort(uniforms(stream_key(seed, "held-out"), range(len(prompts))), kind="stable")
    return [prompts[row] for row in sorted(order[:num_prompts])]


def check_room(config: RunConfig, num_prompts: int) -> None:
    batch, cap = config.train.prompts_per_step, config.train.tokens_per_micro_batch
    if batch > num_prompts:
        raise ValueError(f"train.prompts_per_step={batch} is more than the {num_prompts} prompts of the training pool")
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    largest = config.train.hard_cap or cap
    if config.train.over_long == "cut":
        if config.data.max_prompt_tokens >= cap:
            raise ValueError(
                f"data.max_prompt_tokens={config.data.max_prompt_tokens} leaves no room for a completion under "
                f"train.tokens_per_micro_batch={cap}; raise one or lower the other"
            )
    elif longest > largest:
        name = "hard_cap" if config.train.hard_cap else "tokens_per_micro_batch"
        raise ValueError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {longest} exceed train.{name}={largest}; "
            "raise it, lower one of them, or set train.over_long"
        )


def data_notes(loaded: LoadedPrompts) -> list[str]:
    counts = [
        (loaded.num_too_long, "longer than data.max_prompt_tokens"),
        (loaded.num_excluded, "that stand in the held-out set"),
    ]
    return [*loaded.notes, *(f"left out {n} prompts {why}" for n, why in counts if n)]


def snake(method: Any) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in type(method).__name__).lstrip("_")


def evaluate_only(config: RunConfig) -> dict[str, Any]:
    """pass@k of `config.model` on the run's held-out prompts, without training anything."""
    if not config.data.held_out:
        raise ValueError("nothing to evaluate on: add at least one [[data.held_out]] table with a source")
    check_engine(config)
    model, tokenizer, _, _ = open_model(config)
    held_out = load_prompts(config.data.held_out, config.data, tokenizer, config.seed, "held_out")
    prompts = choose(held_out.prompts, config.eval.num_prompts, config.seed)
    engine = open_engine(config, model, tokenizer, held_out.prompts)
    with (
        contextlib.closing(engine),
        RewardPool(find_reward(config.reward), config.reward.num_workers, config.reward.deadline) as scorer,
    ):
        return evaluate(engine, scorer, prompts, config.eval, config.rollout.max_new_tokens, config.seed)
