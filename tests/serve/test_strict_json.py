"""Bodies of requests: JSON with limits, and nothing that two readers could read differently."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from polymoe.serve.strict_json import MAX_DEPTH, MAX_VALUES, parse, parse_object
from support.serving import refused


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": [1, -2.5, 1e300, True, None, "b"]},
        {"\\": 'a "quoted" [[[[ {{{{ ,,,, \\" text\\', "": "\u0000😀é"},
        {"a": "[" * 10_000 + "," * MAX_VALUES},
        {"a": 2**64 - 1, "b": -(2**63)},
        {"a": [0] * (MAX_VALUES - 3)},
        json.loads('{"a":' * (MAX_DEPTH - 1) + "{}" + "}" * (MAX_DEPTH - 1)),
    ],
    ids=lambda value: repr(value)[:30],
)
@pytest.mark.parametrize("ascii_only", [False, True])
def test_json_is_read(value: Any, ascii_only: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "invalid JSON"),
        (b"nonsense", "invalid JSON"),
        (b"{}{}", "invalid JSON"),
        (b"]" * 100_000, "invalid JSON"),
        (b'{"a": "\n"}', "invalid JSON"),
        (b'{\\"a\\": 1}', "invalid JSON"),
        (b"\xef\xbb\xbf{}", "invalid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"a"', "must be a JSON object"),
        (b"\xff\xfe{\x00}\x00", "UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 21 + b"}", "too large"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "too large"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "duplicate name in an object: 'c'"),
        (b'{"a": 1, "\\u0061": 2}', "duplicate name"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "duplicate name"),
        (b'{"a": "\\ud800"}', "Unicode"),
        (b'{"\\uDFFF": 1}', "Unicode"),
        (b'{"a": "\\ude00\\ud83d"}', "Unicode"),
        (b"[" * (MAX_DEPTH + 1), "deep"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "deep"),
        (b'{"a": "\\\\", "b":' + b"[" * 5000, "deep"),
        (b'{"a": [' + b"0," * MAX_VALUES + b"0]}", "values"),
        (b'{"a": [' + b"[]," * MAX_VALUES + b"0]}", "values"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else "",
)
def test_anything_else_is_refused(content: bytes, says: str) -> None:
    error = refused(lambda: parse_object(content))
    assert says in error["message"]
    json.dumps(error, ensure_ascii=False).encode()  # even with half of a surrogate pair


@pytest.mark.parametrize(
    "content",
    [b'"' * 2**22, b"\\" * 2**22, b'{"a": "' + b"\\\\" * 2**21, b"[" * 2**22, b"[" * 40 + b"]" * 2**22],
    ids=["quotes", "backslashes", "escapes", "opened", "closed"],
)
def test_no_body_takes_long(content: bytes) -> None:
    start = time.process_time()
    refused(lambda: parse_object(content))
    assert time.process_time() - start < 2


def test_a_text_may_be_any_value() -> None:
    assert parse("[1]") == [1]
