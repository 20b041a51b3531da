"""Answers to reasoning-gym tasks, graded by the task's own verifier."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from reasoning_gym import get_score_answer_fn

from e3fast.rewards.answers import NUMBER, judge, last_boxed, last_number, last_tagged
from e3fast.rewards.gym_entry import decode_entry
from e3fast.types import Prompt, Rollout, Score


def gym_score(prompt: Prompt, rollout: Rollout, *, format_weight: float = 0.0) -> Score:
    r"""Verdict on a completion; `prompt.answer` is the whole entry. Correct iff the task's verifier gives full marks.

    The asked form is <answer>...</answer>, \boxed{...}, or a text that is nothing but the answer (and a final ".").
    """
    entry = decode_entry(prompt.answer)
    answer, marked = extract(rollout.text, entry["answer"])
    accepted = answer is not None and task_verifier(task_of(prompt, entry))(answer, entry) >= 1.0
    well_formed = answer is not None and (marked or rollout.text.strip().removesuffix(".") == answer.removesuffix("."))
    return judge(accepted, answer is not None, well_formed, rollout, format_weight)


def extract(text: str, expected: Any) -> tuple[str | None, bool]:
    """The answer in a text, None if there is none, and whether it stands in tags or a box.

    <answer> tags go before \\boxed{}; without either, the last number where a number is expected, else the whole text.
    """
    for marked in (last_tagged(text), last_boxed(text)):
        if marked is not None:
            return marked or None, True
    if isinstance(expected, str) and NUMBER.fullmatch(expected.strip()):
        return last_number(text), False
    return text.strip() or None, False


def task_of(prompt: Prompt, entry: dict[str, Any]) -> str:
    return entry.get("metadata", {}).get("source_dataset") or prompt.source.removeprefix("gym:")


@functools.cache  # some tasks read word lists when they are made
def task_verifier(task: str) -> Callable[[str, dict[str, Any]], float]:
    return get_score_answer_fn(task)  # pyright: ignore[reportReturnType]  # its annotation forgets the arguments
