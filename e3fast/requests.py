"""How prompts become a step's requests: the step's context, and the draw of first requests and refills."""

from __future__ import annotations

from e3fast.config import RunConfig
from e3fast.prompts import PromptPool
from e3fast.streams import stream_key
from e3fast.types import Group, Prompt, Request, StepContext


def make_context(config: RunConfig, pool: PromptPool, step: int) -> StepContext:
    """A fresh context for a step that starts."""

    def refill(need: int) -> list[Request]:
        ctx.need = need
        return draw(ctx, config, pool, need)

    def regrouped(groups: list[Group]) -> list[Group]:
        for method in config.methods:
            groups = method.regroup(ctx, groups)
        return groups

    ctx = StepContext(
        seed=config.seed,
        step=step,
        max_steps=config.train.steps,
        num_prompts=len(pool.prompts),
        prompts_per_step=config.train.prompts_per_step,
        rollouts_per_prompt=config.rollout.rollouts_per_prompt,
        visits=pool.visits,
        need=config.train.prompts_per_step,
        refill=refill,
        regrouped=regrouped,
    )
    return ctx


def draw(ctx: StepContext, config: RunConfig, pool: PromptPool, need: int) -> list[Request]:
    """Prompts from the pool as requests of kind "first", this step's own excluded."""
    opinions = [(type(method).__name__, method.weigh(ctx, pool.prompts)) for method in config.methods]
    refill = ctx.round if ctx.round else None
    prompts = pool.draw(need, opinions, ctx.step, frozenset(ctx.rows.values()), refill)
    ctx.visits = pool.visits
    ctx.rows |= {prompt.id: prompt.row for prompt in prompts}
    return [new_request(ctx, config, prompt) for prompt in prompts]


def new_request(ctx: StepContext, config: RunConfig, prompt: Prompt) -> Request:
    rollout = config.rollout
    seed = stream_key(config.seed, "rollout", ctx.step, ctx.round, prompt.id)
    return Request(prompt, rollout.rollouts_per_prompt, rollout.temperature, rollout.max_new_tokens, seed)
