"""The loop and the step, top to bottom."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from e3fast.advantages import left_over_samples, make_samples
from e3fast.allocator import Allocator
from e3fast.config import RunConfig
from e3fast.evaluate import Scorer
from e3fast.learner import Learner
from e3fast.methods import Method
from e3fast.metrics import StageClock, step_metrics
from e3fast.objective import loss_weights
from e3fast.prompts import PromptPool
from e3fast.report import write_report
from e3fast.requests import draw_prompts
from e3fast.rollout.engine import Engine
from e3fast.runlog import RunLog
from e3fast.session import open_session
from e3fast.types import Group, Request, Rollout, StepContext

if TYPE_CHECKING:
    from torch import Tensor

    from e3fast.draws import Perturb


def train(config: RunConfig) -> bool:
    """Run a whole training: evaluate, step, evaluate, report. True where Ctrl-C ended it early."""
    with open_session(config) as session:
        if session.next_step == 0:
            session.evaluate(step=0)
        while not session.finished:
            ctx = session.context()
            metrics = train_step(
                ctx,
                config,
                session.pool,
                session.scorer,
                session.allocator,
                session.learner,
                session.engine,
                session.log,
            )
            session.end_step(metrics)
        session.save()
        if not session.interrupted:
            session.evaluate(step=session.next_step)
        session.close_with(write_report(session.folder))
        return session.interrupted


def train_step(
    ctx: StepContext,
    config: RunConfig,
    pool: PromptPool,
    scorer: Scorer,
    allocator: Allocator,
    learner: Learner,
    engine: Engine,
    log: RunLog,
) -> dict[str, Any]:
    """One step: plan, roll out, credit, pack, update, learn. Returns its metrics."""
    methods, clock = config.methods, StageClock()
    perturb = functools.partial(perturb_by_all, ctx, methods)

    # 1. plan: which prompts, how many rollouts each, how hot, with which draw of the weights
    requests = draw_prompts(ctx, config, pool, ctx.need)
    for method in methods:
        requests = method.plan(ctx, requests)

    # 2. roll out and score; methods may ask for more, round by round
    generate = functools.partial(generate_at_draws, ctx, learner, engine, perturb, clock)
    groups = roll_out(ctx, generate, scorer, requests, clock, first_id=0)
    while asked := ask_again(ctx, methods, groups):
        groups += roll_out(ctx, generate, scorer, asked, clock, first_id=len(groups))
    with clock("sync"):
        engine.sleep()  # its memory is the update's
    kept = groups
    for method in methods:
        kept = method.regroup(ctx, kept)

    # 3. credit, loss, packing
    with clock("pack"):
        loss = config.start_loss()
        for method in methods:
            loss = method.tune(ctx, loss)
        samples = make_samples(kept, config.train.advantage) + left_over_samples(groups, kept)
        samples, num_cut = allocator.trim(samples)
        samples = allocator.rescore(learner, samples, loss, perturb)
        weights = loss_weights(samples, loss, config.rollout.max_new_tokens)
        batch = allocator.pack(samples, weights, learner.num_ranks, loss)

    # 4. update; where memory runs out, packed again into smaller micro-batches
    with clock("update"):
        every = config.train.probe_every
        probe = bool(every) and ctx.step % every == 0
        batch, stats = allocator.update(learner, batch, samples, weights, loss, probe, perturb)

    # 5. hand the new weights over; let the methods learn from the step
    with clock("sync"):
        engine.wake()
        engine.load_weights(learner.weights(), policy_version=ctx.step + 1)
    for method in methods:
        method.observe(ctx, kept, stats)
    log.write_rollouts(ctx.step, groups)
    seconds = {f"seconds/{stage}": spent for stage, spent in clock.take().items()}
    figures = step_metrics(ctx, groups, loss, batch, stats) | allocator.report() | pool.report()
    return figures | engine.report() | {"samples_cut": num_cut} | seconds


def perturb_by_all(
    ctx: StepContext,
    methods: Sequence[Method],
    draw: int,
    name: str,
    weight: Tensor,
    optimizer_state: Mapping[str, Tensor],
) -> Tensor:
    """Draw `draw` of a weight, as the methods make it."""
    for method in methods:
        weight = method.perturb(ctx, draw, name, weight, optimizer_state)
    return weight


def generate_at_draws(
    ctx: StepContext, learner: Learner, engine: Engine, perturb: Perturb, clock: StageClock, requests: list[Request]
) -> list[list[Rollout]]:
    """Completions of each request, in order; draw by draw, since each stands on weights of its own."""
    done: dict[int, list[Rollout]] = {}
    for draw in sorted({request.draw for request in requests}):
        if (learner.draw, engine.draw) != (draw, draw):
            with clock("sync"):
                learner.stand_at(draw, perturb)
                engine.load_weights(learner.weights(), policy_version=ctx.step, draw=draw)
        own = [i for i, request in enumerate(requests) if request.draw == draw]
        with clock("generate"):
            done |= zip(own, engine.generate([requests[i] for i in own]), strict=True)
    return [done[i] for i in range(len(requests))]


def roll_out(
    ctx: StepContext,
    generate: Callable[[list[Request]], list[list[Rollout]]],
    scorer: Scorer,
    requests: list[Request],
    clock: StageClock,
    first_id: int,
) -> list[Group]:
    """Sample and score one round; counts it, and the clean successes of first requests."""
    rollouts = generate(requests)
    with clock("reward"):
        flat = [rollout for own in rollouts for rollout in own]
        scores = iter(scorer.score([(rollout.request.prompt, rollout) for rollout in flat]))
    groups = [
        Group(first_id + i, request, tuple(own), tuple(next(scores) for _ in own))
        for i, (request, own) in enumerate(zip(requests, rollouts, strict=True))
    ]
    ctx.round += 1
    for group in groups:
        if group.request.kind == "first":
            judged, correct = group.counts
            before = ctx.clean.get(group.prompt.id, (0, 0))
            ctx.clean[group.prompt.id] = (before[0] + judged, before[1] + correct)
    return groups


def ask_again(ctx: StepContext, methods: Sequence[Method], groups: list[Group]) -> list[Request]:
    """What the methods want beside the groups so far; new prompts among it pass through every plan."""
    if ctx.round >= max((method.max_rounds for method in methods), default=1):
        return []
    asked: list[Request] = []
    for method in methods:
        ctx.pending = len(asked)
        asked += method.retry(ctx, groups)
    new = [request for request in asked if request.kind == "first"]
    for method in methods:
        new = method.plan(ctx, new)
    return new + [request for request in asked if request.kind != "first"]
