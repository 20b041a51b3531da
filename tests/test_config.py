"""Run files: strict reading with the path of what is wrong, and a text that reads back as itself."""

import pytest

from e3fast.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SourceConfig,
    TrainConfig,
    load_config,
)
from e3fast.config_text import config_text, field_notes
from e3fast.methods import EntropyTemperature, RolloutBudget, method_table
from e3fast.types import LossConfig

GOOD = """
seed = 3
[train]
learning_rate = 1
betas = [0.9, 0.95]
[[data.train]]
source = "gym:chain_sum"
count = 4
options = {min_terms = 2, operators = ["+"]}
[[methods]]
name = "rollout_budget"
min_group = 2
[[methods]]
name = "entropy_temperature"
target = 0.7
"""


def read(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_config(path)


def test_a_run_file(tmp_path):
    config = read(tmp_path, GOOD)
    assert config.seed == 3 and config.train.learning_rate == 1.0 and config.train.betas == (0.9, 0.95)
    assert config.data.train == (SourceConfig("gym:chain_sum", count=4, options={"min_terms": 2, "operators": ["+"]}),)
    assert [type(m) for m in config.methods] == [RolloutBudget, EntropyTemperature]
    assert config.methods[1].target == 0.7


def test_the_printed_config_reads_back(tmp_path):
    config = read(tmp_path, GOOD)
    again = read(tmp_path, config_text(config))
    assert [method_table(m) for m in again.methods] == [method_table(m) for m in config.methods]
    assert config_text(again) == config_text(config)
    for name in ("model", "data", "rollout", "reward", "train", "loss", "eval", "seed", "output_dir"):
        assert getattr(again, name) == getattr(config, name)


@pytest.mark.parametrize(
    "cls", [ModelConfig, SourceConfig, DataConfig, RolloutConfig, RewardConfig, TrainConfig, EvalConfig, LossConfig]
)
def test_every_knob_is_explained(cls):
    assert set(field_notes(cls)) == set(cls.__dataclass_fields__)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nlearning_rat = 1", "unknown key train.learning_rat; did you mean 'learning_rate'?"),
        ("[trian]\nsteps = 1", "unknown key trian; did you mean 'train'? known here: seed"),
        ("[train]\nsteps = 1.5", "train.steps must be int, got 1.5"),
        ("[train]\nsteps = true", "train.steps must be int, got True"),
        ("[train]\nsteps = 0", "train.steps must be >= 1, got 0"),
        ("[train]\nbetas = [0.9]", "train.betas must have 2 entries, got 1"),
        ("train = 3", "train must be a table, got 3"),
        ('[train]\nadvantage = "ppo"', "train.advantage must be one of grpo, dr_grpo, rloo, got 'ppo'"),
        ("[rollout]\ntemperature = 0", "rollout.temperature must be > 0, got 0.0"),
        ("[eval]\nsamples = 2\nks = [4]", "eval.ks must be in [1, eval.samples=2], got (4,)"),
        ("[[data.train]]\ncount = 3", "data source must be a name"),
        ('[[data.train]]\nsource = "a.jsonl"\ncuont = 3', "unknown key data.train[0].cuont; did you mean 'count'?"),
        (
            '[[data.train]]\nsource = "a.jsonl"\noptions = {a = 1}',
            "options of a.jsonl does nothing: it belongs to gym: sources",
        ),
        ('[[data.train]]\nsource = "gym:a"\nsplit = "x"', "split of gym:a does nothing: it belongs to hub: sources"),
        ('[[data.train]]\nsource = "gym:a"\nprompt_column = "x"', "prompt_column of gym:a does nothing"),
        ("methods = 3", "methods must be a list, got 3"),
        ('[[methods]]\nname = "e3"', "unknown method 'e3'"),
        ("[loss]\nclip_low = -1", "loss.clip_low must be in (0, 1.0], got -1.0"),
        ("seed = ", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    with pytest.raises(ValueError) as error:
        read(tmp_path, text)
    assert message in str(error.value) and "run.toml" in str(error.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="cannot read run file"):
        load_config(tmp_path / "none.toml")


def test_defaults_are_whole():
    assert "learning_rate" in config_text(RunConfig())


@pytest.mark.parametrize(
    ("engine", "asked", "found"),
    [("transformers", "auto", "off"), ("vllm", "auto", "token"), ("vllm-server", "auto", "token")]
    + [(engine, mode, mode) for engine in ("transformers", "vllm") for mode in ("off", "token", "sequence")],
)
def test_the_correction_a_run_starts_with(engine, asked, found):
    loss = LossConfig(importance_sampling=asked, clip_high=0.28)
    start = RunConfig(rollout=RolloutConfig(engine=engine), loss=loss).start_loss()
    assert (start.importance_sampling, start.importance_cap, start.clip_high) == (found, 2.0, 0.28)
