r"""Mathematical answers, compared by math-verify (numbers, fractions, intervals, sets, matrices, ...).

The last complete \boxed{...} of a completion is its answer; without one, whatever math-verify finds in the whole text.
Only the last box counts, so listing many candidates gains nothing.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from math_verify import parse, verify

from e3fast.rewards.answers import judge, last_boxed
from e3fast.types import Prompt, Rollout, Score

# math-verify warns that its timeouts are off. They are signals, which a worker's hard deadline replaces.
logging.getLogger("math_verify").setLevel(logging.ERROR)
MATH_DELIMITER = re.compile(r"(?<!\\)\$|\\\(|\\\[")


def math_score(prompt: Prompt, rollout: Rollout, *, format_weight: float = 0.0) -> Score:
    r"""Verdict on a completion against `prompt.answer`. The asked form is a \boxed{} answer."""
    boxed = last_boxed(rollout.text)
    found = parse_math(rollout.text if boxed is None else box(boxed))
    accepted = bool(found) and verify(reference(prompt.answer), found, timeout_seconds=None)
    return judge(accepted, bool(found), bool(boxed), rollout, format_weight)


@functools.lru_cache(maxsize=1024)  # the rollouts of a group share their answer
def reference(answer: str) -> list[Any]:
    """The parsed answer: plain, boxed, in a sentence with $...$, or behind "####" (GSM8K). ValueError without one."""
    text = answer.rpartition("####")[2].strip()
    boxed = last_boxed(text)
    found: list[Any] = []
    if boxed is None and MATH_DELIMITER.search(text):
        found = parse_math(text)
    found = found or parse_math(box(text if boxed is None else boxed))
    if not found:
        raise ValueError(f"math-verify finds no answer in the reference answer {answer!r}")
    return found


def parse_math(text: str) -> list[Any]:
    return parse(text, parsing_timeout=0)


def box(content: str) -> str:
    return f"\\boxed{{{content}}}"
