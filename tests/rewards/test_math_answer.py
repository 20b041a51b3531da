"""Laws of the math reward: an answer may be written in many ways, the last box counts, every verdict has its case."""

from __future__ import annotations

import pytest

from e3fast.rewards.answers import last_boxed
from e3fast.rewards.math_answer import math_score
from e3fast.types import FinishReason, Prompt, Request, Rollout, Score


def score(answer: str, text: str, finish_reason: FinishReason = "stop", format_weight: float = 0.0) -> Score:
    prompt = Prompt("p", 0, (1,), (), answer, "questions.jsonl")
    rollout = Rollout(Request(prompt, 1, 1.0, 8, seed=0), (1,), text, (0.0,), finish_reason, 0)
    return math_score(prompt, rollout, format_weight=format_weight)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("025", r"so \boxed{25}"),
        (r"\frac{1155}{4}", r"\boxed{288.75}"),
        ("1/2", "The final answer is $0.5$."),
        (r"t < \frac{1}{2}", r"\boxed{t<0.5}"),
        ("2{,}016{,}532", r"\boxed{2016532}"),
        (r"\[ \boxed{12} \]", r"\boxed{12}"),
        (r"n=\boxed {1,3}", r"\boxed{3,1}"),
        (r"\$3.50", r"\boxed{3.5}"),
        ("n$ is odd", r"\boxed{n$ is odd}"),
        ("$5$", "the answer is 5"),
        (r"The smallest constant is \( c = 2 \).", r"\boxed{2}"),
        ("8 + 10 = 18\n#### 18", r"\boxed{18}"),
        ("3, 4", r"\boxed{4, 3}"),
        (r"\text{Tuesday}", r"\boxed{\text{Tuesday}}"),
    ],
)
def test_an_equal_answer_is_correct(answer: str, text: str) -> None:
    assert score(answer, text).verdict == "correct"


def test_only_the_last_complete_box_counts() -> None:
    assert score("2", r"\boxed{1} \boxed{2} \boxed{3}").verdict == "wrong"
    assert score("2", r"\boxed{1, 2, 3}").verdict == "wrong"
    assert score("2", r"\boxed{3} no, \boxed{2}").verdict == "correct"
    assert score("2", r"the answer is 2, so \boxed{3}").verdict == "wrong"
    assert score("2", r"\boxed{2}, and then \boxed{3", "length").verdict == "correct"


def test_boxes_may_nest_and_hold_printed_braces() -> None:
    assert last_boxed(r"\boxed{\sqrt{\frac{1}{2}}}") == r"\sqrt{\frac{1}{2}}"
    assert last_boxed(r"\boxed{\{1\}} x }") == r"\{1\}"
    assert last_boxed(r"\boxed{\boxed{3}}") == "3"
    assert last_boxed(r"\boxed{3") is None


def test_verdicts_are_decided_in_order() -> None:
    assert score("7", r"\boxed{7}").verdict == "correct"
    assert score("7", r"\boxed{7}", "length").verdict == "correct"
    assert score("7", r"\boxed{8}", "length").verdict == "truncated"
    assert score("7", "", "length").verdict == "truncated"
    assert score("7", "I do not know").verdict == "unparsable"
    assert score("7", r"\boxed{} and not 7").verdict == "unparsable"
    assert score("7", r"\boxed{8}").verdict == "wrong"


@pytest.mark.parametrize(
    ("text", "accuracy", "form"), [(r"\boxed{7}", 1, 1), ("7", 1, 0), (r"\boxed{8}", 0, 1), (r"\boxed{}", 0, 0)]
)
def test_form_is_paid_apart_from_accuracy(text: str, accuracy: int, form: int) -> None:
    result = score("7", text, format_weight=0.1)
    assert result.parts == {"accuracy": accuracy, "format": form}
    assert result.value == pytest.approx(accuracy + 0.1 * form)


def test_a_row_without_an_answer_is_an_error_and_not_a_wrong_rollout() -> None:
    with pytest.raises(ValueError, match="finds no answer in the reference answer ''"):
        score("", r"\boxed{7}")
