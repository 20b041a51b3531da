"""How prompts become a step's requests: the step's context, and the draw of first requests and refills."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from e3fast.config import RunConfig
from e3fast.prompts import PromptPool
from e3fast.streams import stream_key
from e3fast.types import FloatArray, Group, Messages, Prompt, Request, StepContext


def make_context(
    config: RunConfig,
    pool: PromptPool,
    step: int,
    encode: Callable[[Messages], tuple[int, ...]],
    latents: Callable[[Sequence[Prompt]], FloatArray],
) -> StepContext:
    """A fresh context for a step that starts; the last two are of the run's tokenizer and model."""

    def refill(need: int) -> list[Request]:
        ctx.need = need
        return draw_prompts(ctx, config, pool, need)

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
        encode=encode,
        latents=latents,
        max_prompt_tokens=config.data.max_prompt_tokens,
    )
    return ctx


def draw_prompts(ctx: StepContext, config: RunConfig, pool: PromptPool, need: int) -> list[Request]:
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
