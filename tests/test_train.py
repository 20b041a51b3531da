"""The whole loop on a tiny random model: generate, score, pack, step, save, load; its laws and its bad inputs."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from e3fast import trials
from e3fast.cli import main
from e3fast.config import load_config
from e3fast.learner import LocalLearner
from e3fast.methods import Method
from e3fast.runlog import read_evals, read_metrics, read_rollouts
from e3fast.train import train
from tests.tiny import make_tokenizer, save_tiny

RUN = """
output_dir = "{out}"
[model]
name = "{model}"
compute_dtype = "fp32"
[data]
system = "Sum."
max_prompt_tokens = 120
[[data.train]]
source = "gym:basic_arithmetic"
count = 12
options = {{min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1, allow_parentheses = false}}
[[data.held_out]]
source = "gym:chain_sum"
count = 4
[rollout]
rollouts_per_prompt = 4
max_new_tokens = 8
[reward]
name = "tests.test_train:vowels"
[train]
steps = 4
prompts_per_step = 4
tokens_per_micro_batch = 400
learning_rate = 1e-3
[eval]
num_prompts = 4
samples = 2
ks = [1, 2]
"""
E3 = """
[[methods]]
name = "rollout_budget"
min_group = 2
max_group = 6
[[methods]]
name = "entropy_temperature"
"""


def vowels(prompt, rollout):
    """A reward a random model can earn: the share of small letters."""
    return float(sum("a" <= c <= "z" for c in rollout.text) >= 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def run_file(tmp_path, model, text=RUN + E3, name="run", **changes):
    path = tmp_path / f"{name}.toml"
    text = text.format(out=tmp_path / name, model=model)
    for old, new in changes.items():
        text = text.replace(old, new)
    path.write_text(text)
    return path


def start(*args, **kwargs):
    path = run_file(*args, **kwargs)
    assert train(load_config(path)) is False
    return path.with_suffix("")


def fingerprint(folder):
    """What must not differ between two equal runs: rollouts, metrics but times, weights."""
    timed = ("time", "seconds/", "fit/", "tokens_per_second", "peak_gib")
    lines = [{k: v for k, v in row.items() if not k.startswith(timed)} for row in read_metrics(folder)]
    weights = torch.load(folder / "checkpoint" / "learner.pt", weights_only=True)["masters"]
    return lines, read_rollouts(folder).to_pylist(), [w.detach().numpy().tobytes() for w in weights]


def test_whole_loop(tmp_path, model):
    folder = start(tmp_path, model)
    metrics, evals = read_metrics(folder), read_evals(folder)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3] and [row["step"] for row in evals] == [0, 4]
    rollouts = read_rollouts(folder).to_pylist()
    assert len(rollouts) == sum(row["rollouts"] for row in metrics) == 4 * 4 * 4
    assert {row["group_size_max"] for row in metrics} > {4}, "the second phase must have unequal groups"
    assert metrics[2]["temperature"] != 1.0 and metrics[0]["entropy"] > 0
    assert all(row["ratio_max"] == 1.0 for row in metrics if row["stepped"])
    assert all(row["mismatch_max"] < 1e-3 for row in metrics)
    assert (folder / "report.html").stat().st_size > 100_000
    assert (folder / "checkpoint" / "model" / "model.safetensors").exists()
    again = load_config(run_file(tmp_path, folder / "checkpoint" / "model", name="again"))
    assert again.model.name.endswith("model") and train(again) is False


def test_a_seed_reproduces_a_run_bit_for_bit(tmp_path, model):
    first, second = (fingerprint(start(tmp_path, model, name=name)) for name in ("a", "b"))
    assert first == second


def test_no_methods_is_the_base_method_is_plain_grpo(tmp_path, model):
    plain = start(tmp_path, model, RUN, name="plain")
    base = start(tmp_path, model, RUN + '[[methods]]\nname = "e3fast.methods.base:Method"\n', name="base")
    assert fingerprint(plain) == fingerprint(base)
    assert {row["group_size_max"] for row in read_metrics(plain)} == {4}
    assert {row["temperature"] for row in read_metrics(plain)} == {1.0}


def test_resume_goes_on_where_the_run_stopped(tmp_path, model):
    whole = start(tmp_path, model, name="whole")
    path = run_file(tmp_path, model, name="parts")
    text = path.read_text()
    path.write_text(text.replace("learning_rate = 1e-3", "learning_rate = 1e-3\nmax_generated_tokens = 200"))
    train(load_config(path))
    done = len(read_metrics(path.with_suffix("")))
    assert 0 < done < 4
    path.write_text("resume = true\n" + text)
    train(load_config(path))
    assert fingerprint(path.with_suffix("")) == fingerprint(whole)


def test_a_run_goes_on_where_memory_runs_out(tmp_path, model, monkeypatch, capsys):
    """The step is repeated in smaller micro-batches, the user is told once, and a resumed run keeps the smaller cap."""
    backward = LocalLearner.backward

    def tight(self, micro_batch, formula, totals):
        backward(self, micro_batch, formula, totals)
        if micro_batch.num_tokens > 200:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    text = RUN.replace("learning_rate", "probe_memory = false\nshare_prompts = false\nlearning_rate")
    roomy = start(tmp_path, model, text.replace("batch = 400", "batch = 199"), name="roomy")
    monkeypatch.setattr(LocalLearner, "backward", tight)
    folder = start(tmp_path, model, text, name="tight")
    metrics = read_metrics(folder)
    assert metrics[-1]["allocator/cap"] <= 200 and metrics[-1]["allocator/replans"] == 1
    assert capsys.readouterr().out.count("did not fit in memory") == 1
    norms = lambda where: [row["grad_norm"] for row in read_metrics(where)]  # noqa: E731
    assert norms(folder) == pytest.approx(norms(roomy), rel=1e-3) and min(norms(folder)) > 0
    state = json.loads((folder / "checkpoint" / "state.json").read_text())["allocator"]
    assert state["caps"][0] == metrics[-1]["allocator/cap"]
    # On resume the smaller cap is what is tried, and the old event is not told again.
    longer = text.replace("steps = 4", "steps = 5").replace("probe_memory = false", "probe_memory = true")
    path = run_file(tmp_path, model, "resume = true\n" + longer, name="tight")
    assert train(load_config(path)) is False and len(read_metrics(folder)) == 5
    assert "did not fit" not in capsys.readouterr().out


def test_a_sample_that_memory_does_not_hold_ends_the_run_with_one_message(tmp_path, model, monkeypatch, capsys):
    def full(self, micro_batch, formula, totals):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(LocalLearner, "backward", full)
    path = run_file(tmp_path, model, RUN.replace("learning_rate", "probe_memory = false\nlearning_rate"))
    assert main(["train", str(path)]) == 2
    assert "lower rollout.max_new_tokens" in capsys.readouterr().err


def test_a_cap_that_memory_does_not_hold_ends_the_run_before_anything_is_sampled(tmp_path, model, monkeypatch, capsys):
    monkeypatch.setattr(trials, "available_bytes", lambda device: 1000.0)
    path = run_file(tmp_path, model)
    assert main(["train", str(path)]) == 2
    assert "train.tokens_per_micro_batch=400 needs about" in capsys.readouterr().err
    assert not (path.with_suffix("") / "config.toml").exists()


@dataclass
class Nosy(Method):
    """Asks for two more prompts each step, drops one group, and writes down who was called when."""

    calls: list[str] = field(init=False, default_factory=list)
    max_rounds: ClassVar[int] = 2

    def weigh(self, ctx, prompts):
        self.calls.append(f"weigh {ctx.need}")
        return np.arange(len(prompts), dtype=float)

    def plan(self, ctx, requests):
        self.calls.append(f"plan {len(requests)}")
        return requests

    def retry(self, ctx, groups):
        self.calls.append(f"retry after {len(ctx.clean)}")
        return ctx.refill(2)

    def regroup(self, ctx, groups):
        self.calls.append(f"regroup {len(groups)}")
        return groups[1:]

    def tune(self, ctx, loss):
        self.calls.append("tune")
        return loss

    def observe(self, ctx, groups, stats):
        self.calls.append(f"observe {len(groups)} of {len(ctx.clean)}, visits {ctx.visits}")


def test_hooks_are_called_in_order_and_refills_pass_through_them(tmp_path, model):
    text = RUN.replace("steps = 4", "steps = 2") + '[[methods]]\nname = "tests.test_train:Nosy"\n'
    config = load_config(run_file(tmp_path, model, text))
    assert train(config) is False
    one = ["weigh 4", "plan 4", "retry after 4", "weigh 2", "plan 2", "regroup 6", "tune"]
    assert config.methods[0].calls == [*one, "observe 5 of 6, visits 6", *one, "observe 5 of 6, visits 12"]
    rows = read_rollouts(tmp_path / "run").to_pylist()
    for step in (0, 1):
        asked = [row["prompt_id"] for row in rows if row["step"] == step]
        assert len(asked) == 24 and len(set(asked)) == 6
    assert "gym:basic_arithmetic#0" not in {row["prompt_id"] for row in rows}, "weight 0 is never drawn"


def test_plain_grpo_at_equal_tokens_stops_on_its_budget(tmp_path, model):
    limit = "learning_rate = 1e-3\nmax_generated_tokens = 100"
    folder = start(tmp_path, model, RUN, **{"learning_rate = 1e-3": limit})
    totals = [row["total_generated_tokens"] for row in read_metrics(folder)]
    assert len(totals) < 4 and totals[-1] >= 100 and all(total < 100 for total in totals[:-1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_cleanly(tmp_path, model, number):
    path = run_file(tmp_path, model, **{"steps = 4": "steps = 4000"})
    process = subprocess.Popen(
        [sys.executable, "-m", "e3fast.cli", "train", str(path)],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.STDOUT,
        cwd=Path(__file__).parents[1],
    )
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if "step 1/" in line:
            os.kill(process.pid, number)
            break
    seen += process.stdout.read()
    assert process.wait(60) == 130 and "Traceback" not in seen and "go on with --resume" in seen
    state = json.loads((path.with_suffix("") / "checkpoint" / "state.json").read_text())
    assert state["next_step"] == len(read_metrics(path.with_suffix("")))


def raises(prompt, rollout):
    raise RuntimeError("my reward is broken")


def test_a_reward_that_raises_costs_its_rollouts_and_not_the_run(tmp_path, model):
    folder = start(tmp_path, model, **{"tests.test_train:vowels": "tests.test_train:raises", "steps = 4": "steps = 1"})
    (row,) = read_metrics(folder)
    assert row["verdict/failed"] == 16 and row["stepped"] is False


def refused(tmp_path, capfd, args):
    assert main(args) == 2
    captured = capfd.readouterr()
    assert "Traceback" not in captured.err + captured.out
    return captured.err


BAD = [
    ({"steps = 4": "stepz = 4"}, "unknown key train.stepz; did you mean 'steps'?"),
    ({"gym:basic_arithmetic": "gym:basic_arithmetik"}, "basic_arithmetic"),
    ({'"gym:basic_arithmetic"': '"none.jsonl"'}, "none.jsonl"),
    ({"max_new_tokens = 8": "max_new_tokens = 200"}, "exceed the model's 256 positions"),
    ({"tokens_per_micro_batch = 400": "tokens_per_micro_batch = 100"}, "exceed train.tokens_per_micro_batch=100"),
    ({"prompts_per_step = 4": "prompts_per_step = 40"}, "more than the 12 prompts"),
    ({"min_group = 2": "min_group = 5"}, "min_group must be in [1, rollouts_per_prompt=4], got 5"),
    ({"tests.test_train:vowels": "tests.test_train:nothing"}, "nothing"),
    ({"max_prompt_tokens = 120": "max_prompt_tokens = 3"}, "max_prompt_tokens"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_is_one_message_and_exit_code_2(tmp_path, capfd, model, change, message):
    assert message in refused(tmp_path, capfd, ["train", str(run_file(tmp_path, model, **change))])


def test_bad_commands(tmp_path, capfd, model):
    assert "unknown command 'trian'" in refused(tmp_path, capfd, ["trian"])
    assert "name a run file" in refused(tmp_path, capfd, ["train"])
    assert "cannot load model" in refused(tmp_path, capfd, ["train", str(run_file(tmp_path, tmp_path / "nowhere"))])
    assert "no metrics.jsonl" in refused(tmp_path, capfd, ["report", str(tmp_path)])


def test_a_model_without_a_chat_template(tmp_path, capfd, model):
    save_tiny(tmp_path / "bare")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    (tmp_path / "bare" / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(tmp_path / "bare")
    path = run_file(tmp_path, tmp_path / "bare")
    assert "set model.chat_template" in refused(tmp_path, capfd, ["train", str(path)])


def test_an_old_run_is_never_written_over(tmp_path, capfd, model):
    folder = start(tmp_path, model)
    before = (folder / "metrics.jsonl").read_bytes()
    assert "holds a run already" in refused(tmp_path, capfd, ["train", str(run_file(tmp_path, model))])
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_full_disk_ends_with_a_message_and_keeps_what_was_written(tmp_path, capfd, model, monkeypatch):
    from e3fast import session

    folder = start(tmp_path, model)
    before, lines = fingerprint(folder), read_metrics(folder)

    def full(*args):
        raise OSError(28, "No space left on device", "checkpoint.new/model.safetensors")

    monkeypatch.setattr(session, "save_checkpoint", full)
    path = run_file(tmp_path, model, **{"steps = 4": "steps = 5"})
    message = refused(tmp_path, capfd, ["train", str(path), "--resume"])
    assert "the disk is full" in message
    assert fingerprint(folder)[2] == before[2] and read_metrics(folder)[:4] == lines


def test_evaluations_stand_once_a_step_and_survive_a_resume(tmp_path, model):
    folder = start(tmp_path, model)
    first = read_evals(folder)
    path = run_file(tmp_path, model)
    path.write_text("resume = true\n" + path.read_text().replace("steps = 4", "steps = 5"))
    train(load_config(path))
    assert [row["step"] for row in read_evals(folder)] == [0, 4, 5] and read_evals(folder)[:2] == first
    train(load_config(path))
    assert [row["step"] for row in read_evals(folder)] == [0, 4, 5]


def test_a_run_that_ended_before_its_first_step_leaves_nothing_to_the_next(tmp_path, model):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "eval.jsonl").write_text('{"step": 0, "pass@1": 0.99}\n')
    folder = start(tmp_path, model)
    assert [row["step"] for row in read_evals(folder)] == [0, 4]


def test_a_refused_resume_changes_nothing(tmp_path, capfd, model):
    folder = start(tmp_path, model)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    path = run_file(tmp_path, model)
    assert "other prompts" in refused(tmp_path, capfd, ["train", str(path), "--resume", "--seed", "1"])
    other = run_file(tmp_path, tmp_path / "run" / "checkpoint" / "model", name="other")
    other.write_text(other.read_text().replace(str(tmp_path / "other"), str(folder)))
    assert "another model or other methods" in refused(tmp_path, capfd, ["train", str(other), "--resume"])
    assert before == {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_held_out_questions_are_not_trained_on_with_evaluation_off(tmp_path, model):
    twin = RUN.replace("gym:chain_sum", "gym:basic_arithmetic").replace("count = 4", "count = 60\noptions = "
        "{{min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1, allow_parentheses = false}}")  # fmt: skip
    asked = []
    for name, number in (("on", "num_prompts = 4"), ("off", "num_prompts = 0")):
        folder = start(tmp_path, model, twin, name=name, **{"num_prompts = 4": number, "steps = 4": "steps = 1"})
        asked.append([row["prompt"] for row in read_rollouts(folder).to_pylist()])
    assert asked[0] == asked[1]


def test_flags_override_the_file(tmp_path, model):
    path = run_file(tmp_path, model)
    assert (
        main(["train", str(path), "--train.steps", "1", "--rollout.temperature", "0.9", "--eval.num-prompts", "0"]) == 0
    )
    (row,) = read_metrics(path.with_suffix(""))
    assert row["temperature"] == pytest.approx(0.9) and read_evals(path.with_suffix("")) == []
