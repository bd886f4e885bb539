"""Answers: the response to one request with the arrival times of its parts, and the events of a stream.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polymoe.common.json_input import parse_json
from polymoe.common.server_replies import error_message, token_count

__all__ = ["NO_TOKEN", "Piece", "Request", "TimedAnswer", "read_event"]

NO_TOKEN = "an answer without a token"
"""The error of an answer that has neither text nor a count of tokens."""

_ADDED_TOKENS = 2**16  # most tokens that a server's template may add to a prompt


@dataclass(frozen=True, slots=True)
class Request:
    """A request, created before timing starts: its body, and the most tokens that its answer may have."""

    body: bytes
    tokens: int

    @property
    def prompt_tokens(self) -> int:
        """The most tokens that its prompt may have: each token is at least one byte of the body."""
        return len(self.body) + _ADDED_TOKENS


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
        wrong_counts: why the server's counts cannot be true and are not taken, or None.
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
    wrong_counts: str | None = None
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
            try:
                for name in ("prompt_tokens", "completion_tokens"):
                    found = token_count(piece.usage, name)
                    setattr(self, name, getattr(self, name) if found is None else found)
                if isinstance(details, dict):
                    self.cached_tokens = token_count(details, "cached_tokens")
            except ValueError as error:
                self.wrong_counts = str(error)

    def finish(self, request: Request) -> None:
        """Check a complete answer: drop counts that cannot be true, and see whether it has a token at all."""
        self.ended = time.perf_counter()
        wrong = self.wrong_counts or "; ".join(self._doubts(request))
        if wrong:
            self.wrong_counts, self.prompt_tokens, self.completion_tokens, self.cached_tokens = wrong, None, None, None
        if self.error is None and not self.chunks:
            if self.completion_tokens:
                self.chunks.append(self.ended)  # tokens without text, such as an end token
            else:
                self.error = NO_TOKEN

    def _doubts(self, request: Request) -> Iterator[str]:
        if self.completion_tokens is not None and self.completion_tokens > request.tokens:
            yield f"usage.completion_tokens is {self.completion_tokens}, more than the {request.tokens} asked for"
        if self.completion_tokens == 0 and self.text:
            yield "usage.completion_tokens is 0 for an answer with text"
        if self.prompt_tokens is not None and not 0 < self.prompt_tokens <= request.prompt_tokens:
            yield f"usage.prompt_tokens is {self.prompt_tokens} for a request of {len(request.body)} bytes"
        if self.cached_tokens and self.cached_tokens > (self.prompt_tokens or 0):
            yield f"usage has {self.cached_tokens} cached tokens of {self.prompt_tokens}"


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
        ValueError: if it is not a JSON object, or fields have other types.
    """
    event = parse_json(payload)
    if not isinstance(event, dict):
        raise ValueError(f"an event that is not an object: {payload!r:.80}")
    if event.get("error"):
        return Piece(error=error_message(payload if isinstance(payload, str) else payload.decode()))
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
        if not isinstance(finish_reason, str | None):
            raise TypeError
    except (AttributeError, TypeError):
        raise ValueError(f"an event of another shape: {payload!r:.80}") from None
    usage = event.get("usage")
    return Piece(text, bool(text) or empty, finish_reason, usage if isinstance(usage, dict) else None)
