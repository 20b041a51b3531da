"""The prompt pool: sources through the chat template into prompts, and the draw of a step's prompts."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from e3fast.sources import Row, is_gym, read_rows
from e3fast.streams import stream_key, uniforms
from e3fast.types import FloatArray, IntArray, Messages, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from e3fast.config import DataConfig, SourceConfig


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """Prompts in the order of their rows, and what was left out on the way."""

    prompts: tuple[Prompt, ...]
    num_too_long: int
    num_excluded: int  # stand in the held-out set
    notes: tuple[str, ...]  # for the user


def load_prompts(
    sources: Sequence[SourceConfig],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    role: str,
    exclude: frozenset[str] = frozenset(),
) -> LoadedPrompts:
    """All prompts of `sources`, without those whose text stands in `exclude` (see `question_texts`).

    `role`, "train" or "held_out", gives the gym tasks of each set a seed of their own. A prompt's id is its source and
    row, never its text: a file may hold a question twice, and each copy is a prompt. A gym task repeats itself by
    chance, so there each question is taken once. ValueError says what is wrong with a source.
    """
    if not sources:
        raise ValueError(f'data.{role} names no source: add one, like {{ source = "gym:chain_sum", count = 1000 }}')
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: set model.chat_template to a file with a Jinja template")
    loader = Loader(data, tokenizer, exclude)
    names = collections.Counter(source.source for source in sources)
    refuse_twins([source.label for source in sources if source.label])
    for position, source in enumerate(sources):
        name = source.source if names[source.source] == 1 else f"{source.source}@{position}"
        name = f"{source.source} {source.label}" if source.label else name
        loader.add(source, name, stream_key(seed, "gym", role, position) % 2**31)  # some tasks seed numpy, 32 bits
    left_out = loader.left_out
    return LoadedPrompts(tuple(loader.prompts), left_out["too long"], left_out["excluded"], tuple(loader.notes))


def refuse_twins(labels: Sequence[str]) -> None:
    twins = [label for label, count in collections.Counter(labels).items() if count > 1]
    if twins:
        raise ValueError(f"label {twins[0]!r} stands at two data sources: give each its own")


@dataclass
class Loader:
    """The prompts and counts of a load under way."""

    data: DataConfig
    tokenizer: PreTrainedTokenizerBase
    exclude: frozenset[str]
    prompts: list[Prompt] = field(default_factory=list)
    left_out: collections.Counter[str] = field(default_factory=collections.Counter)
    notes: list[str] = field(default_factory=list)

    def add(self, source: SourceConfig, name: str, gym_seed: int) -> None:
        """Take prompts of a source until it has given `count`, or ends."""
        first, num_rows = len(self.prompts), 0
        seen: set[str] = set()
        left_out: collections.Counter[str] = collections.Counter()
        for row in read_rows(source, gym_seed):
            num_rows += 1
            messages = arrange(row.messages, self.data)
            token_ids = self.encode(messages, name, row)
            text = question_text(messages)
            if not row.answer:
                left_out["unanswered"] += 1
            elif text in self.exclude:
                left_out["excluded"] += 1
            elif is_gym(source) and text in seen:
                left_out["repeated"] += 1
            elif len(token_ids) > self.data.max_prompt_tokens:
                left_out["too long"] += 1
            else:
                row_number = len(self.prompts)
                self.prompts.append(Prompt(f"{name}#{row.index}", row_number, token_ids, messages, row.answer, name))
            seen.add(text)
            if len(self.prompts) - first == source.count > 0:
                break
        self.left_out += left_out
        self.review(name, source.count, len(self.prompts) - first, num_rows, left_out)

    def encode(self, messages: Messages, name: str, row: Row) -> tuple[int, ...]:
        try:
            return encode_messages(self.tokenizer, messages)
        except ValueError as error:
            raise ValueError(f"{name}#{row.index}: {error}") from None

    def review(self, name: str, count: int, kept: int, num_rows: int, left_out: collections.Counter[str]) -> None:
        """Refuse a source that gave nothing; note one that gave less than was asked or lost some."""
        if not num_rows:
            raise ValueError(f"{name} has no rows")
        reasons = {
            "unanswered": f"{left_out['unanswered']} without an answer",
            "too long": f"{left_out['too long']} longer than data.max_prompt_tokens={self.data.max_prompt_tokens}",
            "excluded": f"{left_out['excluded']} in the held-out set",
            "repeated": f"{left_out['repeated']} repeated",
        }
        lost = ", ".join(reasons[reason] for reason in left_out)
        if not kept:
            raise ValueError(f"{name} has no prompt left of {num_rows} rows: {lost}")
        if kept < count:
            self.notes.append(f"{name}: {kept} of the {count} prompts asked for; {num_rows} rows, {lost or 'no more'}")
        elif lost:
            self.notes.append(f"{name}: left out {lost}")


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> tuple[int, ...]:
    """Chat messages as the tokens that a completion follows. ValueError where the chat template refuses them."""
    try:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except jinja2.TemplateError as error:  # for example a template that knows no system role
        raise ValueError(f"the chat template refuses this prompt: {error}") from None
    return tuple(int(i) for i in ids)  # pyright: ignore[reportArgumentType]  # a list of ints, by the arguments above


def arrange(messages: Messages, data: DataConfig) -> Messages:
    """The row's messages with the run's system message (in place of the row's own) and suffix."""
    if data.system:
        rest = tuple(m for m in messages if m["role"] != "system")
        messages = ({"role": "system", "content": data.system}, *rest)
    if data.suffix:
        last = messages[-1]
        messages = (*messages[:-1], {**last, "content": f"{last['content']}\n{data.suffix}"})
    return messages


def question_text(messages: Messages) -> str:
    """What is asked, for comparison only: all but the system message, with runs of white space as one space."""
    return " ".join(" ".join(m["content"] for m in messages if m["role"] != "system").split())


def question_texts(prompts: Sequence[Prompt]) -> frozenset[str]:
    """Texts to pass as `exclude`, so that no training prompt asks what one of these asks."""
    return frozenset(question_text(prompt.messages) for prompt in prompts)


class PromptPool:
    """Draws the prompts of each step. A draw depends on the seed and on `state()` alone.

    Without weights the pool is walked in passes, pass i in the order of the uniforms of stream seed/shuffle/i, each
    pass joined to the next. No row comes twice in a step: where a joint (or `exclude_rows`) would repeat one, the walk
    steps over it and does not come back to it in that pass. With weights, prompts are drawn without replacement by the
    Gumbel rule, and the walk stays where it is.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        assert [prompt.row for prompt in prompts] == list(range(len(prompts)))
        self.prompts = tuple(prompts)
        self.seed = seed
        self.visits = 0  # prompts drawn so far
        self.topped_up = 0  # of these, drawn because too few had a positive weight
        self.seen: set[int] = set()  # rows drawn at least once
        self._place = 0  # the walk's next place: pass number times pool size, plus the place in that pass
        self._pass: tuple[int, IntArray] = (-1, np.zeros(0, np.int64))  # the pass walked last and its order

    def draw(
        self,
        need: int,
        weights: Sequence[tuple[str, FloatArray | None]],
        step: int,
        exclude_rows: frozenset[int] = frozenset(),
        refill_round: int | None = None,
    ) -> list[Prompt]:
        """`need` distinct prompts. `weights`: (method name, weight of each row or None for no opinion); they multiply.

        A draw later in the same step passes its `refill_round` and, as `exclude_rows`, the rows drawn before it.
        ValueError if the pool is too small, or a weight is negative or not finite (it names the method).
        """
        left = len(self.prompts) - len(exclude_rows)
        if need > left:
            behind = f", {len(exclude_rows)} of them drawn already this step" if exclude_rows else ""
            have = f"the pool has {len(self.prompts)}{behind}"
            raise ValueError(f"a step asks for {need} prompts, {have}: lower train.prompts_per_step or add prompts")
        log_weights = self._log_weights(weights)
        if log_weights is None:
            rows = self._walk(need, set(exclude_rows))
        else:
            labels = ("pool", step) if refill_round is None else ("refill", step, refill_round)
            rows = self._gumbel(need, log_weights, uniforms(stream_key(self.seed, *labels), self._rows()), exclude_rows)
        self.visits += need
        self.seen.update(int(row) for row in rows)
        return [self.prompts[row] for row in rows]

    def report(self) -> dict[str, float]:
        """How much of the pool has been drawn, and how often weights alone did not fill a draw."""
        return {"pool/coverage": len(self.seen) / len(self.prompts), "pool/topped_up": self.topped_up}

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to draw on exactly, as values JSON can hold."""
        counts = {"visits": self.visits, "topped_up": self.topped_up, "place": self._place, "seen": sorted(self.seen)}
        return {"num_prompts": len(self.prompts), "fingerprint": self.fingerprint(), **counts}

    def fingerprint(self) -> str:
        """Of the seed and of what stands in each row: per-prompt state of another pool would be about other prompts."""
        text = repr((self.seed, [(prompt.id, prompt.token_ids) for prompt in self.prompts]))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. ValueError if it belongs to another pool."""
        if state["num_prompts"] != len(self.prompts):
            sizes = f"the checkpoint's pool had {state['num_prompts']} prompts, this one has {len(self.prompts)}"
            raise ValueError(f"{sizes}: resume with the same [data]")
        if state["fingerprint"] != self.fingerprint():
            raise ValueError("the checkpoint's pool held other prompts: resume with the same [data], model and seed")
        self.visits, self.topped_up, self._place = state["visits"], state["topped_up"], state["place"]
        self.seen = set(state["seen"])

    def _rows(self) -> IntArray:
        return np.arange(len(self.prompts))

    def _walk(self, need: int, taken: set[int]) -> list[int]:
        rows: list[int] = []
        while len(rows) < need:
            index, place = divmod(self._place, len(self.prompts))
            if self._pass[0] != index:
                order = np.argsort(uniforms(stream_key(self.seed, "shuffle", index), self._rows()), kind="stable")
                self._pass = (index, order)
            row = int(self._pass[1][place])
            if row not in taken:
                rows.append(row)
                taken.add(row)
            self._place += 1
        return rows

    def _log_weights(self, weights: Sequence[tuple[str, FloatArray | None]]) -> FloatArray | None:
        """ln of the product of all weights; None if no method has an opinion."""
        given = [(name, np.asarray(weight, np.float64)) for name, weight in weights if weight is not None]
        for name, weight in given:
            if weight.shape != (len(self.prompts),):
                raise ValueError(f"{name} gave weights of shape {weight.shape} for {len(self.prompts)} prompts")
            bad = np.flatnonzero(~(np.isfinite(weight) & (weight >= 0)))
            if bad.size:
                row = bad[0]
                raise ValueError(f"{name}: the weight of a prompt must be >= 0, got {weight[row]} (row {row})")
        with np.errstate(divide="ignore"):  # ln 0 = -inf: never drawn
            return sum((np.log(weight) for _, weight in given), np.zeros(len(self.prompts))) if given else None

    def _gumbel(self, need: int, log_weights: FloatArray, u: FloatArray, exclude_rows: frozenset[int]) -> IntArray:
        gumbel = -np.log(-np.log(u))
        scores = log_weights + gumbel
        scores[list(exclude_rows)] = gumbel[list(exclude_rows)] = -np.inf
        best = np.argsort(-scores, kind="stable")[:need]
        best = best[scores[best] > -np.inf]
        if missing := need - best.size:
            gumbel[best] = -np.inf
            self.topped_up += missing
            best = np.concatenate([best, np.argsort(-gumbel, kind="stable")[:missing]])
        return best
