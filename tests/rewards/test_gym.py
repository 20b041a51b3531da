"""Laws of the gym reward: entries survive JSON, answers are found where they stand, every verdict has its case."""

from __future__ import annotations

import json

import pytest
import reasoning_gym

from e3fast.rewards.answers import last_number
from e3fast.rewards.gym import extract, gym_score
from e3fast.rewards.gym_entry import decode_entry, encode_entry
from e3fast.types import FinishReason, Prompt, Request, Rollout, Score


def score(entry: dict, text: str, finish_reason: FinishReason = "stop", format_weight: float = 0.0) -> Score:
    prompt = Prompt("p", 0, (1,), (), encode_entry(entry), "gym:" + entry["metadata"]["source_dataset"])
    request = Request(prompt, 1, 1.0, 8, seed=0)
    rollout = Rollout(request, (1,), text, (0.0,), finish_reason, 0)
    return gym_score(prompt, rollout, format_weight=format_weight)


def entry_of(task: str, index: int = 0) -> dict:
    return reasoning_gym.create_dataset(task, size=index + 1, seed=3)[index]


SUM = entry_of("chain_sum")


TASKS = ["chain_sum", "basic_arithmetic", "countdown", "spell_backward", "rearc", "graph_color"]


@pytest.mark.parametrize("task", TASKS)
def test_an_entry_survives_json_with_its_types(task: str) -> None:
    for index in range(20):
        entry = entry_of(task, index)
        text = encode_entry(entry)
        json.loads(text)
        assert repr(decode_entry(text)) == repr(entry)
        assert encode_entry(decode_entry(text)) == text
        if entry["answer"] is not None:
            assert score(entry, f"<answer>{entry['answer']}</answer>").verdict == "correct"


def test_an_entry_that_is_not_plain_data_is_refused() -> None:
    with pytest.raises(TypeError, match="a set cannot be stored"):
        encode_entry({"answer": {1}})


@pytest.mark.parametrize(
    ("text", "expected", "answer", "marked"),
    [
        ("so <answer> 7 </answer> or <answer>8</answer>", "8", "8", True),
        (r"\boxed{4} <answer>7</answer>", "7", "7", True),
        (r"first \boxed{3} then \boxed{\frac{1}{2}} and \boxed{9", "1", r"\frac{1}{2}", True),
        ("<answer></answer> 7", "7", None, True),
        ("3 + 4 = 7.", "7", "7", False),
        ("it is -1,234.50 now", "5", "-1234.50", False),
        ("5-3", "2", "3", False),
        ("no idea", "7", None, False),
        ("  olleh\n", "olleh", "olleh", False),
        (" \n", "olleh", None, False),
        ("a b", None, "a b", False),
    ],
)
def test_where_the_answer_is_found(text: str, expected: str | None, answer: str | None, marked: bool) -> None:
    assert extract(text, expected) == (answer, marked)


def test_last_number() -> None:
    found = {"12.": "12", "1,234,567": "1234567", "1, 2": "2", "x = -0.5": "-0.5", "v2.0": "2.0", "x": None}
    assert {text: last_number(text) for text in found} == found


def test_verdicts_are_decided_in_order() -> None:
    right, other = SUM["answer"], str(int(SUM["answer"]) + 1)
    assert score(SUM, f"it is {right}").verdict == "correct"
    assert score(SUM, f"it is {right}", "length").verdict == "correct"
    assert score(SUM, f"it is {other}", "length").verdict == "truncated"
    assert score(SUM, "it is", "length").verdict == "truncated"
    assert score(SUM, "it is").verdict == "unparsable"
    assert score(SUM, f"it is {other}").verdict == "wrong"


def test_partial_credit_of_a_task_is_not_correct() -> None:
    entry = entry_of("spell_backward")
    verifier = reasoning_gym.get_score_answer_fn("spell_backward")
    text = f"it is {entry['answer']} I say"
    assert score(entry, text).verdict == "wrong"
    assert verifier(text, entry) < 1.0  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("text", "form"),
    [("{}", 1), ("{}.", 1), (" <answer>{}</answer>", 1), (r"\boxed{{{}}}", 1), ("it is {}", 0), ("", 0)],
)
def test_form_is_paid_apart_from_accuracy(text: str, form: int) -> None:
    for answer, accuracy in ((SUM["answer"], 1), ("99999", 0)):
        accuracy = accuracy if text else 0
        result = score(SUM, text.format(answer), format_weight=0.1)
        assert result.parts == {"accuracy": accuracy, "format": form}
        assert result.value == pytest.approx(accuracy + 0.1 * form)
