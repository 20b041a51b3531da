"""A run's settings as an annotated TOML text, readable by `load_config` again."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from typing import Any

from e3fast.config import RunConfig
from e3fast.methods import method_table


def config_text(config: RunConfig) -> str:
    """Every knob with its meaning as a comment and its value."""
    lines = table_lines(config, "")
    for method in config.methods:
        lines += ["", "[[methods]]", *(f"{key} = {toml(value)}" for key, value in known(method_table(method)).items())]
    return "\n".join(lines) + "\n"


def table_lines(record: Any, path: str) -> list[str]:
    """Plain values of a dataclass first, then its tables, as TOML wants it."""
    notes, lines, tables = field_notes(type(record)), [], []
    for f in dataclasses.fields(record):
        value, name = getattr(record, f.name), f"{path}.{f.name}" if path else f.name
        if name == "methods":
            continue
        if dataclasses.is_dataclass(value):
            tables += ["", f"[{name}]", *table_lines(value, name)]
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            tables += ["", *comment(notes.get(f.name, ""))]
            for entry in value:
                tables += [f"[[{name}]]", *(f"{k} = {toml(v)}" for k, v in known(vars(entry)).items()), ""]
        else:
            lines += [*comment(notes.get(f.name, "")), f"{f.name} = {toml(value)}"]
    return lines + tables


def known(table: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: what is None is left out, which means the same."""
    return {key: value for key, value in table.items() if value is not None}


def comment(note: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(note, 118)]


def field_notes(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    notes = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        is_note = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_note:
            notes[node.target.id] = " ".join(str(after.value.value).split())  # type: ignore[union-attr]
    return notes


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if isinstance(value, bool) else repr(value)
