"""Steps without a model: methods that have started, and the rounds of a step on a toy engine."""

import json
from contextlib import nullcontext

import numpy as np

from e3fast.config import RolloutConfig, RunConfig, TrainConfig
from e3fast.prompts import PromptPool
from e3fast.requests import draw_prompts, make_context
from e3fast.train import ask_again, roll_out
from e3fast.types import Rollout, Score
from tests.records import context, prompt, stats


def started(method, num_prompts=6, batch=3, methods=(), steps=100):
    config = RunConfig(train=TrainConfig(prompts_per_step=batch, steps=steps), methods=tuple(methods))
    method.start(config, num_prompts)
    return method


def resumed(method, fresh):
    """Another instance that took over the state through a checkpoint's JSON."""
    fresh.restore(json.loads(json.dumps(method.state())))
    return fresh


def clean_of(counts, **changes):
    """The context of a step in which row r had counts[r] = (judged, correct)."""
    rows = {str(row): row for row in counts}
    return context(clean={str(row): pair for row, pair in counts.items()}, rows=rows, **changes)


class Toy:
    """Engine and scorer in which every prompt has a fixed outcome."""

    def __init__(self, outcomes):
        self.outcomes = outcomes  # by row: "right", "wrong", or "mixed" = the first rollout alone is right

    def __call__(self, requests):
        return [[Rollout(r, (1,), "t", (-0.1,), "stop", 0)] * r.num_rollouts for r in requests]

    def score(self, pairs):
        seen = {}
        scores = []
        for p, _ in pairs:
            place = seen[p.row] = seen.get(p.row, -1) + 1
            right = {"right": True, "wrong": False, "mixed": place == 0}[self.outcomes[p.row]]
            scores.append(Score(float(right), "correct" if right else "wrong"))
        return scores


def sample_step(outcomes, batch, *methods, seed=1):
    """A step's rounds as the trainer runs them: context, all groups, and the groups that are left for the update."""
    config = RunConfig(
        seed=seed,
        rollout=RolloutConfig(rollouts_per_prompt=4),
        train=TrainConfig(prompts_per_step=batch),
        methods=methods,
    )
    pool = PromptPool([prompt(row) for row in range(len(outcomes))], seed)
    for method in methods:
        method.start(config, len(outcomes))
    ctx = make_context(config, pool, 0, lambda messages: (1,), lambda prompts: np.zeros((len(prompts), 256)))
    toy, clock = Toy(outcomes), lambda stage: nullcontext()
    requests = draw_prompts(ctx, config, pool, batch)
    for method in methods:
        requests = method.plan(ctx, requests)
    groups = roll_out(ctx, toy, toy, requests, clock, 0)
    while asked := ask_again(ctx, methods, groups):
        groups += roll_out(ctx, toy, toy, asked, clock, len(groups))
    kept = ctx.regrouped(groups)
    for method in methods:
        method.observe(ctx, kept, stats())
    return ctx, groups, kept
