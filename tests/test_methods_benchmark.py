"""The methods benchmark: the pupil's sums, arms that may start, stored runs read once, and what pairs of runs say."""

import json

import pytest

from benchmarks import arms, methods, nano
from benchmarks.arms import find_case, make_config
from benchmarks.methods_runs import paired_gain, read_runs, rescues
from e3fast.methods import check_combination

NAMED = {
    "nano": "grpo dapo e3 e3-budgets e3-temperature e3-annealed entropy-bonus expo expo-control leeps mopps greso b3po "
    "m3po c3po noise-control fixed-temperature e3-budgets-prompt",
    "demo": "grpo lope lope-control lope-control-shaped",
}


@pytest.mark.parametrize(
    ("total", "term", "luck", "said"),
    [(3, 4, 0.5, 7), (3, 4, 0.1, 9), (8, 5, 0.3, 13), (8, 5, 0.1, 15), (8, 5, 0.9, 3), (18, 5, 0.9, 13)],
)
def test_a_careless_pupil(total, term, luck, said):
    """Luck below the chance of a slip errs by the error, above one less that of forgetting it drops the carry."""
    assert nano.pupil_adds(total, term, luck, 2) == said


def test_completions_decode_to_running_sums():
    tokenizer = nano.make_tokenizer()
    ids = tokenizer.encode("7_15_21")
    assert tokenizer.decode([*ids, 0], skip_special_tokens=True) == "7 15 21"
    question = tokenizer.encode("Calculate 10 + 8 + 0.")
    assert len(question) == 8 and tokenizer.unk_token_id not in set(question) - {tokenizer.encode(".")[0]}


@pytest.mark.parametrize("name", NAMED)
def test_every_arm_may_start(name, monkeypatch, tmp_path):
    monkeypatch.setattr(nano, "nano_checkpoint", lambda: tmp_path)
    for quick in (False, True):
        case = find_case(name, quick)
        assert sorted(case.names) == sorted(NAMED[name].split()) and set(arms.QUICK[name]) <= set(case.names)
        for arm in case.arms:
            config = make_config(case, arm, 1, {"steps": 90, "mean_temperature": 1.17})
            check_combination(config)
            for method in config.methods:
                method.start(config, 384)
            assert config.seed == 1 and config.train.max_generated_tokens > 0
            assert all(control in case.names for control in case.controls.get(arm.name, ()))
            assert not arm.needs or case.names.index(arm.needs) < case.names.index(arm.name)


def made_up(provider, seed, counts):
    return {"case": "nano", "provider": provider, "seed": seed, "counts": counts}


RUNS = [
    made_up("grpo", 0, {"a": [16, 0], "b": [16, 8]}),
    made_up("leeps", 0, {"a": [16, 4], "b": [16, 0]}),
    made_up("grpo", 1, {"a": [16, 0], "b": [16, 8]}),
    made_up("leeps", 1, {"a": [16, 4], "b": [16, 16]}),
    made_up("leeps", 2, {"a": [16, 16], "b": [16, 16]}),  # no control of that seed
]


def test_pairs_are_of_one_seed():
    assert rescues(RUNS, "nano", "leeps") == [(1, 1), (1, 0)]
    gain, low, high = paired_gain(RUNS, "nano", "leeps", "grpo", 1)
    assert gain == pytest.approx(100 * (0.25 - 0.5 + 0.25 + 0.5) / 4) and low < gain < high
    assert paired_gain(RUNS, "nano", "leeps", "dapo", 1) is None
    same = paired_gain(RUNS, "nano", "grpo", "grpo", 16)
    assert same == (0, 0, 0)


def test_a_run_that_is_stored_is_not_done_again(tmp_path, monkeypatch):
    path, done = tmp_path / "runs.jsonl", []
    case = find_case("demo", True)

    def fake(config, folder):
        done.append(config.seed)
        return {}

    monkeypatch.setattr(methods, "run", fake)
    keys = ("pass1", "pass16", "entropy_drift_pct", "seconds")
    line = lambda case, arm, seed, _: made_up(arm.name, seed, {}) | {"case": case.name} | dict.fromkeys(keys, 1.0)  # noqa: E731
    monkeypatch.setattr(methods, "record", line)
    some = [arm for arm in case.arms if arm.name != "lope"]
    methods.run_missing(case, some, 1, path)
    methods.run_missing(case, list(case.arms), 2, path)
    assert done == [0, 0, 0, 0, 1, 1, 1, 1]
    found = [(run["provider"], run["seed"]) for run in read_runs(path)]
    assert len(found) == len(set(found)) == 8 and json.loads(path.read_text().splitlines()[0])["provider"] == "grpo"
