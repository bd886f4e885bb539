"""Answers: the response to one request with the arrival times of its parts, and the events of a stream.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Piece", "TimedAnswer", "error_text", "read_event"]


@dataclass(slots=True)
class TimedAnswer:
    """The response to one request. Times are those of :func:`time.perf_counter`, in seconds.

    Attributes:
        sent: when the request was sent.
        chunks: arrival time of each piece of a stream, or of the whole response without streaming.
        streamed: whether it was streamed.
        ended: when the answer was complete or had failed.
        text: the whole text.
        prompt_tokens, completion_tokens, cached_tokens: as counted by the server, or None.
        finish_reason: from the server.
        status: HTTP status; 0 if there was none.
        error: why the answer is not complete, or None.
    """

    sent: float
    ended: float = 0.0
    chunks: list[float] = field(default_factory=list)
    streamed: bool = False
    text: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    status: int = 0
    error: str | None = None

    @property
    def refused(self) -> bool:
        """Whether the server refused it for lack of room: HTTP 429."""
        return self.status == 429

    def take(self, piece: Piece, now: float) -> None:
        """Add an event that arrived at ``now``."""
        if piece.error is not None:
            self.error = piece.error
            return
        if piece.generated:
            self.chunks.append(now)
            self.text += piece.text
        self.finish_reason = piece.finish_reason or self.finish_reason
        if piece.usage:
            details = piece.usage.get("prompt_tokens_details")
            for name, value in (
                ("prompt_tokens", piece.usage.get("prompt_tokens")),
                ("completion_tokens", piece.usage.get("completion_tokens")),
                ("cached_tokens", details.get("cached_tokens") if isinstance(details, dict) else None),
            ):
                if isinstance(value, int):
                    setattr(self, name, value)


@dataclass(frozen=True, slots=True)
class Piece:
    """The content of one event of a stream; see :class:`TimedAnswer`. ``generated``: whether it represents a token."""

    text: str = ""
    generated: bool = False
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    error: str | None = None


def read_event(payload: bytes | str) -> Piece:
    """Parse the JSON of one event of ``/v1/completions`` or ``/v1/chat/completions``, streamed or whole.

    Reasoning, under either of its names, and arguments of tool calls count as text, since they are generated tokens. So
    do pieces of ``/v1/completions`` without text, which vLLM sends for half a character; in a chat such a piece only
    names the role.

    Raises:
        ValueError: if it is not a JSON object.
    """
    event = json.loads(payload)
    if not isinstance(event, dict):
        raise ValueError(f"an event that is not an object: {payload!r:.80}")
    if event.get("error"):
        return Piece(error=_message(event))
    text, empty, finish_reason = "", False, None
    try:
        for choice in event.get("choices") or ():
            said = choice.get("delta") or choice.get("message") or choice
            text += said.get("text") or said.get("content") or ""
            text += said.get("reasoning_content") or said.get("reasoning") or ""
            for call in said.get("tool_calls") or ():
                text += (call.get("function") or {}).get("arguments") or ""
            empty |= choice.get("text") == "" and not choice.get("finish_reason")
            finish_reason = choice.get("finish_reason") or finish_reason
    except (AttributeError, TypeError):
        raise ValueError(f"an event of another shape: {payload!r:.80}") from None
    usage = event.get("usage")
    return Piece(text, bool(text) or empty, finish_reason, usage if isinstance(usage, dict) else None)


def error_text(body: str) -> str:
    """Return the message in the body of an error, in any of the usual forms."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    return (_message(found) if isinstance(found, dict) else body.strip())[:500]


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error") or body.get("detail") or body.get("message")
    if isinstance(error, dict):
        return _message(error) if "error" in error else str(error.get("message", error))
    return str(error)
