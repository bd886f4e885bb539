"""JSON from files and servers (leaf: imports nothing of ours): every input gives a value or a ValueError."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_T = TypeVar("_T")

MAX_DEPTH = 100
"""Most levels of objects and lists inside each other: code that copies or prints a value recurses once per level."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class DuplicateKeyError(ValueError):
    """An object has a key twice.

    Attributes:
        key: the key.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} is in one object twice")
        self.key = key


def parse_json(
    text: str | bytes,
    *,
    infinity: bool = False,
    unique_keys: bool = False,
    surrogates: bool = True,
    max_depth: int | None = MAX_DEPTH,
    parse_int: Callable[[str], int] | None = None,
    parse_float: Callable[[str], float] | None = None,
) -> Any:
    """Parse one JSON value; bytes are UTF-8.

    Args:
        text: the JSON.
        infinity: accept Infinity, which Python writes and JSON does not have.
        unique_keys: refuse an object that has a key twice, of which the last value would count.
        surrogates: accept escapes of half a surrogate pair, which UTF-8 cannot hold.
        max_depth: most levels of objects and lists inside each other; None where the caller has counted them.
        parse_int, parse_float: make numbers from their text, as for ``json.loads``.

    Raises:
        DuplicateKeyError: for a key that is there twice.
        UnicodeEncodeError: for half of a surrogate pair.
        ValueError: if it is not JSON, has NaN or Infinity, a number of thousands of digits, or too many levels. The
            other errors are of this class too.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # json.loads would guess the encoding
    try:
        value = json.loads(
            text,
            parse_int=parse_int,
            parse_float=parse_float,
            parse_constant=_infinity if infinity else _refuse_constant,
            object_pairs_hook=_unique if unique_keys else None,
        )
    except RecursionError:
        raise _too_deep(max_depth) from None
    if max_depth is not None:
        _check_depth(text, value, max_depth)
    if not surrogates and _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # a pair is a character, half of one is not
    return value


def _check_depth(text: str, value: Any, most: int) -> None:
    if text.count("[") + text.count("{") <= most:
        return
    level = [value]
    for _ in range(most + 1):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise _too_deep(most)


def read_fields(kind: type[_T], data: object) -> _T:
    """Return the dataclass that a JSON object describes, whose fields are text, numbers, booleans and null.

    Raises:
        ValueError: as :func:`check_fields`.
    """
    check_fields(kind, data)
    return kind(**cast("dict[str, Any]", data))


def check_fields(kind: type[Any], data: object) -> None:
    """Check that a JSON object has the fields of a dataclass, each of its type. Those with a default may be missing.
    Objects and lists stand for nested dataclasses, mappings and tuples; what is in them is not checked.

    Raises:
        ValueError: if a field is missing, unknown or of another type; the message names it.
    """
    types, needed = _fields(kind)
    if not isinstance(data, dict) or not needed <= data.keys() <= types.keys():
        names = ", ".join(map(str, data)) if isinstance(data, dict) else repr(data)
        raise ValueError(f"expected the fields {', '.join(types)}, got {names[:200]}")
    for name, value in data.items():
        if type(value) not in types[name]:  # a boolean does not count as a number here
            expected = " or ".join(t.__name__ for t in types[name])
            raise ValueError(f"{name}: expected {expected}, got {repr(value)[:80]}")


@cache
def _fields(kind: type[Any]) -> tuple[dict[str, tuple[type, ...]], set[str]]:
    """Return the types that JSON has for each field, and the names of those without a default."""
    hints = get_type_hints(kind)
    types = {f.name: tuple(_json_types(hints[f.name])) for f in fields(kind)}
    return types, {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}


def _json_types(hint: Any) -> Iterable[type]:
    for choice in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        kind = get_origin(choice) or choice
        if kind is float:
            yield int
        if is_dataclass(kind) or issubclass(kind, Mapping):
            yield dict
        else:
            yield list if issubclass(kind, tuple) else kind


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
                raise DuplicateKeyError(key)
            seen.add(key)
    return value


def _too_deep(most: int | None) -> ValueError:
    return ValueError(f"more than {most or MAX_DEPTH} levels of JSON")
