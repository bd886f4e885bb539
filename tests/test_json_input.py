"""JSON of strangers: a value or a ValueError, whatever comes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polymoe.json_input import MAX_DEPTH, parse_json


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
