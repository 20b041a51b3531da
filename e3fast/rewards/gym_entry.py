"""A reasoning-gym entry as JSON text and back, so that it can travel as a prompt's answer.

The gym's verifiers are picky about types (rearc compares tuples), and JSON knows neither tuples nor keys other than
text. Both get a tag. Imports nothing of ours.
"""

from __future__ import annotations

import json
from typing import Any

TUPLE, ITEMS = "__tuple__", "__items__"


def encode_entry(entry: dict[str, Any]) -> str:
    """JSON text of an entry. TypeError if it holds something that is neither plain data nor a numpy scalar or array."""
    return json.dumps(tag(entry), default=plain, ensure_ascii=False)


def decode_entry(text: str) -> dict[str, Any]:
    """The inverse of `encode_entry`. ValueError if the text is not JSON."""
    return json.loads(text, object_hook=untag)


def tag(value: Any) -> Any:
    if isinstance(value, dict):
        if all(type(key) is str for key in value):
            return {key: tag(item) for key, item in value.items()}
        return {ITEMS: [[tag(key), tag(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {TUPLE: [tag(item) for item in value]}
    return [tag(item) for item in value] if isinstance(value, list) else value


def untag(table: dict[str, Any]) -> Any:
    if table.keys() == {TUPLE}:
        return tuple(table[TUPLE])
    return dict(table[ITEMS]) if table.keys() == {ITEMS} else table


def plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be stored as JSON")
