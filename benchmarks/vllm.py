"""The vLLM engine against vLLM itself, its hand-over, and a whole run against the transformers engine.

    python -m benchmarks.vllm [--case demo demo-fp32] [--skip-runs] [--save]     in the environment of make setup-vllm

Cases: the demo model in bf16 (demo), in fp32 (demo-fp32), and with long completions (demo-long). Metrics:

- throughput_over_raw: tokens/s of the adapter over those of LLM.generate on the same requests: unequal counts and
  temperatures, in one call. Processes alternate, two of each, three batches in each after one to warm up.
- handover_seconds: of the later 15 of 20 cycles of sleep, wake, load, generate: checksums and probe included.
- cycle_growth_mib: resident memory of both processes after cycle 20 less after cycle 5. The benchmark fails where the
  log-probs of a cycle differ from the first's.
- logprob_mean_abs_diff, logprob_max_abs_diff: learner less engine over the tokens of 64 rollouts, nats.
- end_to_end_speedup: seconds of `e3fast train runs/quickstart.toml` by transformers over those by vLLM, as whole
  processes, start of vLLM and evaluations included; run_tokens what each generated, trained_tokens what each got a
  backward pass over: each samples on its own, so the two do not do the same work. Case demo-long is whole runs alone:
  the same file with completions of up to 128 tokens in place of 20, ten steps, no evaluation.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import Row, save, show
from e3fast.config import RunConfig, load_config
from e3fast.types import Request

RUN_FILE = Path(__file__).parents[1] / "runs" / "quickstart.toml"
DTYPES = {"demo": "bf16", "demo-fp32": "fp32"}
LONG, LONG_STEPS, LONG_TOKENS = "demo-long", 10, 128
TARGETS = {"throughput_over_raw": 0.9, "end_to_end_speedup": 1.0}  # at least
LIMITS = {"handover_seconds": 1.0}  # at most
ROUNDS, BATCHES, CYCLES, SETTLED, NEW_TOKENS = 2, 3, 20, 5, 64


def case_config(case: str, folder: str) -> RunConfig:
    config = load_config(RUN_FILE)
    return dataclasses.replace(
        config,
        output_dir=folder,
        model=dataclasses.replace(config.model, compute_dtype=DTYPES[case]),
        rollout=dataclasses.replace(config.rollout, engine="vllm", max_new_tokens=NEW_TOKENS),
    )


class Parts:
    """Model, prompts, learner and the engine on them, as a run opens them."""

    def __init__(self, config: RunConfig) -> None:
        from e3fast.allocator import Allocator
        from e3fast.costs import model_coefficients
        from e3fast.learner import LocalLearner
        from e3fast.prompts import PromptPool
        from e3fast.rollout.open_engine import engine_settings, open_engine
        from e3fast.rollout.transformers import end_of_sequence
        from e3fast.session import load_data, open_model

        self.config = config
        model, tokenizer, _, device = open_model(config)
        self.pool = PromptPool(load_data(config, tokenizer)[1].prompts, config.seed)
        self.learner = LocalLearner(model, config.train, device)
        self.allocator = Allocator(config.train, model_coefficients(model.config))
        end_tokens = end_of_sequence(model, tokenizer)
        self.settings = engine_settings(config, model.config, model.dtype, device, end_tokens)
        self.open = lambda: open_engine(config, model, tokenizer, self.pool.prompts)

    def requests(self, seed: int) -> list[Request]:
        """16 prompts, 4 to 12 completions each, at temperatures from 0.8 to 1.2."""
        prompts = self.pool.prompts[:16]
        return [Request(p, 4 + i % 9, 0.8 + 0.1 * (i % 5), NEW_TOKENS, 100 * seed + i) for i, p in enumerate(prompts)]


def raw_tokens_per_second(settings: Any, batches: list[list[Request]], answer: Any) -> None:
    """In a process of its own: LLM.generate on the checkpoint's own weights, one SamplingParams a request."""
    from e3fast.rollout.vllm_api import engine_arguments, set_environment

    set_environment()
    from vllm.entrypoints.llm import LLM
    from vllm.sampling_params import SamplingParams

    settings = dataclasses.replace(settings, share_prompts=False)
    arguments = engine_arguments(settings) | {"load_format": "auto", "weight_transfer_config": None}
    llm = LLM(**arguments)
    stop = list(settings.end_tokens)
    found = []
    for batch in batches:
        prompts = [{"prompt_token_ids": list(request.engine_ids)} for request in batch]
        parameters = [
            SamplingParams(
                n=r.num_rollouts,
                temperature=r.temperature,
                max_tokens=r.max_new_tokens,
                seed=r.seed,
                logprobs=0,
                stop_token_ids=stop,
                ignore_eos=True,
                detokenize=False,
            )
            for r in batch
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        tokens = sum(len(o.token_ids) for output in outputs for o in output.outputs)
        found.append(tokens / (time.perf_counter() - start))
    answer.put(found)


def measure_raw(parts: Parts, batches: list[list[Request]]) -> list[float]:
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=raw_tokens_per_second, args=(parts.settings, batches, answer))
    # As a user of vLLM alone has it: threads spin as torch's default is, not as the trainer's own are set.
    before = os.environ.pop("GOMP_SPINCOUNT", None)
    process.start()
    if before is not None:
        os.environ["GOMP_SPINCOUNT"] = before
    found = answer.get(timeout=900)
    process.join()
    return found[1:]


def measure_adapter(parts: Parts, batches: list[list[Request]]) -> list[float]:
    engine = parts.open()
    found = []
    for batch in batches:
        start = time.perf_counter()
        tokens = sum(len(r.token_ids) for own in engine.generate(batch) for r in own)
        found.append(tokens / (time.perf_counter() - start))
    engine.close()
    return found[1:]


def throughput(parts: Parts) -> dict[str, list[float]]:
    batches = [parts.requests(seed) for seed in range(BATCHES + 1)]
    raw, adapter, ratios = [], [], []
    for _ in range(ROUNDS):
        raw_round, own_round = measure_raw(parts, batches), measure_adapter(parts, batches)
        raw, adapter = raw + raw_round, adapter + own_round
        ratios += [b / a for a, b in zip(raw_round, own_round, strict=True)]
    return {"raw_tokens_per_second": raw, "tokens_per_second": adapter, "throughput_over_raw": ratios}


def cycles(parts: Parts) -> dict[str, list[float]]:
    from e3fast.agreement import sample_gaps

    engine: Any = parts.open()
    asked, seconds, memory, first = parts.requests(0)[:4], [], [], None
    for cycle in range(CYCLES):
        engine.sleep()
        engine.wake()
        engine.load_weights(parts.learner.weights(), policy_version=cycle)
        seconds.append(engine.report()["engine/handover_seconds"])
        logprobs = [rollout.rollout_logprobs for own in engine.generate(asked) for rollout in own]
        first = first or logprobs
        if logprobs != first:
            raise RuntimeError(f"cycle {cycle} has other log-probs than the first")
        memory.append(resident_mib("self") + resident_mib(str(engine.peer.process.pid)))
    gaps = np.concatenate(sample_gaps(parts.config, parts.pool, engine, parts.learner, parts.allocator, 64, NEW_TOKENS))
    engine.close()
    return {
        "handover_seconds": seconds[SETTLED:],
        "cycle_growth_mib": [memory[-1] - memory[SETTLED - 1]],
        "logprob_mean_abs_diff": [float(np.abs(gaps).mean())],
        "logprob_max_abs_diff": [float(np.abs(gaps).max())],
    }


def resident_mib(process: str) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def run_config(case: str) -> RunConfig:
    config = load_config(RUN_FILE)
    if case != LONG:
        return config
    return dataclasses.replace(
        config,
        rollout=dataclasses.replace(config.rollout, max_new_tokens=LONG_TOKENS),
        train=dataclasses.replace(config.train, steps=LONG_STEPS),
        eval=dataclasses.replace(config.eval, num_prompts=0),
    )


def whole_runs(case: str, folder: Path) -> dict[str, list[float]]:
    """One run by each engine, one after the other."""
    from benchmarks.quickstart import run

    config, found = run_config(case), {}
    for engine in ("transformers", "vllm"):
        asked = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, engine=engine))
        found[engine] = run(asked, folder / f"{case}-{engine}")
    figures = {"end_to_end_speedup": [found["transformers"]["seconds"] / found["vllm"]["seconds"]]}
    for engine, prefix in (("transformers", "transformers_"), ("vllm", "")):
        steps = found[engine]["metrics"]
        total = lambda key, steps=steps: [float(sum(step[key] for step in steps))]  # noqa: E731
        figures |= {
            f"{prefix}run_seconds": [found[engine]["seconds"]],
            f"{prefix}generate_seconds": total("seconds/generate"),
            f"{prefix}run_tokens": total("generated_tokens"),
            f"{prefix}trained_tokens": total("trained_tokens"),
        }
    return figures


UNITS = {"throughput_over_raw": "x", "end_to_end_speedup": "x", "cycle_growth_mib": "MiB"}


def unit(metric: str) -> str:
    if metric.endswith("seconds") or metric.endswith("diff"):
        return "nats" if metric.endswith("diff") else "s"
    return UNITS.get(metric, "tokens/s" if metric.endswith("per_second") else "")


def missed(metric: str, values: Sequence[float], case: str) -> bool:
    middle = statistics.median(values)
    limit = 1e-3 if (metric, case) == ("logprob_mean_abs_diff", "demo-fp32") else LIMITS.get(metric, float("inf"))
    return middle > limit or middle < TARGETS.get(metric, -float("inf"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=[*DTYPES, LONG], default=[*DTYPES, LONG])
    parser.add_argument("--skip-runs", action="store_true", help="leave the two whole trainings out")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/vllm.csv")
    options = parser.parse_args(argv)
    rows, failed = [], []
    with tempfile.TemporaryDirectory() as name:
        for case in options.case:
            found: dict[str, list[float]] = {}
            if case in DTYPES:
                parts = Parts(case_config(case, f"{name}/{case}"))
                found = throughput(parts) | cycles(parts)
                del parts
            if case in ("demo", LONG) and not options.skip_runs:
                found |= whole_runs(case, Path(name))
            rows += [Row(case, "e3fast", metric, values, unit(metric)) for metric, values in found.items()]
            failed += [f"{case} {metric}" for metric, values in found.items() if missed(metric, values, case)]
    show("vLLM", rows)
    if options.save:
        save("vllm", rows)
    for name in failed:
        print(f"target missed: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
