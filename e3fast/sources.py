"""Where questions come from: reasoning-gym tasks, JSONL and parquet files, hub data sets. Each yields rows, lazily.

Every error is a ValueError that names the source, the place in it and what to do.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from e3fast.rewards.gym_entry import encode_entry

if TYPE_CHECKING:
    from e3fast.config import SourceConfig

Record = dict[str, Any]
GYM_TRIES = 8  # entries generated for each one asked for, before a task that repeats itself counts as exhausted


@dataclass(frozen=True, slots=True)
class Row:
    """One question as the source has it. `index` counts the source's rows from 0; `answer` is empty where none is."""

    index: int
    messages: tuple[dict[str, str], ...]
    answer: str


def is_gym(source: SourceConfig) -> bool:
    return source.source.startswith("gym:")


def read_rows(source: SourceConfig, gym_seed: int) -> Iterator[Row]:
    """Rows of a source in its own order: all of them, or for a gym task up to 8 times `count`."""
    if is_gym(source):
        return gym_rows(source, gym_seed)
    if source.source.startswith("hub:"):
        records = hub_records(source)
    elif source.source.endswith((".jsonl", ".json")):  # a .json file must hold one object a line, as E3's test set does
        records = jsonl_records(existing(source.source))
    elif source.source.endswith(".parquet"):
        records = parquet_records(existing(source.source))
    else:
        raise ValueError(f"unknown data source {source.source!r}: write gym:<task>, hub:<id>, or a .jsonl or .parquet")
    return (table_row(i, place, record, source) for i, (place, record) in enumerate(records))


def existing(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"no data file {name} in {Path.cwd()}: check the sources of data.train and data.held_out")
    return path


def jsonl_records(path: Path) -> Iterator[tuple[str, Record]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path} line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:  # bad JSON or bad UTF-8
                raise ValueError(f"{place} is not valid JSON ({error}): each line must be one JSON object") from None
            if not isinstance(record, dict):
                raise ValueError(f"{place} holds a {type(record).__name__}: each line must be one JSON object")
            yield place, record


def parquet_records(path: Path) -> Iterator[tuple[str, Record]]:
    import pyarrow.parquet  # not `datasets`, which would copy the file into its cache first

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        records = (record for batch in batches for record in batch.to_pylist())
        yield from ((f"{path} row {i}", record) for i, record in enumerate(records))
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from None


def hub_records(source: SourceConfig) -> Iterator[tuple[str, Record]]:
    import datasets

    name, _, config = source.source.removeprefix("hub:").partition(":")
    try:
        table = datasets.load_dataset(name, config or None, split=source.split)
    except Exception as error:  # the hub's client raises anything, from HTTP errors to ValueErrors about splits
        what = f"cannot load {source.source}, split {source.split!r}: {type(error).__name__}: {error}"
        raise ValueError(f"{what}\nCheck the id, the split and the network, or download it and name the file") from None
    for i, record in enumerate(table):
        assert isinstance(record, dict)
        yield f"{source.source} row {i}", record


def table_row(index: int, place: str, record: Record, source: SourceConfig) -> Row:
    prompt = plain(cell(record, source.prompt_column, "prompt_column", place))
    answer = plain(cell(record, source.answer_column, "answer_column", place))
    if answer is None:
        answer = ""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"{place}: the answer ({source.answer_column}) must be a text or a number, got {answer!r}")
    return Row(index, chat(prompt, f"{place}: the prompt ({source.prompt_column})"), str(answer).strip())


def cell(record: Record, column: str, knob: str, place: str) -> Any:
    """Value of a column; "a.b" looks into a nested one."""
    value: Any = record
    for key in [column] if column in record else column.split("."):
        if not isinstance(value, dict) or key not in value:
            known = ", ".join(column_names(record))
            raise ValueError(f"{place} has no column {column!r}: set the source's {knob} to one of {known}")
        value = value[key]
    return value


def column_names(record: Record) -> list[str]:
    """The columns of a record, nested ones with dots."""
    names = []
    for key, value in record.items():
        names += [f"{key}.{name}" for name in column_names(value)] if isinstance(value, dict) and value else [key]
    return names


def plain(value: Any) -> Any:
    """Numpy's arrays and scalars as Python's own."""
    return value.tolist() if hasattr(value, "tolist") else value


def chat(prompt: Any, what: str) -> tuple[dict[str, str], ...]:
    """A text or a list of chat messages as messages."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"{what} must be a text or a list of chat messages, got {prompt!r}")
    messages = []
    for message in prompt:
        parts = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"{what} must hold messages with a role and a content, both texts, got {message!r}")
        messages.append({"role": parts[0], "content": parts[1]})
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise ValueError(f"{what} must end with a user message that is not empty, got {messages[-1]!r}")
    return tuple(messages)


def gym_rows(source: SourceConfig, seed: int) -> Iterator[Row]:
    if not source.count:
        raise ValueError(f"{source.source} makes as many questions as one likes: set the source's count")
    dataset = gym_task(source, GYM_TRIES * source.count, seed)
    for index in range(GYM_TRIES * source.count):
        try:
            entry = dataset[index]
        except Exception as error:  # a generator may choke on options that its own check lets through
            raise refused(source, error) from error
        yield Row(index, ({"role": "user", "content": entry["question"]},), encode_entry(entry))


def gym_task(source: SourceConfig, size: int, seed: int) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    task = source.source.removeprefix("gym:")
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(sorted(DATASETS))}"
        raise ValueError(f"unknown gym task {task!r}; {hint}")
    known = [name for name in inspect.signature(DATASETS[task][1]).parameters if name not in ("seed", "size")]
    for key in source.options:
        if key not in known:
            raise ValueError(f"unknown option {key!r} of {source.source}; its options: {', '.join(known)}")
    try:
        return create_dataset(task, size=size, seed=seed, **source.options)
    except Exception as error:  # the tasks check their options with assert, some by failing
        raise refused(source, error) from error


def refused(source: SourceConfig, error: Exception) -> ValueError:
    return ValueError(f"{source.source} refuses its options {source.options}: {type(error).__name__}: {error}")
