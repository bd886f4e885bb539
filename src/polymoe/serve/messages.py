"""The messages of a chat, as chat templates read them. Whatever no template would see is refused, never dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException

from polymoe.serve.errors import refusal
from polymoe.serve.strict_json import parse

_ROLES = ("developer", "system", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "reasoning", "thinking")  # names that Transformers and servers give it
_COMMON = {"role", "content", "name"}
_FIELDS: Mapping[str, set[str]] = {
    "assistant": {*_COMMON, "tool_calls", *_REASONING},
    "tool": {*_COMMON, "tool_call_id"},
}
_EMPTY = {"annotations": [], "tool_calls": []}
"""What an answer of OpenAI's API has without saying anything; clients send answers back as messages."""


def read_messages(messages: list[Any], template: str) -> list[dict[str, Any]]:
    """Messages for a chat template: contents are strings, and arguments of tool calls are objects. If the template does
    not know the role ``developer``, such messages become ``system``.

    Raises:
        HTTPException: 400 for unknown roles or fields, contents that are not text, and tool calls that cannot be read.
    """
    read = [_read(message, f"messages[{i}]") for i, message in enumerate(messages)]
    for message in read:
        if message["role"] == "developer" and "developer" not in template:
            message["role"] = "system"
    return read


def _wrong(where: str, expected: str) -> HTTPException:
    return refusal(f"{where} must be {expected}", param="messages")


def _read(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise _wrong(where, f"an object whose role is one of {', '.join(_ROLES)}")
    role = message["role"]
    said = {name: v for name, v in message.items() if v is not None and v != _EMPTY.get(name)}
    for name, value in said.items():
        if name not in _FIELDS.get(role, _COMMON):
            raise _wrong(f"{where}.{name[:80]}", f"omitted: messages of the role {role} with it are not supported")
        if name not in ("content", "tool_calls") and not isinstance(value, str):
            raise _wrong(f"{where}.{name}", "a string")
    if "tool_calls" in said:
        said["tool_calls"] = _read_calls(said["tool_calls"], f"{where}.tool_calls")
    elif "content" not in said and role != "assistant":
        raise _wrong(f"{where}.content", "a string or a list of text parts")
    said["content"] = _read_content(said.get("content", ""), f"{where}.content")
    return said


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "a string or a list of text parts")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise _wrong(f"{where}[{i}]", f"of the type text, the only one that this server supports, not {kind!r:.80}")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise _wrong(f"{where}[{i}]", '{"type": "text", "text": a string}')
    return " ".join(part["text"] for part in content)  # as Transformers' own server


def _read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(where, "a list of tool calls")
    return [_read_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not call.keys() <= {"id", "type", "function", "index"}
        or call.get("type", "function") != "function"
        or function.keys() - {"arguments"} != {"name"}
        or not isinstance(function["name"], str)
    ):
        raise _wrong(where, '{"id", "type": "function", "function": {"name", "arguments"}}')
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = parse(arguments)
        except HTTPException as error:
            raise _wrong(f"{where}.function.arguments", f"JSON: {error.detail['error']['message']}") from error  # type: ignore[index]
    return {**call, "function": {"name": function["name"], "arguments": arguments}}
