"""JSON from files and servers (leaf: imports errors alone): every input gives a value or a ValueError."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from polymoe.errors import FormatError, nearest

_T = TypeVar("_T")

MAX_DEPTH = 100
"""Most levels of objects and lists inside each other: code that copies or prints a value recurses once per level."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class DuplicateKeyError(ValueError):
    """An object has a ``key`` twice."""

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


def read_fields(kind: type[_T], data: object, where: str = "") -> _T:
    """Return the dataclass that a JSON object describes. Its fields are text, numbers, booleans, null, mappings, whose
    values are not checked, and dataclasses of these; those with a default may be missing.

    Args:
        kind: the dataclass.
        data: of JSON.
        where: the object's name in errors.

    Raises:
        FormatError: if a field is missing, unknown or of another type; it names the field.
    """
    types, name = _fields(kind), kind.__name__
    if not isinstance(data, dict):
        expected = f"an object with the fields {', '.join(types)}"
        raise FormatError(where or name, expected=expected, got=repr(data)[:80])
    if unknown := [key for key in data if key not in types]:
        raise FormatError(_within(where, unknown[0]), expected=f"a field of {name}", hint=nearest(unknown[0], types))
    for f in fields(cast("Any", kind)):
        if f.default is MISSING and f.default_factory is MISSING and f.name not in data:
            raise FormatError(_within(where, f.name), expected="a value", got="none")
    return kind(**{key: _value(types[key], value, _within(where, key)) for key, value in data.items()})


def _value(choices: tuple[Any, ...], value: object, where: str) -> object:
    if type(value) in choices:  # a boolean does not count as a number here
        return value
    for choice in choices:
        if is_dataclass(choice) and (isinstance(value, dict) or len(choices) == 1):
            return read_fields(cast("type[Any]", choice), value, where)
        if type(value) is type(choice) and value == choice:
            return value
    expected = " or ".join(getattr(choice, "__name__", repr(choice)) for choice in choices)
    raise FormatError(where, expected=expected, got=repr(value)[:80])


@cache
def _fields(kind: type[Any]) -> dict[str, tuple[Any, ...]]:
    """Return what JSON has for each field: types, dataclasses and values of a Literal."""
    hints = get_type_hints(kind)
    return {f.name: tuple(_choices(hints[f.name])) for f in fields(kind)}


def _choices(hint: Any) -> Iterable[Any]:
    for choice in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        origin = get_origin(choice) or choice
        if origin is Literal:
            yield from get_args(choice)
        elif origin is float:
            yield from (int, float)
        else:
            yield dict if issubclass(origin, Mapping) else choice


def _within(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


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
