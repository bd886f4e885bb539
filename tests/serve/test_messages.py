"""Messages of chats: what chat templates get, and what is refused because none would see it."""

from __future__ import annotations

from typing import Any

import pytest

from polymoe.serve.messages import read_messages
from support.serving import refused

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
READ_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": "user", "content": "a"}, {}),
        ({"role": "user", "content": "", "name": "Ann"}, {}),
        ({"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}, {"content": "a b"}),
        ({"role": "tool", "content": "3", "tool_call_id": "c"}, {}),
        ({"role": "assistant", "content": "a", "reasoning_content": "b"}, {}),
        ({"role": "assistant", "content": "a", "tool_calls": [CALL]}, {"tool_calls": [READ_CALL]}),
        ({"role": "assistant", "tool_calls": [CALL]}, {"content": "", "tool_calls": [READ_CALL]}),
        ({"role": "assistant"}, {"content": ""}),
        ({"role": "developer", "content": "a"}, {"role": "system"}),
    ],
    ids=str,
)
def test_messages_are_read(message: dict[str, Any], read: dict[str, Any]) -> None:
    assert read_messages([message], "a template") == [{**message, **read}]


def test_answers_can_be_sent_back() -> None:
    """With all that OpenAI's client writes into them."""
    nothing = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": []}
    message = {"role": "assistant", "content": "a", **nothing}
    assert read_messages([message], "") == [{"role": "assistant", "content": "a"}]


def test_a_template_that_knows_developers_gets_them() -> None:
    message = {"role": "developer", "content": "a"}
    assert read_messages([message], "{% if role == 'developer' %}") == [message]


@pytest.mark.parametrize("arguments", [None, "", {}, "{}"])
def test_a_call_may_have_no_arguments(arguments: Any) -> None:
    [read] = read_messages(
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}], ""
    )
    assert read["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("1+2", "messages[1] must be an object"),
        ({"content": "a"}, "messages[1] must be an object whose role"),
        ({"role": "critic", "content": "a"}, "messages[1] must be an object whose role"),
        ({"role": ["user"], "content": "a"}, "messages[1] must be an object whose role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": {"type": "text", "text": "a"}}, "messages[1].content"),
        ({"role": "user", "content": ["a"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"text": "a"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}, "not 'image_url'"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "not 'input_audio'"),
        ({"role": "user", "content": [{"type": "file", "file": {}}]}, "not 'file'"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "not 'refusal'"),
        ({"role": "user", "content": "a", "weight": 0}, "messages[1].weight"),
        ({"role": "user", "content": "a", "name": 1}, "messages[1].name"),
        ({"role": "user", "content": "a", "reasoning_content": "b"}, "messages[1].reasoning_content"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "messages[1].audio"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f"}}, "messages[1].function_call"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}, "JSON: invalid"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 900}}]}, "deep"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[NaN]"}}]}, "NaN"),
    ],
    ids=str,
)
def test_what_no_template_would_see_is_refused(message: Any, where: str) -> None:
    error = refused(lambda: read_messages([{"role": "user", "content": "a"}, message], ""))
    assert where in error["message"]
    assert error["param"] == "messages"
