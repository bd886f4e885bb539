"""JSON of strangers: a value or a ValueError, whatever comes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from polymoe.common.json_input import MAX_DEPTH, parse_json, read_fields


@dataclass(frozen=True)
class Line:
    name: str
    count: int
    time: float
    share: float | None
    done: bool = False


@dataclass(frozen=True)
class Nested:
    line: Line | None
    counts: Mapping[str, int]
    kind: Literal["a", "b"] = "a"


GOOD = {"name": "a", "count": 3, "time": 1, "share": None}


@pytest.mark.parametrize("value", [None, True, -1.5e-7, "ü\n", [], {}, {"a": [1, {"b": None}]}, [[], {}]])
def test_values(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert parse_json(text) == parse_json(text.encode()) == value


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a": '])
def test_depth_is_bounded(opening: str) -> None:
    levels = sum(c in "[{" for c in opening)
    times = MAX_DEPTH // levels
    closing = "".join({"[": "]", "{": "}"}[c] for c in reversed(opening) if c in "[{")
    assert parse_json(opening * times + "1" + closing * times)
    for deep in (times + 1, 500, 1_000_000):
        with pytest.raises(ValueError, match="more than 100 levels"):
            parse_json(opening * deep + "1" + closing * deep)


@pytest.mark.parametrize(
    "text",
    ["", "{", "1 2", "NaN", "[-Infinity]", "1" * 5000, b"\xff", b'"\xff"', "\ufeff{}", '{"a": 1}'.encode("utf-16")],
)
def test_what_is_not_json(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of json, of the decoder, or ours
        parse_json(text)


def test_infinity_and_keys_that_are_there_twice() -> None:
    assert parse_json("[Infinity, -Infinity]", infinity=True) == [float("inf"), -float("inf")]
    with pytest.raises(ValueError, match="NaN is not JSON"):
        parse_json("NaN", infinity=True)
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(ValueError, match="the key 'a' is in one object twice"):
        parse_json('[{"b": 1, "a": 1, "a": 2}]', unique_keys=True)


def test_fields_of_a_dataclass() -> None:
    assert read_fields(Line, GOOD) == Line("a", 3, 1, None)
    assert read_fields(Line, {**GOOD, "share": 0.5, "done": True}) == Line("a", 3, 1, 0.5, True)
    line = Line("a", 3, 1, None)
    assert read_fields(Nested, {"line": GOOD, "counts": {"a": 1}, "kind": "b"}) == Nested(line, {"a": 1}, "b")
    assert read_fields(Nested, {"line": None, "counts": {}}) == Nested(None, {})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": 3}, "name: expected str, got 3"),
        ({"count": True}, "count: expected int, got True"),
        ({"count": 3.0}, "count: expected int, got 3.0"),
        ({"time": "1"}, "time: expected int or float, got '1'"),
        ({"time": None}, "time: expected int or float, got None"),
        ({"share": [0.5]}, "share: expected int or float or NoneType"),
        ({"done": 1}, "done: expected bool"),
        ({"more": 1}, "more: expected a field of Line"),
    ],
)
def test_fields_of_another_type(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is compared
        read_fields(Line, {**GOOD, **change})
    assert str(error.value).startswith(says)


@pytest.mark.parametrize("data", [None, [], "text"])
def test_what_is_not_an_object(data: Any) -> None:
    with pytest.raises(ValueError, match="expected an object with the fields name, count"):
        read_fields(Line, data)


@pytest.mark.parametrize("data", [{}, {"name": "a"}])
def test_a_field_that_is_missing(data: Any) -> None:
    with pytest.raises(ValueError, match=r"(name|count): expected a value, got none"):
        read_fields(Line, data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"line": [], "counts": {}}, "line: expected Line or NoneType"),
        ({"line": {**GOOD, "count": "3"}, "counts": {}}, "line.count: expected int"),
        ({"line": None, "counts": []}, "counts: expected dict"),
        ({"line": None, "counts": {}, "kind": "c"}, "kind: expected 'a' or 'b', got 'c'"),
    ],
)
def test_nested_values_of_another_kind(data: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_fields(Nested, data)
