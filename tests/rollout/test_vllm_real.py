"""A real vLLM on a CPU: tiny random models and the demo model. Run by `make check-vllm`, in its own environment."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from e3fast.agreement import sample_gaps
from e3fast.allocator import Allocator
from e3fast.config import DataConfig, ModelConfig, RolloutConfig, RunConfig, load_config
from e3fast.config_text import config_text
from e3fast.costs import model_coefficients
from e3fast.learner import LocalLearner
from e3fast.model import load_policy
from e3fast.prompts import PromptPool
from e3fast.rollout import vllm_host
from e3fast.rollout.engine import EngineError
from e3fast.rollout.open_engine import engine_settings, open_engine
from e3fast.rollout.peers import ProcessPeer
from e3fast.rollout.proof import make_proof
from e3fast.rollout.vllm import VllmEngine, make_ask
from e3fast.rollout.vllm_api import InProcess
from e3fast.train import train
from tests.records import prompt, request
from tests.tiny import save_tiny

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm
PROMPTS = [prompt(i, np.random.default_rng(i).integers(1, 257, 12 + 9 * i).tolist()) for i in range(4)]
CPU = torch.device("cpu")


def config_of(folder, out):
    return RunConfig(
        output_dir=str(out),
        model=ModelConfig(name=str(folder), compute_dtype="fp32"),
        data=DataConfig(max_prompt_tokens=64),
        rollout=RolloutConfig(engine="vllm", max_new_tokens=24, max_sequences=32),
    )


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def parts(request, tmp_path_factory):
    """(config, model, engine) of a tiny model, with and without an output head of its own."""
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=request.param)
    config = config_of(folder, tmp_path_factory.mktemp("run"))
    model, tokenizer = load_policy(config.model, torch.float32, CPU)
    with contextlib.closing(open_engine(config, model, tokenizer, PROMPTS)) as engine:
        yield config, model, engine


def gaps(config, model, engine):
    """learner - engine, of the tokens of 32 rollouts, by the learner's own packed pass."""
    learner, allocator = (
        LocalLearner(model, config.train, CPU),
        Allocator(config.train, model_coefficients(model.config)),
    )
    return np.concatenate(sample_gaps(config, PromptPool(PROMPTS, 0), engine, learner, allocator, 32, 24))


def vllm_asks(asked):
    return [make_ask(asked, j) for j in range(asked.num_rollouts)]


def knobs(seed=0):
    return [request(p, 2 + i, 0.6 + 0.4 * i, seed=seed + i, max_new_tokens=6 + 6 * i) for i, p in enumerate(PROMPTS)]


def test_counts_temperatures_limits_and_reasons(parts):
    _, _, engine = parts
    done = engine.generate(knobs())
    assert [len(own) for own in done] == [2, 3, 4, 5]
    for own, asked in zip(done, knobs(), strict=True):
        assert len({rollout.token_ids for rollout in own}) > 1, "each completion has a random stream of its own"
        for rollout in own:
            ended = rollout.token_ids[-1] == 0
            assert rollout.finish_reason == ("stop" if ended else "length") and 0 not in rollout.token_ids[:-1]
            assert ended or len(rollout.token_ids) == asked.max_new_tokens
            assert len(rollout.rollout_logprobs) == len(rollout.token_ids)
    assert engine.generate(knobs()) == done, "the seeds decide"


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_log_probs_are_the_learners_at_the_temperature(parts, temperature):
    """prime-rl#697: raw against processed log-probs."""
    config, model, engine = parts
    hot = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, temperature=temperature))
    assert np.abs(gaps(hot, model, engine)).max() < 1e-4


def test_new_weights_are_sampled_from_and_travel_with_the_rollout(parts):
    config, model, engine = parts
    kept = {name: param.detach().clone() for name, param in model.named_parameters()}
    before = engine.generate(knobs())
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.2)
    engine.load_weights(model.named_parameters(), policy_version=5)
    after = engine.generate(knobs())
    assert {r.policy_version for own in after for r in own} == {5} and after != before
    assert np.abs(gaps(config, model, engine)).max() < 1e-4
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(kept[name])
    engine.load_weights(model.named_parameters(), policy_version=0)
    assert engine.generate(knobs()) == before


def resident_mib(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def test_twenty_cycles_have_equal_log_probs_and_no_growth(parts):
    _, model, engine = parts
    first, memory = None, []
    for _ in range(20):
        engine.sleep()
        engine.wake()
        engine.load_weights(model.named_parameters(), policy_version=0)
        found = [rollout.rollout_logprobs for own in engine.generate(knobs()) for rollout in own]
        first = first or found
        assert found == first
        memory.append(resident_mib(engine.peer.process.pid) + resident_mib("self"))
    assert memory[-1] - memory[4] < 16, memory


def test_killed_in_the_middle_of_a_batch(parts):
    config, _, engine = parts
    asked = [dataclasses.replace(r, num_rollouts=30, max_new_tokens=24) for r in knobs(seed=9)]
    whole, killed = engine.generate(asked), engine.peer.process.pid
    sample = engine.peer.sample

    def kill_behind_five(asks):
        for count, found in enumerate(sample(asks)):
            if count == 5 and engine.peer.process.pid == killed:
                os.kill(killed, signal.SIGKILL)
            yield found

    engine.peer.sample = kill_behind_five
    try:
        again = engine.generate(asked)
    finally:
        engine.peer.sample = sample
    assert engine.num_restarts == 1 and engine.peer.process.pid != killed
    assert [[r.token_ids for r in own] for own in again] == [[r.token_ids for r in own] for own in whole]
    assert Path(config.output_dir, "vllm.log").stat().st_size > 0


def test_a_context_beyond_max_model_len(parts):
    with pytest.raises(ValueError, match="exceed the engine's context of 88 tokens"):
        parts[2].generate([request(PROMPTS[0], 1, max_new_tokens=80)])


def sample_and_count(settings, weights, asks, answer):
    """In a process of its own: answers, and the tokens that forward passes were made over."""
    engine = InProcess(settings)
    engine.load(weights, {}, 0)
    scheduler, counts = engine.llm.llm_engine.engine_core.engine_core.scheduler, []
    schedule = scheduler.schedule

    def counting(*arguments, **named):
        output = schedule(*arguments, **named)
        counts.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = counting
    found = dict(filter(None, engine.sample(asks)))
    answer.put(([found[i] for i in range(len(asks))], sum(counts)))


@pytest.mark.parametrize("crowded", [False, True])
def test_a_prompt_is_worked_out_once_for_its_rollouts(tmp_path, crowded):
    """Within a block of 32 tokens and beyond it. `crowded`: a cache so small that rollouts wait and are preempted."""
    config = config_of(save_tiny(tmp_path / "tiny"), tmp_path)
    model, _ = load_policy(config.model, torch.float32, CPU)
    settings = engine_settings(config, model.config, model.dtype, CPU, [0])
    if crowded:
        settings = dataclasses.replace(settings, kv_cache_bytes=settings.kv_cache_bytes // 9)
    asked = PROMPTS * 2 if crowded else PROMPTS
    asks = [vllm_asks(request(p, 8, 1.0, seed=i, max_new_tokens=24)) for i, p in enumerate(asked)]
    asks = [ask for own in asks for ask in own]
    weights = [(name, param.detach()) for name, param in model.named_parameters()]
    context, found = torch.multiprocessing.get_context("spawn"), {}
    for share in (True, False):
        answer = context.Queue()
        own = dataclasses.replace(settings, share_prompts=share)
        process = context.Process(target=sample_and_count, args=(own, weights, asks, answer))
        process.start()
        found[share] = answer.get(timeout=120)
        process.join()
    (shared, fewer), (plain, more) = found[True], found[False]
    assert [a.token_ids for a in shared] == [a.token_ids for a in plain]
    assert max(abs(x - y) for a, b in zip(shared, plain, strict=True) for x, y in zip(a[1], b[1], strict=True)) < 1e-4
    decoded = sum(len(a.token_ids) for a in shared)
    prompts = sum(len(p.token_ids) for p in PROMPTS)
    if not crowded:
        assert fewer == prompts + decoded - len(PROMPTS), "each prompt once; the first rollout's last token not at all"
    assert fewer < more - 3 * prompts


def host_of_vllm_as_it_is(conn, buffer, settings, log):
    """Without what e3fast does for tied heads."""
    from e3fast.rollout import vllm_receiver

    vllm_receiver.refresh_tied_head = lambda model: None
    vllm_host.host(conn, buffer, settings, log)


def test_a_tied_head_that_keeps_its_old_weights_is_caught(tmp_path):
    """vLLM 0.32 on a CPU, silently; no checksum shows it, since the head's packed copy is nowhere to be read."""
    config = config_of(save_tiny(tmp_path / "tiny"), tmp_path)
    model, tokenizer = load_policy(config.model, torch.float32, CPU)
    settings = engine_settings(config, model.config, model.dtype, CPU, [0])
    peer = ProcessPeer(settings, tmp_path / "log", 60.0, host_of_vllm_as_it_is)
    engine = VllmEngine(peer, make_proof(model, PROMPTS[3].token_ids), tokenizer, settings.max_model_len)
    with contextlib.closing(engine), pytest.raises(EngineError, match=r"^probe: after the hand-over of version 0"):
        engine.start()


@pytest.fixture
def server(tmp_path):
    """(run with rollout.server_url, its process) of `e3fast serve` on a tiny model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = config_of(save_tiny(tmp_path / "tiny"), tmp_path / "run")
    url = f"http://127.0.0.1:{port}"
    config = dataclasses.replace(
        config, rollout=dataclasses.replace(config.rollout, engine="vllm-server", server_url=url)
    )
    (tmp_path / "run.toml").write_text(config_text(config))
    processes = []

    def start():
        command = [sys.executable, "-m", "e3fast.cli", "serve", str(tmp_path / "run.toml")]
        with (tmp_path / "server.log").open("ab") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))

    start()
    yield config, processes, start
    os.killpg(processes[-1].pid, signal.SIGKILL)


def test_a_server_is_handed_weights_sampled_from_and_may_die(server):
    config, processes, start = server
    model, tokenizer = load_policy(config.model, torch.float32, CPU)
    with contextlib.closing(open_engine(config, model, tokenizer, PROMPTS)) as engine:
        done = engine.generate(knobs())
        assert [len(own) for own in done] == [2, 3, 4, 5] and np.abs(gaps(config, model, engine)).max() < 1e-4
        with torch.no_grad():
            model.model.norm.weight.mul_(1.1)
        engine.load_weights(model.named_parameters(), policy_version=4)
        done = engine.generate(knobs())
        assert {r.policy_version for own in done for r in own} == {4}
        assert np.abs(gaps(config, model, engine)).max() < 1e-4
        os.killpg(processes[-1].pid, signal.SIGKILL)
        processes[-1].wait()
        start()  # as a supervisor would: with no weights of ours
        assert engine.generate(knobs()) == done and engine.num_restarts >= 1


def test_a_model_that_vllm_cannot_load(tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    config = config_of(folder, tmp_path)
    model, tokenizer = load_policy(config.model, torch.float32, CPU)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"architectures": ["NobodyForCausalLM"]}))
    with pytest.raises(EngineError, match=r"^start: .*NobodyForCausalLM.*its log: .*vllm.log"):
        open_engine(config, model, tokenizer, PROMPTS)


def test_a_run_on_the_demo_model(tmp_path):
    """bf16 where the machine has it; two steps of the quickstart, evaluations included."""
    config = load_config(Path(__file__).parents[2] / "runs" / "quickstart.toml")
    config = dataclasses.replace(
        config,
        output_dir=str(tmp_path / "run"),
        rollout=dataclasses.replace(config.rollout, engine="vllm"),
        train=dataclasses.replace(config.train, steps=2),
        eval=dataclasses.replace(config.eval, num_prompts=16),
    )
    threads = threading.active_count()
    assert train(config) is False
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert 0 < line["mismatch_mean"] < 0.25 and 0 < line["mismatch_kl"] < 0.1
        assert 0.5 < line["effective_sample_share"] <= 1 and line["importance_capped"] < 0.2
        assert line["engine/restarts"] == 0 and line["engine/handover_seconds"] > 0 and line["stepped"]
    assert len(lines) == 2 and threading.active_count() <= threads + 1
