r"""LoPE: prompts without a correct rollout are tried again behind meaningless words.

Paper: arXiv 2605.05566; code: shrango/LoPE.

LoremRetry: a prompt with n judged first rollouts, none correct, gets K requests of R more rollouts. In each a random
Latin text stands before the question, which moves the policy without saying anything of the task. The c' correct ones
among them take the places of min(c', n - 1) first rollouts; wrong ones are thrown away. The learner scores them behind
the plain prompt q, and with `policy_shaping` their ratio r has a loss of its own, without a clip:

    r = pi(o | q) / pi_sampled(o | words, q)        loss = -A r / (r + shaping_c)

With `advantage_shaping` mean and deviation of the group are those of all n + K R judged rewards.

It differs from the published code: the trigger is accuracy, not a reward of which a part is format; both shapings are
on, as in the headline numbers; the words are ours.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from e3fast.methods.base import Method
from e3fast.methods.lorem import lorem, word_list
from e3fast.methods.three_po import PerturbedWeights
from e3fast.streams import stream_key, uniforms
from e3fast.tables import check
from e3fast.types import Group, LossParams, Messages, Request, Rollout, Score, StepContext, StepStats

if TYPE_CHECKING:
    from e3fast.config import RunConfig

TAIL = r"Please reason step by step, and put your final answer within \boxed{}."
TOKENS_PER_WORD = 3  # of the built-in words, about
Scored = list[tuple[Rollout, Score]]


@dataclass
class LoremRetry(Method):
    """A second try, behind random words, for prompts that nothing solved."""

    num_prefixes: int = 6  # K, requests of a rescued prompt
    rollouts_per_prefix: int = 4  # R
    prefix: Literal["system", "after_question", "none"] = "system"  # "none" = the plain prompt again, the control
    min_words: int | None = None  # None = 100
    max_words: int | None = None  # None = 300
    words: str | None = None  # text file, one word a line; None = the built-in Latin
    tail: str | None = None  # closes the system message, where the prompt has none; None = reason, box the answer
    temperature: float | None = None  # None = that of the prompt's first request
    policy_shaping: bool = True
    shaping_c: float | None = None  # None = 0.1
    advantage_shaping: bool = True
    max_extra: float | None = None  # rescue rollouts at most, as a share of the step's first rollouts

    rescue_draw: int = field(init=False, default=0)  # the weights rescues are sampled with
    num_cut: int = field(init=False, default=0)  # rescues of the step under way that lost words to the prompt limit
    num_skipped: int = field(init=False, default=0)  # those for which even the tail was too long
    num_rescued: int = field(init=False, default=0)  # prompts of the last step with a rescue among their rollouts

    order: ClassVar[int] = 40
    owns: ClassVar[frozenset[str]] = frozenset({"rescue"})
    max_rounds: ClassVar[int] = 2

    def start(self, config: RunConfig, num_prompts: int) -> list[str]:
        self.check_knobs()
        self.check_prefix(config.data.max_prompt_tokens)
        # b3po trains at its one draw, so its rescues come from there; any other policy is asked itself.
        at_draw = [
            m for m in config.methods if isinstance(m, PerturbedWeights) and m.variant == "b3po" and not m.at_mean
        ]
        self.rescue_draw = 1 if at_draw else 0
        return []

    def check_knobs(self) -> None:
        check(self.num_prefixes >= 1, "num_prefixes", ">= 1", self.num_prefixes)
        check(self.rollouts_per_prefix >= 1, "rollouts_per_prefix", ">= 1", self.rollouts_per_prefix)
        check(self.temperature is None or self.temperature > 0, "temperature", "> 0", self.temperature)
        check(self.max_extra is None or self.max_extra > 0, "max_extra", "> 0", self.max_extra)
        if self.shaping_c is not None and not self.policy_shaping:
            raise ValueError("shaping_c is set but policy_shaping is off")
        check(self.shaping_c is None or self.shaping_c > 0, "shaping_c", "> 0", self.shaping_c)

    def check_prefix(self, max_prompt_tokens: int) -> None:
        if self.prefix == "none":
            for name in ("min_words", "max_words", "words", "tail"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is set but prefix is 'none'")
            return
        low, high = self.word_limits()
        check(1 <= low <= high, "min_words", f"in [1, max_words={high}]", low)
        word_list(self.words)
        if max_prompt_tokens <= TOKENS_PER_WORD * high:
            raise ValueError(
                f"lorem_retry: data.max_prompt_tokens {max_prompt_tokens} leaves no room for {high} words "
                f"(about {TOKENS_PER_WORD * high} tokens); raise it or lower max_words"
            )

    def word_limits(self) -> tuple[int, int]:
        low, high = self.min_words, self.max_words
        return 100 if low is None else low, 300 if high is None else high

    def retry(self, ctx: StepContext, groups: list[Group]) -> list[Request]:
        if ctx.round != 1:
            return []
        self.num_cut = self.num_skipped = 0
        asked = [
            self.rescue(ctx, first, index) for first in self.unsolved(ctx, groups) for index in range(self.num_prefixes)
        ]
        return [request for request in asked if request is not None]

    def unsolved(self, ctx: StepContext, groups: list[Group]) -> list[Request]:
        """The first request of each prompt to rescue: judged, and by accuracy nothing correct."""
        firsts: dict[str, Request] = {}
        for group in groups:
            judged, correct = ctx.clean.get(group.prompt.id, (0, 0))
            if group.request.kind == "first" and judged and not correct:
                firsts.setdefault(group.prompt.id, group.request)
        found = list(firsts.values())
        if self.max_extra is None:
            return found
        num_first = sum(len(group.rollouts) for group in groups if group.request.kind == "first")
        room = int(self.max_extra * num_first) // (self.num_prefixes * self.rollouts_per_prefix)
        u = uniforms(stream_key(ctx.seed, "rescue", ctx.step), [request.prompt.row for request in found])
        return [found[i] for i in sorted(np.argsort(-u, kind="stable")[:room].tolist())]

    def rescue(self, ctx: StepContext, first: Request, index: int) -> Request | None:
        """Rescue request `index` of a prompt; None where its prefix does not fit."""
        prefixed = () if self.prefix == "none" else self.prefixed(ctx, first, index)
        if prefixed is None:
            return None
        return Request(
            first.prompt,
            self.rollouts_per_prefix,
            first.temperature if self.temperature is None else self.temperature,
            first.max_new_tokens,
            stream_key(ctx.seed, "rescue", ctx.step, index, first.prompt.id),
            kind="extra",
            draw=self.rescue_draw,
            prefixed_ids=prefixed,
        )

    def prefixed(self, ctx: StepContext, first: Request, index: int) -> tuple[int, ...] | None:
        """The prompt's tokens behind as many of the words as fit, the last ones; None where none of it fits."""
        prompt, vocabulary = first.prompt, word_list(self.words)
        words = lorem(ctx.seed, ctx.step, index, prompt.id, *self.word_limits(), vocabulary)
        tail = TAIL if self.tail is None else self.tail
        place = "after_question" if self.prefix == "after_question" else "system"

        def without(dropped: int) -> tuple[int, ...]:
            return encode(ctx, surround(prompt.messages, " ".join(words[dropped:]), tail, place))

        ids = without(0)
        if len(ids) <= ctx.max_prompt_tokens:
            return ids
        fits = lambda dropped: len(without(dropped)) <= ctx.max_prompt_tokens  # noqa: E731
        dropped = bisect_left(range(len(words)), True, key=fits)  # fewer words are fewer tokens
        ids = without(dropped)
        # Both are counts for the report: nothing is decided by them.
        if len(ids) > ctx.max_prompt_tokens:
            self.num_skipped += 1
            return None
        self.num_cut += 1
        return ids

    def regroup(self, ctx: StepContext, groups: list[Group]) -> list[Group]:
        rescues = by_prompt(groups, "extra")
        if not rescues:
            return groups
        firsts = by_prompt(groups, "first")
        merged = {
            prompt_id: self.merge(ctx, own, rescues[prompt_id]) if prompt_id in rescues else None
            for prompt_id, own in firsts.items()
        }
        kept = []
        for group in groups:
            own = firsts.get(group.prompt.id, [])
            whole = merged.get(group.prompt.id)
            if group.request.kind == "first" and (whole is None or group is own[0]):
                kept.append(group if whole is None else whole)
        return kept

    def merge(self, ctx: StepContext, firsts: list[Group], rescues: list[Group]) -> Group | None:
        """A prompt's first groups as one, rescues in place of its first rollouts; None where nothing can be put in."""
        first, extra = judged_pairs(firsts), judged_pairs(rescues)
        correct = [pair for pair in extra if pair[1].verdict == "correct"]
        room = len(first) - 1  # one failure stays, or there is nothing to compare with
        if not correct or room < 1:
            return None
        if len(correct) > room:
            key = stream_key(ctx.seed, "rescue-pick", ctx.step, firsts[0].prompt.id)
            best = np.argsort(-uniforms(key, np.arange(len(correct))), kind="stable")[:room]
            correct = [correct[i] for i in sorted(best.tolist())]
        rollouts, scores = zip(*correct, *first[len(correct) :], strict=True)
        rewards = tuple(score.value for _, score in first + extra)
        shaped = rewards if self.advantage_shaping else None
        return dataclasses.replace(firsts[0], rollouts=rollouts, scores=scores, stats_rewards=shaped)

    def tune(self, ctx: StepContext, loss: LossParams) -> LossParams:
        if not self.policy_shaping:
            return loss
        return dataclasses.replace(loss, rescue_shape=0.1 if self.shaping_c is None else self.shaping_c)

    def observe(self, ctx: StepContext, groups: list[Group], stats: StepStats) -> None:
        self.num_rescued = sum(any(r.request.kind == "extra" for r in group.rollouts) for group in groups)

    def report(self) -> dict[str, float]:
        return {"rescued": self.num_rescued, "prefixes_cut": self.num_cut, "prefixes_skipped": self.num_skipped}


def by_prompt(groups: Sequence[Group], kind: Literal["first", "extra"]) -> dict[str, list[Group]]:
    found: dict[str, list[Group]] = {}
    for group in groups:
        if group.request.kind == kind:
            found.setdefault(group.prompt.id, []).append(group)
    return found


def judged_pairs(groups: Sequence[Group]) -> Scored:
    pairs = (pair for group in groups for pair in zip(group.rollouts, group.scores, strict=True))
    return [pair for pair in pairs if pair[1].verdict != "failed"]


def surround(messages: Messages, words: str, tail: str, place: Literal["system", "after_question"]) -> Messages:
    """The messages with words around the question. A system message of their own stands in for the tail."""
    own = [message["content"] for message in messages if message["role"] == "system"]
    chat = tuple(message for message in messages if message["role"] != "system")
    boundary = lines(*own) if own else tail
    if place == "after_question":
        chat = (*chat[:-1], chat[-1] | {"content": lines(chat[-1]["content"], words)})
        words = ""
    system = lines(words, boundary)
    return ({"role": "system", "content": system}, *chat) if system else chat


def encode(ctx: StepContext, messages: Messages) -> tuple[int, ...]:
    """Prompt tokens; the system message goes on top of the next one where the chat template knows no such role."""
    try:
        return ctx.encode(messages)
    except ValueError:
        if messages[0]["role"] != "system":
            raise
        system, first, *rest = messages
        return ctx.encode((first | {"content": lines(system["content"], first["content"])}, *rest))


def lines(*parts: str) -> str:
    return "\n".join(part for part in parts if part)
