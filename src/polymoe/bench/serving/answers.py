"""Answers: what came back for one request, and when; and what each event of a stream says.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Answer", "Piece", "error_text", "read_event"]


@dataclass(slots=True)
class Answer:
    """What came back for one request. Times are those of :func:`time.perf_counter`, in seconds.

    Attributes:
        sent: when the request was handed to the network.
        chunks: when each piece of a stream came, or the whole of what is none.
        streamed: whether it came as a stream.
        ended: when the answer was over, or had failed.
        text: all of it.
        prompt_tokens, completion_tokens, cached_tokens: as the server counts them; None where it does not say.
        finish_reason: as the server says.
        status: HTTP status; 0 if there was none.
        error: why there is no whole answer, or None.
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
        """Whether the server had no room for it: HTTP 429."""
        return self.status == 429

    def take(self, piece: Piece, now: float) -> None:
        """Add what an event that came at ``now`` says."""
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
    """What one event of a stream says; see :class:`Answer`. ``generated``: whether it stands for a token."""

    text: str = ""
    generated: bool = False
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    error: str | None = None


def read_event(payload: bytes | str) -> Piece:
    """One event's JSON, of ``/v1/completions`` or ``/v1/chat/completions``, streamed or whole.

    Reasoning, under either of its names, and arguments of tool calls are text as well: they are generated tokens. So
    are pieces of ``/v1/completions`` without text, which is how vLLM sends half a character; in a chat such a piece
    only names the role.

    Raises:
        ValueError: if it is no JSON object.
    """
    event = json.loads(payload)
    if not isinstance(event, dict):
        raise ValueError(f"an event that is no object: {payload!r:.80}")
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
    """What the body of an error says, in whichever of the usual forms."""
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
