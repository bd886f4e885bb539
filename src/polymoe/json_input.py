"""JSON from files and servers (leaf: imports nothing of ours): every input gives a value or a ValueError."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

__all__ = ["MAX_DEPTH", "parse_json"]

MAX_DEPTH = 100
"""Most levels of objects and lists inside each other: code that copies or prints a value recurses once per level."""


def parse_json(text: str | bytes, *, infinity: bool = False, unique_keys: bool = False) -> Any:
    """Parse one JSON value; bytes are UTF-8.

    Args:
        text: the JSON.
        infinity: accept Infinity, which Python writes and JSON does not have.
        unique_keys: refuse an object that has a key twice, of which the last value would count.

    Raises:
        ValueError: if it is not JSON, has NaN or Infinity, a number of thousands of digits, or more than
            :data:`MAX_DEPTH` levels.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # json.loads would guess the encoding
    constant = _infinity if infinity else _refuse_constant
    try:
        value = json.loads(text, parse_constant=constant, object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return value
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return value
    raise _too_deep()


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _infinity(name: str) -> float:
    return _refuse_constant(name) if name == "NaN" else float(name)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} is in one object twice")
            seen.add(key)
    return value


def _too_deep() -> ValueError:
    return ValueError(f"more than {MAX_DEPTH} levels of JSON")
