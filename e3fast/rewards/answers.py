"""What verifiers share: finding the answer in a text, and the order in which the five verdicts are decided."""

from __future__ import annotations

import re

from e3fast.types import Rollout, Score, Verdict

BOX = re.compile(r"\\boxed\s*\{")
NUMBER = re.compile(r"(?<![\d.])-?\d+(?:,\d{3})*(?:\.\d+)?")
TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...}; None if there is none. A box that the length limit cut open does not count."""
    for match in reversed(list(BOX.finditer(text))):
        content = balanced(text, match.end())
        if content is not None:
            return content.strip()
    return None


def balanced(text: str, start: int) -> str | None:
    """Text from `start` to the brace that closes what was open there."""
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):  # \{ and \} are printed braces, not groups
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : start + brace.start()]
    return None


def last_tagged(text: str) -> str | None:
    """Content of the last <answer>...</answer>; None if there is none."""
    found = TAGS.findall(text)
    return found[-1].strip() if found else None


def last_number(text: str) -> str | None:
    """The last decimal number without its thousands commas; None if there is none."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def judge(accepted: bool, extracted: bool, well_formed: bool, rollout: Rollout, format_weight: float) -> Score:
    """The verdict, decided in a fixed order, and the reward: accuracy, and `format_weight` more for the asked form."""
    verdict: Verdict = "wrong"
    if accepted:
        verdict = "correct"
    elif rollout.finish_reason == "length":
        verdict = "truncated"
    elif not extracted:
        verdict = "unparsable"
    parts = {"accuracy": float(accepted), "format": float(well_formed)}
    return Score(parts["accuracy"] + format_weight * parts["format"], verdict, parts)
