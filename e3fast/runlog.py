"""The run directory: metrics.jsonl (a line a step), eval.jsonl (a line an evaluation), rollouts/step_00012.parquet.

A writer whose files are whole or not there, and readers that return what can be read.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from e3fast.types import Group

ROLLOUT_SCHEMA = pa.schema(
    [(name, pa.int64()) for name in ("step", "group")]
    + [(name, pa.string()) for name in ("prompt_id", "source", "prompt", "answer", "completion")]
    + [("num_tokens", pa.int64()), ("reward", pa.float64()), ("verdict", pa.string()), ("parts", pa.string())]
    + [("temperature", pa.float64()), ("finish_reason", pa.string()), ("kind", pa.string())]
    + [("draw", pa.int64()), ("policy_version", pa.int64())]
)
ROLLOUT_FILE = re.compile(r"step_(\d+)\.parquet")


class RunLog:
    """The writer of a run directory. A write that fails (disk full) is an OSError that names the file."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.rollouts = self.path / "rollouts"
        self.rollouts.mkdir(parents=True, exist_ok=True)

    def write_step(self, metrics: dict[str, Any]) -> None:
        """Add the step's line to metrics.jsonl; nan and infinity become null."""
        append_line(self.path / "metrics.jsonl", metrics)

    def write_eval(self, result: dict[str, Any]) -> None:
        """Add an evaluation's line to eval.jsonl; its `step` counts the steps taken before it."""
        append_line(self.path / "eval.jsonl", result)

    def write_rollouts(self, step: int, groups: Sequence[Group]) -> Path:
        """Write the step's rollouts, one a row, as one parquet file that is either whole or not there."""
        path = self.rollouts / f"step_{step:05d}.parquet"
        table = pa.Table.from_pylist(list(rollout_rows(step, groups)), schema=ROLLOUT_SCHEMA)
        replace_file(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))
        return path

    def truncate_after(self, step: int) -> None:
        """Forget what a run resumed at `step` will do again: that step and later ones, evaluations after more steps."""
        keep_lines(self.path / "metrics.jsonl", lambda row: row["step"] < step)
        keep_lines(self.path / "eval.jsonl", lambda row: row["step"] <= step)
        for path in rollout_files(self.path):
            if file_step(path) >= step:
                path.unlink()
        for leftover in self.rollouts.glob("*.tmp"):
            leftover.unlink()


def rollout_rows(step: int, groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    for group in groups:
        prompt = group.prompt
        question = next((m["content"] for m in reversed(prompt.messages) if m["role"] == "user"), "")
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            yield {
                "step": step,
                "group": group.id,
                "prompt_id": encodable(prompt.id),
                "source": encodable(prompt.source),
                "prompt": encodable(question),
                "answer": encodable(readable_answer(prompt.answer)),
                "completion": encodable(rollout.text),
                "num_tokens": len(rollout.token_ids),
                "reward": score.value,
                "verdict": score.verdict,
                "parts": json.dumps(jsonable(dict(score.parts))),
                "temperature": rollout.request.temperature,
                "finish_reason": rollout.finish_reason,
                "kind": rollout.request.kind,
                "draw": rollout.request.draw,
                "policy_version": rollout.policy_version,
            }


def readable_answer(answer: str) -> str:
    """The answer a person would write: that of a gym entry, whose JSON holds all its verifier needs."""
    try:
        entry = json.loads(answer)
    except ValueError:
        return answer
    return str(entry["answer"]) if isinstance(entry, dict) and "answer" in entry else answer


def encodable(text: str) -> str:
    """Text that UTF-8 can hold: a lone surrogate, which JSON data sets may carry, becomes a question mark."""
    return text.encode(errors="replace").decode()


def jsonable(value: Any) -> Any:
    """Values as JSON has them: NumPy scalars become Python's; nan and infinity, which JSON lacks, become null."""
    if isinstance(value, dict):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(entry) for entry in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError from inside names the file: that of a full disk does not by itself."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror or error}", str(path)) from error


def append_line(path: Path, row: dict[str, Any]) -> None:
    line = json.dumps(jsonable(row), allow_nan=False).encode() + b"\n"
    with naming(path), path.open("a+b") as file:
        if file.tell():  # a process killed while it wrote left half a line: it must not swallow this one
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, then put it in its place in one move."""
    temporary = path.with_name(path.name + ".tmp")
    with naming(path):
        try:
            write(temporary)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    if path.exists():
        text = "".join(json.dumps(row) + "\n" for row in read_lines(path) if keep(row))
        replace_file(path, lambda temporary: temporary.write_text(text))


def read_lines(path: Path, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """The records of a JSONL file; `problems` gains a sentence for each that cannot be read. No file, no records."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    rows: list[dict[str, Any]] = []
    for index, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
        elif problems is not None:
            problems.append(f"{path.name}: line {index} of {len(lines)} is damaged")
    return rows


def read_metrics(path: Path | str, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """The step metrics of a run directory, damaged lines left out (named in `problems`)."""
    return read_lines(Path(path) / "metrics.jsonl", problems)


def read_evals(path: Path | str, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """The evaluations of a run directory, damaged lines left out (named in `problems`)."""
    return read_lines(Path(path) / "eval.jsonl", problems)


def rollout_files(path: Path) -> list[Path]:
    """The rollout files of a run directory in step order."""
    found = [file for file in (path / "rollouts").glob("step_*.parquet") if ROLLOUT_FILE.fullmatch(file.name)]
    return sorted(found, key=file_step)


def file_step(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def read_rollouts(
    path: Path | str,
    columns: Sequence[str] | None = None,
    steps: Sequence[int] | None = None,
    problems: list[str] | None = None,
) -> pa.Table:
    """The rollouts of a run directory, all or those of `steps`; files that cannot be read are left out."""
    names = list(columns or ROLLOUT_SCHEMA.names)
    tables = [pa.schema([ROLLOUT_SCHEMA.field(name) for name in names]).empty_table()]
    for file in rollout_files(Path(path)):
        if steps is None or file_step(file) in steps:
            try:
                tables.append(pq.read_table(file, columns=names).select(names).cast(tables[0].schema))
            except (OSError, ValueError, KeyError) as error:
                if problems is not None:
                    problems.append(f"rollouts/{file.name}: {str(error).splitlines()[0]}")
    return pa.concat_tables(tables)
