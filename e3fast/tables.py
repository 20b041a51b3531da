"""Strict reading of tables.

A TOML value becomes the type a dataclass field asks for, or a ValueError that names its path.

Imports nothing of ours, so config and methods build on it alike.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import Annotated, Any, Literal


def check(ok: bool, name: str, allowed: str, got: object) -> None:
    """ValueError "<name> must be <allowed>, got <got>" unless ok."""
    if not ok:
        raise ValueError(f"{name} must be {allowed}, got {got!r}")


def unknown_key(where: str, key: str, known: list[str]) -> ValueError:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"unknown key {where}{key}; {hint}known here: {', '.join(known)}")


def build(kind: Any, value: Any, path: str) -> Any:
    """A value of a TOML file as the type a field asks for; `path` is where it stands, for messages."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return build(args[0], value, path)
    if dataclasses.is_dataclass(kind):
        return build_table(kind, value, path)
    if origin in (tuple, list):
        if not isinstance(value, list):
            raise ValueError(f"{path} must be a list, got {value!r}")
        kinds = [args[0]] * len(value) if origin is list or args[-1] is ... else args
        if len(kinds) != len(value):
            raise ValueError(f"{path} must have {len(kinds)} entries, got {len(value)}")
        return origin(build(k, v, f"{path}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if origin is Literal:
        check(value in args, path, f"one of {', '.join(map(str, args))}", value)
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        literal = next((k for k in args if typing.get_origin(k) is Literal), None)
        if literal is not None:
            return build(literal, value, path)
        kinds = tuple(k for k in args if k is not type(None))
    else:
        kinds = (origin or kind,)
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) not in kinds:
        raise ValueError(f"{path} must be {' or '.join(k.__name__ for k in kinds)}, got {value!r}")
    return value


def build_table(kind: Any, table: Any, path: str) -> Any:
    where = f"{path}." if path else ""
    if not isinstance(table, dict):
        raise ValueError(f"{path} must be a table, got {table!r}")
    hints = typing.get_type_hints(kind, include_extras=True)
    known = [f.name for f in dataclasses.fields(kind) if f.init]
    for key in table:
        if key not in known:
            raise unknown_key(where, key, known)
    return kind(**{key: build(hints[key], value, f"{where}{key}") for key, value in table.items()})
