"""Property-based tests of what reads requests: whatever a client sends, there is a value or one refusal with 400."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st

from attacks.json_mutators import HOSTILE, Raw, dumps
from polymoe.serve.limits import Limits
from polymoe.serve.messages import read_messages
from polymoe.serve.requests import ChatRequest, CompletionRequest, read_request, settings_of
from polymoe.serve.strict_json import MAX_DEPTH, parse_object

words = st.text(max_size=12)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | words | st.sampled_from(["user", "text", "function"])
trees = st.recursive(leaves, lambda below: st.lists(below, max_size=3) | st.dictionaries(words, below, max_size=3))
GOOD: dict[str, Any] = {
    "model": "m", "messages": [{"role": "user", "content": "1+1="}], "temperature": 0.5, "top_p": 0.9, "seed": 1,
    "max_tokens": 8, "stop": ["x"], "logit_bias": {"3": -1}, "stream": True, "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "frequency_penalty": 1,
}  # fmt: skip
LIMITS = Limits(context=256, vocabulary=16)


@contextlib.contextmanager
def refused_or_not() -> Iterator[None]:
    """The block raises nothing but a refusal, whose text is short."""
    try:
        yield
    except HTTPException as error:
        refusal: Any = error
        found = refusal.status_code, len(json.dumps(refusal.detail)) < 2000
    else:
        found = 400, True
    assert found == (400, True)


def read(content: bytes) -> None:
    """As the server reads a chat request."""
    request = read_request(parse_object(content), ChatRequest)
    settings_of(request, LIMITS)
    read_messages(request.messages or [], "")


@given(st.binary(max_size=100) | trees.map(dumps) | st.sampled_from(HOSTILE).map(str.encode))
def test_any_bytes_as_a_body(content: bytes) -> None:
    with refused_or_not():
        read(content)


@given(
    st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "other"})),
    trees | st.sampled_from(HOSTILE).map(Raw),
)
def test_any_value_in_a_field(name: str, value: Any) -> None:
    with refused_or_not():
        read(dumps(GOOD | {name: value}))
    with refused_or_not():
        settings_of(read_request({"prompt": "1+1=", name: value}, CompletionRequest), LIMITS)


names = st.sampled_from(
    ["role", "content", "name", "type", "text", "tool_calls", "function", "arguments", "id", "other"]
)
objects = st.recursive(leaves, lambda below: st.lists(below, max_size=3) | st.dictionaries(names, below, max_size=4))


@given(st.lists(st.dictionaries(names, objects, max_size=4) | objects, max_size=3))
def test_any_messages(messages: list[Any]) -> None:
    with refused_or_not():
        read(dumps(GOOD | {"messages": messages}))


@given(st.text(st.sampled_from('[]{}",:\\1u"d8'), max_size=60))
def test_what_is_read_is_what_python_reads(text: str) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(HTTPException):
            parse_object(text.encode())
        return
    with refused_or_not():
        assert parse_object(text.encode()) == expected


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 100_000])
def test_depth(depth: int) -> None:
    content = b'{"a":' * depth + b"1" + b"}" * depth
    if depth <= MAX_DEPTH:
        parse_object(content)
    else:
        with pytest.raises(HTTPException):
            parse_object(content)


def test_a_good_request_is_read() -> None:
    request = read_request(parse_object(dumps(GOOD)), ChatRequest)
    assert settings_of(request, LIMITS).max_tokens == 8
    assert read_messages(request.messages or [], "") == [{"role": "user", "content": "1+1="}]
