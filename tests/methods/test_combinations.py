"""Pairs of methods: each runs as a whole tiny training, or is refused with its reason; order never changes a result."""

import itertools
import math

import pytest

from e3fast.config import RolloutConfig, RunConfig, TrainConfig, load_config
from e3fast.methods import (
    AccuracyKL,
    DynamicSampling,
    EntropyTemperature,
    FixedTemperature,
    GaussianCurriculum,
    LoremRetry,
    PerturbedWeights,
    PortfolioSampler,
    PosteriorSampler,
    RolloutBudget,
    SkipTrivial,
    check_combination,
    combination_notes,
    make_method,
)
from e3fast.runlog import read_metrics, read_rollouts
from e3fast.train import train
from e3fast.types import LossConfig
from tests.test_train import RUN, fingerprint, run_file
from tests.tiny import save_tiny

M3PO = lambda: PerturbedWeights("m3po")  # noqa: E731
REFUSED = [
    (
        (EntropyTemperature(), FixedTemperature()),
        {},
        "EntropyTemperature and FixedTemperature both set the temperature",
    ),
    (
        (PerturbedWeights("c3po", controller=False),),
        {"loss": LossConfig(importance_sampling="token")},
        "PerturbedWeights 'c3po' masks by the ratio that loss.importance_sampling = 'token' corrects: remove one",
    ),
    ((), {"loss": LossConfig(importance_band=2.0)}, "loss.importance_band does nothing while loss.importance_sampling"),
    ((LoremRetry(), LoremRetry()), {}, "LoremRetry and LoremRetry both set the rescue"),
    ((PortfolioSampler(), PosteriorSampler()), {}, "PortfolioSampler and PosteriorSampler both set the selection"),
    ((PortfolioSampler(), GaussianCurriculum()), {}, "PortfolioSampler and GaussianCurriculum both weigh prompts"),
    ((SkipTrivial(), PosteriorSampler()), {}, "PosteriorSampler and SkipTrivial both weigh prompts"),
    (
        (AccuracyKL(),),
        {"loss": LossConfig(beta=0.04)},
        "loss.beta=0.04 and accuracy_kl both set the KL weight: remove one",
    ),
    ((PerturbedWeights(), AccuracyKL()), {}, "AccuracyKL and PerturbedWeights: .* remove one"),
    ((PerturbedWeights(),), {"loss": LossConfig(beta=0.1)}, "PerturbedWeights goes without loss.beta: remove one"),
    ((PerturbedWeights(),), {"loss": LossConfig(entropy_bonus=0.1)}, "goes without loss.entropy_bonus: remove one"),
    ((M3PO(), LoremRetry()), {}, "LoremRetry and PerturbedWeights 'm3po': a rescue belongs to no draw's group"),
    ((), {"train": TrainConfig(optimizer="ivon")}, 'train.optimizer "ivon" needs the method perturbed_weights'),
    ((EntropyTemperature(), RolloutBudget()), {}, "write RolloutBudget, EntropyTemperature"),
    ((DynamicSampling(), LoremRetry()), {}, "write LoremRetry, DynamicSampling"),
]


@pytest.mark.parametrize(("methods", "changes", "message"), REFUSED)
def test_refused(methods, changes, message):
    with pytest.raises(ValueError, match=message):
        check_combination(RunConfig(methods=methods, **changes))


def test_refused_by_the_size_of_groups():
    config = RunConfig(methods=(RolloutBudget(), M3PO()))
    with pytest.raises(ValueError, match=r"m3po with 4 draws needs at least 8 rollouts .* got min_group=4"):
        config.methods[1].start(config, 10)
    few = RunConfig(methods=(RolloutBudget(min_group=2), PerturbedWeights()))
    assert few.methods[1].start(few, 10) == ["some prompts have no rollout of some draws: min_group=2, draws=4"]
    plain = RunConfig(rollout=RolloutConfig(rollouts_per_prompt=4))
    with pytest.raises(ValueError, match=r"got rollouts_per_prompt=4"):
        M3PO().start(plain, 10)


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="variant must be one of b3po, m3po, c3po, got '3po'"):
        make_method({"name": "perturbed_weights", "variant": "3po"})


NOTED = [
    ((RolloutBudget(), SkipTrivial()), "RolloutBudget and SkipTrivial both act on difficulty"),
    ((RolloutBudget(), PortfolioSampler()), "RolloutBudget and PortfolioSampler both act on difficulty"),
    ((EntropyTemperature(), PerturbedWeights()), "EntropyTemperature and PerturbedWeights both widen exploration"),
    ((LoremRetry(), AccuracyKL()), "LoremRetry with a KL term: rescue rows get it too; LoPE's source uses none"),
]


@pytest.mark.parametrize(("methods", "note"), NOTED)
def test_noted(methods, note):
    config = RunConfig(methods=methods)
    check_combination(config)
    assert combination_notes(config) == [note]


BUDGET = 'name = "rollout_budget"\nmin_group = 2\nmax_group = 6'
TEMPERATURE = 'name = "entropy_temperature"'
RETRY = 'name = "lorem_retry"\nnum_prefixes = 2\nrollouts_per_prefix = 2\nmin_words = 1\nmax_words = 4'
C3PO = 'name = "perturbed_weights"\ndraws = 2\nsigma = 1e-3'
B3PO = 'name = "perturbed_weights"\nvariant = "b3po"'
M3PO_TWO = 'name = "perturbed_weights"\nvariant = "m3po"\ndraws = 2'
DYNAMIC = 'name = "dynamic_sampling"\nmax_rounds = 3'
KL = 'name = "accuracy_kl"'
GAUSS, SKIP, LEEPS = 'name = "gaussian_curriculum"', 'name = "skip_trivial"', 'name = "portfolio_sampler"'
RUNS = {
    "gauss+skip": (GAUSS, SKIP),
    "retry+kl": (RETRY, KL),
    "budget+temperature": (BUDGET, TEMPERATURE),
    "temperature+kl": (TEMPERATURE, KL),
    "budget+c3po": (BUDGET, C3PO),
    "budget+retry": (BUDGET, RETRY),
    "budget+dynamic": (BUDGET, DYNAMIC),
    "budget+skip": (BUDGET, SKIP),
    "budget+leeps": (BUDGET, LEEPS),
    "retry+dynamic": (RETRY, DYNAMIC),
    "c3po+retry": (C3PO, RETRY),
    "b3po+retry": (B3PO, RETRY),
    "temperature+c3po": (TEMPERATURE, C3PO),
    "temperature+b3po": (TEMPERATURE, B3PO),
    "temperature+m3po": (TEMPERATURE, M3PO_TWO),
    "temperature+dynamic": (TEMPERATURE, DYNAMIC),
    "temperature+hot retry": (TEMPERATURE, RETRY + "\ntemperature = 1.2"),
    "dynamic+leeps": (DYNAMIC, LEEPS),
    "everything": (BUDGET, TEMPERATURE, C3PO, RETRY, DYNAMIC, SKIP),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def run_of(tmp_path, model, methods, name="run", steps=3):
    text = RUN + "".join(f"[[methods]]\n{table}\n" for table in methods)
    changes = {"steps = 4": f"steps = {steps}\nprobe_every = 0", "num_prompts = 4": "num_prompts = 0"}
    path = run_file(tmp_path, model, text, name, **changes)
    assert train(load_config(path)) is False
    return path.with_suffix("")


@pytest.mark.parametrize("name", RUNS)
def test_runs(tmp_path, model, name):
    folder = run_of(tmp_path, model, RUNS[name])
    rows = read_metrics(folder)
    assert len(rows) == 3 and any(row["stepped"] for row in rows)
    assert all(row["entropy"] > 0 for row in rows)
    first = [row for row in read_rollouts(folder).to_pylist() if row["kind"] == "first"]
    for row in rows:
        own = [r for r in first if r["step"] == row["step"]]
        if "budget" in name and "dynamic" not in name:
            assert len(own) == 16, "the budget's total holds for first rounds"
        if "dynamic" not in name:
            assert row["prompts"] == 4
    if "kl" in name:
        assert all(row["beta"] > 0 and row["kl"] >= 0 for row in rows)
        assert rows[0]["kl"] < 1e-6, "the policy starts at the reference"
    if "c3po" in name:
        assert all(0 <= row["keep_rate"] <= 1 for row in rows if row["stepped"] and row["keep_rate"] is not None)


def test_rescues_never_count_as_clean(tmp_path, model):
    """The first step's clean counts and entropy are those of a run without the retry."""
    with_retry = run_of(tmp_path, model, (RETRY,), "with", steps=1)
    without = run_of(tmp_path, model, (), "without", steps=1)
    a, b = read_metrics(with_retry)[0], read_metrics(without)[0]
    assert a["clean_accuracy"] == b["clean_accuracy"] and a["rollouts"] > b["rollouts"]
    assert math.isclose(a["entropy"], b["entropy"], rel_tol=1e-5)


ORDERLESS = (KL, SKIP, 'name = "gaussian_curriculum"')


def test_methods_of_one_order_commute(tmp_path, model):
    runs = [
        fingerprint(run_of(tmp_path, model, methods, f"run{i}", steps=2))[1:]
        for i, methods in enumerate(itertools.islice(itertools.permutations(ORDERLESS), 0, 6, 2))
    ]
    assert runs[0] == runs[1] == runs[2]


def test_no_methods_are_plain_grpo_number_for_number(tmp_path, model):
    none = run_of(tmp_path, model, (), "none", steps=2)
    base = run_of(tmp_path, model, ('name = "e3fast.methods.base:Method"',), "base", steps=2)
    assert fingerprint(none)[1:] == fingerprint(base)[1:]
