"""Whole runs with perturbed weights: plain GRPO at no noise, resumable, and engine and learner agree at every draw."""

import math

import pytest
import torch

from e3fast import agreement, session
from e3fast import train as train_module
from e3fast.config import load_config
from e3fast.ivon import Ivon
from e3fast.methods import Method
from e3fast.rewards import own_score
from e3fast.rollout.transformers import TransformersEngine
from e3fast.runlog import read_metrics, read_rollouts
from e3fast.train import train
from tests.test_train import RUN, fingerprint, run_file, vowels
from tests.tiny import make_model, make_tokenizer

SHORT = RUN.replace("steps = 4", "steps = 3\nprobe_memory = false").replace("num_prompts = 4\n", "num_prompts = 0\n")


class Inline:
    """Scores in this process: a worker would cost each run seconds."""

    def __init__(self, reward, num_workers, deadline):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def score(self, pairs):
        return [own_score(vowels, *pair) for pair in pairs]


@pytest.fixture(scope="module", autouse=True)
def lean():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "RewardPool", Inline)
        patch.setattr(train_module, "write_report", lambda folder: "")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_model(max_position_embeddings=512).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def method(variant, **knobs):
    knobs = {"variant": variant} | knobs
    lines = [
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for name, value in knobs.items()
    ]
    return "\n".join(['[[methods]]\nname = "perturbed_weights"', *lines, ""])


def run(tmp_path, model, name, methods="", resume=False, **changes):
    path = run_file(tmp_path, model, SHORT + methods, name, **changes)
    if resume:
        path.write_text("resume = true\n" + path.read_text())
    assert train(load_config(path)) is False
    return path.with_suffix("")


@pytest.fixture(scope="module")
def plain(tmp_path_factory, model):
    return fingerprint(run(tmp_path_factory.mktemp("plain"), model, "plain"))


def weights_of(folder):
    saved = torch.load(folder / "checkpoint" / "learner.pt", weights_only=True)["masters"]
    return torch.cat([w.detach().flatten() for w in saved])


OWN = ("perturbed_weights/", "keep_rate", "mismatch")  # figures that a run without draws has not


def common(lines):
    return [{k: v for k, v in row.items() if not k.startswith(OWN)} for row in lines]


def asked(rollouts):
    return [{k: v for k, v in row.items() if k not in ("draw", "group")} for row in rollouts]


@pytest.mark.parametrize("variant", ["b3po", "m3po"])
def test_one_draw_without_noise_is_plain_grpo_bit_for_bit(tmp_path, model, plain, variant):
    found = fingerprint(run(tmp_path, model, "quiet", method(variant, draws=1, sigma=0.0, controller=False)))
    assert common(found[0]) == common(plain[0]) and asked(found[1]) == asked(plain[1]) and found[2] == plain[2]
    assert any(row["stepped"] for row in plain[0])
    for a, b in zip(found[0], plain[0], strict=True):
        assert a["mismatch_mean"] == b["mismatch_mean"] and a["keep_rate"] is None


def test_pooled_draws_without_noise_are_plain_grpo_within_rounding(tmp_path, model, plain):
    """Ratios to the learner's own log-probs are 1 up to rounding, and the mask keeps everything."""
    knobs = dict(draws=2, sigma=0.0, controller=False, behaviour_logprobs="learner")
    folder = run(tmp_path, model, "pooled", method("c3po", **knobs))
    lines, rollouts, _ = fingerprint(folder)
    first = lambda rows: [row for row in rows if row["step"] == 0]  # noqa: E731
    by_text = lambda rows: sorted((row["prompt_id"], row["completion"], row["reward"]) for row in first(rows))  # noqa: E731
    assert by_text(rollouts) == by_text(plain[1]) and {row["group_size_max"] for row in lines} == {4}
    assert all(row["keep_rate"] == 1.0 and row["ratio_max"] == pytest.approx(1, abs=1e-5) for row in lines)
    for name in ("loss", "grad_norm", "entropy", "signal_share", "clean_accuracy"):
        assert lines[0][name] == pytest.approx(plain[0][0][name], rel=1e-4, abs=1e-6)
    one = {"steps = 3": "steps = 1"}
    pooled = weights_of(run(tmp_path, model, "pooled-one", method("c3po", **knobs), **one))
    alone = weights_of(run(tmp_path, model, "plain-one", **one))
    assert float((pooled - alone).abs().max()) < 2e-5 < 5e-4 < float((alone - start_weights(model)).abs().max())


def start_weights(folder):
    from transformers import AutoModelForCausalLM

    return torch.cat([p.detach().flatten() for p in AutoModelForCausalLM.from_pretrained(folder).parameters()])


IVON = {"learning_rate = 1e-3": 'learning_rate = 1e-3\noptimizer = "ivon"'}
CASES = {
    "b3po": (method("b3po", sigma=5e-3), {}),
    "b3po-mean": (method("b3po", sigma=5e-3, gradient_at="mean"), {}),
    "m3po": (method("m3po", draws=2, sigma=5e-3), {}),
    "c3po": (method("c3po", draws=2, sigma=2e-3), {}),
    "c3po-learner": (method("c3po", draws=3, sigma=2e-3, behaviour_logprobs="learner"), {}),
    "b3po-ivon": (method("b3po", posterior="ivon", ess=1e5, lr=10.0), IVON),
    "m3po-ivon": (method("m3po", draws=2, posterior="ivon", ess=1e5, lr=10.0), IVON),
    "c3po-ivon": (method("c3po", draws=2, posterior="ivon", ess=1e6, lr=10.0), IVON),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_whole_one_bit_for_bit(tmp_path, model, case):
    """And it trains: noise, controller and IVON's precision go on where they stood."""
    methods, changes = CASES[case]
    whole = run(tmp_path, model, "whole", methods, **changes)
    run(tmp_path, model, "parts", methods, **changes, **{"steps = 3": "steps = 1"})
    parts = run(tmp_path, model, "parts", methods, resume=True, **changes)
    assert fingerprint(parts) == fingerprint(whole)
    lines = read_metrics(whole)
    assert len(lines) == 3 and any(row["stepped"] for row in lines) and all(row["entropy"] > 0 for row in lines)
    assert float((weights_of(whole) - start_weights(model)).abs().max()) > 0
    assert len(read_rollouts(whole).to_pylist()) == 3 * 16
    at_mean = case.startswith("c3po") or case == "b3po-mean"
    for row in lines:
        assert (row["keep_rate"] is None) != at_mean
        if at_mean:  # other weights sampled: nothing to compare, and ratios that are not 1
            assert row["mismatch_mean"] is None and row["ratio_max"] != 1.0 and 0 <= row["keep_rate"] <= 1
        else:  # the same weights: as good as without draws, where it is a few 1e-7
            assert row["mismatch_mean"] < 5e-6 and row["ratio_max"] == (1.0 if row["stepped"] else 0.0)
    if "ivon" in case:
        saved = torch.load(whole / "checkpoint" / "learner.pt", weights_only=True)["optimizer"]["state"].values()
        hess = torch.cat([state["hess"].flatten() for state in saved])
        assert bool((hess == hess[0]).all()) == at_mean, "its precision is learnt from gradients at draws alone"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_engine_and_learner_agree_at_a_draw_as_well_as_without_one(tmp_path, model, dtype):
    as_dtype = {'"fp32"': f'"{dtype}"'}
    gaps = [
        [row["mismatch_mean"] for row in read_metrics(run(tmp_path, model, name, text, **as_dtype))]
        for name, text in (("own", ""), ("drawn", method("m3po", draws=2, sigma=2e-2)))
    ]
    assert 0 < max(gaps[1]) < 2 * max(gaps[0]) < (1e-5 if dtype == "fp32" else 0.2)


def test_caps_are_tried_at_the_policys_own_weights(tmp_path, model):
    """Before anything is sampled; the run is the one without trials but for IVON's rounding."""
    probed = {"probe_memory = false": "probe_memory = true"} | IVON
    ends = [
        run(tmp_path, model, name, CASES["m3po-ivon"][0], **changes) for name, changes in (("a", IVON), ("b", probed))
    ]
    a, b = (read_metrics(end)[0] for end in ends)
    assert a["generated_tokens"] == b["generated_tokens"] and a["loss"] == pytest.approx(b["loss"], rel=1e-3)
    assert float((weights_of(ends[0]) - weights_of(ends[1])).abs().max()) < 1e-3


def test_noise_changes_what_is_sampled(tmp_path, model, plain):
    rollouts = read_rollouts(run(tmp_path, model, "loud", method("m3po", draws=2, sigma=5e-2))).to_pylist()
    same = [a["completion"] == b["completion"] for a, b in zip(rollouts, plain[1], strict=True)]
    assert not all(same[:16]) and math.isfinite(sum(r["reward"] for r in rollouts))


class DropsFirst(Method):
    """Leaves a step's first prompt out of credit."""

    def regroup(self, ctx, groups):
        first = groups[0].prompt.id
        return [group for group in groups if group.prompt.id != first]


@pytest.mark.parametrize("variant", [None, "m3po", "c3po"])
def test_dropped_groups_count_in_the_entropy_and_in_nothing_else(tmp_path, model, variant):
    """At the draws for m3po, at the mean for c3po."""
    methods, one = method(variant, draws=2, sigma=2e-3) if variant else "", {"steps = 3": "steps = 1"}
    drop = '[[methods]]\nname = "tests.test_perturbed_runs:DropsFirst"\n'
    (kept,), (dropped,) = (
        read_metrics(run(tmp_path, model, name, text, **one))
        for name, text in (("all", methods), ("some", methods + drop))
    )
    for name in ("entropy", "generated_tokens", "clean_accuracy", "group_size_mean", "signal_share", "reward"):
        assert dropped[name] == pytest.approx(kept[name], rel=1e-6), name
    assert dropped["loss"] != kept["loss"] or dropped["grad_norm"] != kept["grad_norm"]
    assert dropped["trained_tokens"] <= kept["trained_tokens"] and dropped["scored_tokens"] > 0


@pytest.mark.parametrize(
    ("text", "reference", "ivon"),
    [
        ("", False, False),
        ("[loss]\nbeta = 0.1\n", True, False),
        (CASES["m3po-ivon"][0], False, True),
    ],
)
def test_the_learner_has_what_the_run_needs_and_no_more(tmp_path, model, text, reference, ivon):
    changes = IVON if ivon else {}
    config = load_config(run_file(tmp_path, model, SHORT + text, **changes))
    learner = session.make_learner(config, make_model(), torch.device("cpu"))
    assert (learner.reference is not None) == reference and isinstance(learner.optimizer, Ivon) == ivon
    assert learner.latent_matrix is None and learner.peak[0] == (10.0 if ivon else 1e-3)


def test_a_mask_on_noisy_log_probs_is_refused_before_anything_is_written(tmp_path, model, monkeypatch):
    """Its draw is at fault as little as its learner: the advice is to ask the learner."""
    finish = TransformersEngine.finish

    def noisy(self, request, tokens, logprobs):
        return finish(self, request, tokens, [value + 0.3 for value in logprobs])

    monkeypatch.setattr(TransformersEngine, "finish", noisy)
    monkeypatch.setitem(agreement.RATIO_LIMITS, "fp32", 0.5)  # completions are short: what a long one would add up to
    text = method("c3po", draws=2, sigma=0.0, controller=False)
    with pytest.raises(ValueError, match='set behaviour_logprobs = "learner" in perturbed_weights'):
        run(tmp_path, model, "noisy", text)
    assert not (tmp_path / "noisy" / "config.toml").exists()
    asked = method("c3po", draws=2, sigma=0.0, controller=False, behaviour_logprobs="learner")
    lines = read_metrics(run(tmp_path, model, "asked", asked))
    assert all(row["keep_rate"] == 1.0 and row["ratio_max"] == pytest.approx(1, abs=1e-5) for row in lines)
