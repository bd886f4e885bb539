"""Completions: the text of a response, and what the server says of it.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polymoe.common.json_input import parse_json
from polymoe.common.server_replies import one_line, token_count

__all__ = ["Completion", "parse_body", "read_completion"]


@dataclass(frozen=True, slots=True)
class Completion:
    """The text of a response, the server's reason for its end, and its counts of tokens; None where it gives none."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def parse_body(body: bytes) -> Any:
    """Parse the body of a response as JSON.

    Raises:
        ValueError: if it is not JSON; the message has its beginning.
    """
    try:
        return parse_json(body)
    except ValueError as error:
        raise ValueError(f"not JSON: {one_line(body[:80].decode(errors='replace'))!r}: {error}") from None


def read_completion(response: Any, *, chat: bool) -> Completion:
    """Read a parsed response of ``/v1/chat/completions`` or ``/v1/completions``.

    Raises:
        ValueError: if it is not one, or counts tokens in negative or absurd numbers.
    """
    choices = _field(response, "choices", list)
    if not choices:
        raise ValueError("no answer in the response: choices is empty")
    message = _field(choices[0], "message", dict) if chat else choices[0]
    usage = _field(response, "usage", dict, optional=True) or {}
    return Completion(
        text=_field(message, "content" if chat else "text", str, optional=True) or "",
        finish_reason=_field(choices[0], "finish_reason", str, optional=True),
        prompt_tokens=token_count(usage, "prompt_tokens"),
        completion_tokens=token_count(usage, "completion_tokens"),
    )


def _field(value: Any, name: str, kind: type, *, optional: bool = False) -> Any:
    found = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(found, kind) or (optional and found is None and isinstance(value, Mapping)):
        return found
    got = f"{name} is {one_line(repr(found))}" if found is not None else f"no {name} in {one_line(repr(value))}"
    raise ValueError(f"no answer in the response: {got}")
