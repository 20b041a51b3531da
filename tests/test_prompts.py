"""Laws of prompts: identity is the row, held-out questions stay out, errors name their place, draws resume exactly."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from e3fast.config import DataConfig, SourceConfig
from e3fast.prompts import LoadedPrompts, PromptPool, load_prompts, question_texts
from e3fast.rewards.gym_entry import decode_entry
from e3fast.types import Prompt

E3 = Path(__file__).parents[2] / "shared" / "data" / "e3"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template)


TOKENIZER = byte_tokenizer()


def load(*sources: SourceConfig, exclude: frozenset[str] = frozenset(), role: str = "train", **data) -> LoadedPrompts:
    return load_prompts(sources, DataConfig(**data), TOKENIZER, 7, role, exclude)


def jsonl(path: Path, *rows: object, name: str = "questions.jsonl") -> SourceConfig:
    (path / name).write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return SourceConfig(str(path / name))


# Loading


def test_messages_and_tokens(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "old"}, {"role": "user", "content": "2+2?"}]
    source = jsonl(tmp_path, {"prompt": "1+1?", "answer": 2}, {"prompt": chat, "answer": "4"})
    loaded = load(source, system="Be brief.", suffix="Box it.")
    assert [p.messages for p in loaded.prompts] == [
        ({"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{question}\nBox it."})
        for question in ("1+1?", "2+2?")
    ]
    assert [p.answer for p in loaded.prompts] == ["2", "4"]
    ids = loaded.prompts[0].token_ids
    assert all(type(i) is int for i in ids)
    assert TOKENIZER.decode(list(ids)) == "system: Be brief.\nuser: 1+1?\nBox it.\nassistant:"
    assert load(source).prompts[1].messages == tuple(chat)


def test_identity_is_the_row_and_never_the_text(tmp_path: Path) -> None:
    same = {"prompt": "1+1?", "answer": "2"}
    source = jsonl(tmp_path, same, "", same)
    prompts = load(source, jsonl(tmp_path, same, name="b.jsonl"), source).prompts
    assert len({p.id for p in prompts}) == len(prompts) == 5
    assert [p.row for p in prompts] == list(range(5))
    assert prompts[2].id == f"{tmp_path}/b.jsonl#0"


def test_long_prompts_are_left_out_and_counted_never_cut(tmp_path: Path) -> None:
    source = jsonl(tmp_path, {"prompt": "x" * 100, "answer": "1"}, {"prompt": "y", "answer": "1"})
    loaded = load(source, max_prompt_tokens=50)
    assert [p.id for p in loaded.prompts] == [f"{source.source}#1"]
    assert loaded.num_too_long == 1
    assert "1 longer than data.max_prompt_tokens=50" in loaded.notes[0]


def test_a_held_out_question_does_not_enter_whatever_its_spacing_and_system_message(tmp_path: Path) -> None:
    held_out = load(jsonl(tmp_path, {"prompt": "1+1 ?\n", "answer": "2"}), system="a").prompts
    source = jsonl(tmp_path, {"prompt": "1+1  ?", "answer": "2"}, {"prompt": "2+2 ?", "answer": "4"}, name="b.jsonl")
    loaded = load(source, exclude=question_texts(held_out), system="b")
    assert [p.answer for p in loaded.prompts] == ["4"]
    assert loaded.num_excluded == 1


def test_count_takes_the_first_rows(tmp_path: Path) -> None:
    source = jsonl(tmp_path, *({"prompt": f"{i}?", "answer": i} for i in range(9)))
    assert [p.answer for p in load(SourceConfig(source.source, count=3)).prompts] == ["0", "1", "2"]
    assert "9 of the 20 prompts asked for" in load(SourceConfig(source.source, count=20)).notes[0]


@pytest.mark.parametrize("task", ["chain_sum", "basic_arithmetic", "countdown", "spell_backward"])
def test_gym_prompts_are_distinct_reproducible_and_carry_their_entry(task: str) -> None:
    source = SourceConfig(f"gym:{task}", count=30)
    prompts = load(source).prompts
    assert prompts == load(source).prompts
    assert len(question_texts(prompts)) == 30
    assert all(decode_entry(p.answer)["question"] == p.messages[-1]["content"] for p in prompts)
    assert question_texts(prompts) != question_texts(load(source, role="held_out").prompts)


def test_a_small_gym_task_gives_what_it_has_without_the_held_out_questions() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # at most 200 questions
    held_out = load(SourceConfig("gym:chain_sum", count=40, options=options), role="held_out").prompts
    loaded = load(SourceConfig("gym:chain_sum", count=400, options=options), exclude=question_texts(held_out))
    texts = question_texts(loaded.prompts)
    assert 100 < len(texts) == len(loaded.prompts) < 200
    assert not texts & question_texts(held_out)
    assert loaded.num_excluded > 0
    assert f"{len(texts)} of the 400 prompts asked for; 3200 rows" in loaded.notes[0]


@pytest.mark.skipif(not E3.is_dir(), reason="E3's data files are not on this machine")
def test_e3_files_load_with_nested_answers_and_their_duplicates() -> None:
    source = SourceConfig(str(E3 / "train_data.parquet"), answer_column="reward_model.ground_truth")
    loaded = load(source, max_prompt_tokens=10**6)
    num_unanswered = 10240 - len(loaded.prompts)
    assert 0 < num_unanswered < 20
    assert f"{num_unanswered} without an answer" in loaded.notes[0]
    assert len(question_texts(loaded.prompts)) < len({p.id for p in loaded.prompts}) == len(loaded.prompts)
    assert loaded.prompts[0].answer == "843"
    assert len(load(SourceConfig(str(E3 / "all_data.parquet"), count=5)).prompts) == 5
    assert len(load(SourceConfig(str(E3 / "test.json"), count=5)).prompts) == 5


GOOD = {"prompt": "1?", "answer": "1"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((GOOD, '{"prompt": "2?", '), r"questions\.jsonl line 2 is not valid JSON"),
        ((GOOD, "[1]"), r"line 2 holds a list"),
        ((), "has no rows"),
        (({"question": "1?", "meta": {"a": "1"}},), r"no column 'prompt': .*prompt_column.* question, meta\.a"),
        ((GOOD, {"prompt": "1?"}), r"line 2 has no column 'answer'"),
        (({"prompt": "1?", "answer": [4]},), r"line 1: the answer \(answer\) must be a text or a number, got \[4\]"),
        (({"prompt": "1?", "answer": None}, {"prompt": "1?", "answer": " "}), "of 2 rows: 2 without an answer"),
        (({"prompt": " ", "answer": "1"},), "user message that is not empty"),
        (({"prompt": 3, "answer": "1"},), "a text or a list of chat messages, got 3"),
        (({"prompt": [{"role": "user"}], "answer": "1"},), "a role and a content"),
        (({"prompt": [{"role": role, "content": "x"} for role in ("tool", "user")], "answer": "1"},), "no tools"),
        (({"prompt": "x" * 600, "answer": "1"},), "no prompt left of 1 rows: 1 longer than data.max_prompt_tokens=512"),
    ],
)
def test_a_broken_file_is_named_with_its_place(tmp_path: Path, rows: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(jsonl(tmp_path, *rows))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (SourceConfig("nowhere.jsonl"), "no data file nowhere.jsonl"),
        (SourceConfig("questions.csv"), "unknown data source 'questions.csv'"),
        (SourceConfig("gym:chain_sum"), "set the source's count"),
        (SourceConfig("gym:chainsum", count=3), "did you mean 'chain_sum'"),
        (SourceConfig("gym:chain_sum", count=3, options={"terms": 2}), "unknown option 'terms' .*min_terms"),
        (SourceConfig("gym:chain_sum", count=3, options={"min_terms": 0}), "refuses its options .*min_terms"),
        (SourceConfig("gym:chain_sum", count=3, options={"size": 2}), "unknown option 'size'"),
    ],
)
def test_a_bad_source_is_a_value_error_that_says_what_to_do(source: SourceConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(source)


def test_a_broken_parquet_file_no_source_and_no_template(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match="not a readable parquet file"):
        load(SourceConfig(str(tmp_path / "x.parquet")))
    with pytest.raises(ValueError, match=r"data\.train names no source"):
        load()
    with pytest.raises(ValueError, match=r"set model\.chat_template"):
        load_prompts([SourceConfig("gym:chain_sum", 1)], DataConfig(), byte_tokenizer(None), 0, "train")


# Drawing


def make_pool(size: int, seed: int = 7) -> PromptPool:
    return PromptPool([Prompt(f"p{i}", i, (1,), (), "", "x") for i in range(size)], seed)


def rows(prompts: list[Prompt]) -> list[int]:
    return [p.row for p in prompts]


def test_check_vector_of_the_weighted_draw() -> None:
    """Worked values of stream 7/pool/3."""
    weights = np.array([0.36044, 0.77484, 1.0, 0.36044])
    assert rows(make_pool(4).draw(2, [("a", None), ("b", weights)], step=3)) == [3, 2]
    assert rows(make_pool(4).draw(2, [("a", np.sqrt(weights)), ("b", np.sqrt(weights))], step=3)) == [3, 2]


def test_the_walk_visits_every_prompt_once_a_pass_in_a_new_order() -> None:
    pool = make_pool(10)
    first, second = ([row for _ in range(2) for row in rows(pool.draw(5, [], 0))] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert pool.visits == 20
    assert first != [row for _ in range(2) for row in rows(make_pool(10, seed=8).draw(5, [], 0))]


@given(size=st.integers(1, 12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_draw_repeats_a_prompt_and_a_resumed_pool_draws_on_exactly(size: int, data: st.DataObject) -> None:
    pool = make_pool(size)
    for step in range(6):
        exclude = data.draw(st.frozensets(st.integers(0, size - 1), max_size=size - 1))
        need = data.draw(st.integers(1, size - len(exclude)))
        weights = data.draw(st.none() | st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=size, max_size=size))
        given_weights = [("m", None if weights is None else np.array(weights))]
        twin = make_pool(size)
        twin.restore(json.loads(json.dumps(pool.state())))
        drawn = rows(pool.draw(need, given_weights, step, exclude, refill_round=1))
        assert drawn == rows(twin.draw(need, given_weights, step, exclude, refill_round=1))
        assert len(set(drawn)) == need
        assert not exclude & set(drawn)
        assert pool.state() == twin.state()


def test_the_first_pass_is_whole_even_when_steps_do_not_divide_it() -> None:
    pool = make_pool(10)
    seen = Counter(row for step in range(4) for row in rows(pool.draw(3, [], step)))
    assert set(seen) == set(range(10))
    assert sum(seen.values()) == pool.visits == 12


def test_the_weighted_draw_follows_its_weights() -> None:
    pool = make_pool(3)
    weights = np.array([6.0, 3.0, 1.0])
    share = Counter(pool.draw(1, [("m", weights)], step)[0].row for step in range(2000))
    assert np.allclose([share[i] / 2000 for i in range(3)], [0.6, 0.3, 0.1], atol=0.04)
    assert rows(pool.draw(3, [("m", weights)], 5)) != rows(pool.draw(3, [("m", weights)], 6))


def test_too_few_positive_weights_are_topped_up_from_the_rest() -> None:
    pool = make_pool(6)
    drawn = rows(pool.draw(4, [("m", np.array([0.0, 1, 0, 0, 0, 1]))], 0, exclude_rows=frozenset({2})))
    assert set(drawn[:2]) == {1, 5}
    assert set(drawn[2:]) < {0, 3, 4}
    assert pool.topped_up == 2


def test_coverage_counts_each_prompt_once() -> None:
    pool = make_pool(10)
    for step in range(2):
        pool.draw(4, [], step)
    assert pool.report() == {"pool/coverage": 0.8, "pool/topped_up": 0}
    pool.draw(4, [], 2)
    assert pool.report()["pool/coverage"] == 1


def test_draws_that_cannot_be_made_are_value_errors() -> None:
    pool = make_pool(4)
    with pytest.raises(ValueError, match=r"asks for 5 prompts, the pool has 4: lower train\.prompts_per_step"):
        pool.draw(5, [], 0)
    with pytest.raises(ValueError, match="2 of them drawn already"):
        pool.draw(3, [], 0, frozenset({0, 1}))
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"leeps: the weight of a prompt must be >= 0, got .* \(row 2\)"):
            pool.draw(1, [("leeps", np.array([1, 1, bad, 1]))], 0)
    with pytest.raises(ValueError, match="leeps gave weights of shape"):
        pool.draw(1, [("leeps", np.ones(3))], 0)
    with pytest.raises(ValueError, match="had 4 prompts, this one has 5"):
        make_pool(5).restore(pool.state())
    assert pool.visits == 0
