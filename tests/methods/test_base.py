"""The seam's laws: a base method changes nothing, state round-trips through JSON, contradictions are refused."""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest

from e3fast.config import DataConfig, RunConfig
from e3fast.methods import METHODS, EntropyTemperature, Method, RolloutBudget, check_methods, make_method, method_table
from e3fast.methods.base import decode, encode
from tests.records import context, group, request, stats


def test_every_hook_of_the_base_is_a_no_op():
    method, ctx, groups = Method(), context(), [group()]
    requests, loss = [request()], RunConfig().loss
    assert method.weigh(ctx, []) is None and method.plan(ctx, requests) is requests
    assert method.retry(ctx, groups) == [] and method.regroup(ctx, groups) is groups
    assert method.tune(ctx, loss) is loss and method.observe(ctx, groups, stats()) is None
    assert method.start(RunConfig(), 3) == [] and method.state() == {} and method.report() == {}


ROOMY = RunConfig(data=DataConfig(max_prompt_tokens=2048))  # a retry method puts words around a prompt


@pytest.mark.parametrize("name", METHODS)
def test_state_survives_json(name):
    method = METHODS[name]()
    method.start(ROOMY, 70)
    method.observe(context(visits=200, num_prompts=70, clean={"3": (8, 3)}, rows={"3": 3}), [], stats())
    saved = json.loads(json.dumps(method.state()))
    again = METHODS[name]()
    again.start(ROOMY, 70)
    again.restore(saved)
    assert again.state() == method.state()
    for key, value in vars(method).items():
        assert np.array_equal(value, getattr(again, key)), key
        assert type(value) is type(getattr(again, key)), key


def test_a_state_of_another_method_is_refused():
    with pytest.raises(ValueError, match="the checkpoint holds"):
        EntropyTemperature().restore({"phase": 1})


def test_order_and_owners():
    check_methods([RolloutBudget(), EntropyTemperature()])
    with pytest.raises(ValueError, match="write RolloutBudget, EntropyTemperature"):
        check_methods([EntropyTemperature(), RolloutBudget()])
    with pytest.raises(ValueError, match="EntropyTemperature and EntropyTemperature both set the temperature"):
        check_methods([EntropyTemperature(), EntropyTemperature()])


@dataclass
class Wants(Method):
    needs = frozenset({"entropy", "tea"})


def test_needs_that_nothing_supplies_are_refused():
    with pytest.raises(ValueError, match="Wants needs tea, which this trainer does not supply"):
        check_methods([Wants()])


@dataclass
class Mine(Method):
    factor: float = 2.0
    seen: int = field(init=False, default=0)


def test_tables_and_classes_from_outside():
    method = make_method({"name": "tests.methods.test_base:Mine", "factor": 3})
    assert type(method) is Mine and method.factor == 3.0
    assert make_method(method_table(method)) == method
    table = method_table(RolloutBudget(min_group=2))
    assert table["name"] == "rollout_budget" and method_table(make_method(table)) == table


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "rollout_budgets"}, "did you mean 'rollout_budget'?"),
        ({"min_group": 3}, "needs a name"),
        (
            {"name": "rollout_budget", "min_grup": 3},
            "unknown key methods.rollout_budget.min_grup; did you mean 'min_group'?",
        ),
        ({"name": "rollout_budget", "phase": 3}, "unknown key methods.rollout_budget.phase"),
        ({"name": "rollout_budget", "estimator": "vip"}, "must be one of rank, variance, knapsack, sera, got 'vip'"),
        ({"name": "rollout_budget", "min_group": "3"}, "methods.rollout_budget.min_group must be int, got '3'"),
        ({"name": "nowhere.at:All"}, "cannot load method"),
        ({"name": "json:dumps"}, "is not a subclass"),
    ],
)
def test_bad_tables(table, message):
    with pytest.raises(ValueError) as error:
        make_method(table)
    assert message in str(error.value)


def test_arrays_are_short_and_exact_in_a_checkpoint():
    latents = np.random.default_rng(0).standard_normal((100, 256)).astype(np.float16)
    text = encode(latents)
    assert np.array_equal(decode(text), latents) and decode(text).dtype == np.float16
    assert len(json.dumps(text)) < 1.4 * latents.nbytes < len(json.dumps(latents.tolist())) / 4
