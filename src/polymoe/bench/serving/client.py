"""One streamed request to a server, with the times at which its pieces arrive.

A request that fails does not raise: refused, broken or silent, it is a :class:`TimedAnswer` with an error.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polymoe.common.openai_client import (
    MAX_BYTES,
    Completion,
    Model,
    Reply,
    Server,
    ServerConnection,
    one_line,
    read_completion,
    token_count,
)
from polymoe.errors import ServerError

if TYPE_CHECKING:
    import httpx

__all__ = ["NO_TOKEN", "Client", "Request", "TimedAnswer"]

NO_TOKEN = "an answer without a token"
"""The error of an answer that has neither text nor a count of tokens."""

_OPTIONAL: Mapping[str, Any] = {
    "temperature": 0,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,  # of vLLM and SGLang: generate all requested tokens
}
_TRIES: Sequence[Sequence[str]] = (
    ("temperature", "stream_options", "ignore_eos"),
    ("temperature", "stream_options"),
    ("temperature",),
    (),
)
"""Optional fields, in the order in which they are dropped for a server that refuses them."""

_PROBE_PROMPT = "1 2 3 4"
_MESSAGE_BYTES = 4096  # of a refusal
_ADDED_TOKENS = 2**16  # most tokens that a server's template may add to a prompt
_BYTES_A_TOKEN, _EVENTS_A_TOKEN = 2**14, 4
"""Limits of a stream, beside a constant: far above any that carries tokens."""


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
        text: the whole text, with reasoning and calls of tools.
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

    def take(self, piece: Completion, now: float) -> None:
        """Add what arrived at ``now``."""
        if piece.error is not None:
            self.error = piece.error
            return
        if piece.generated:
            self.chunks.append(now)
            self.text += piece.text + piece.reasoning
        self.finish_reason = piece.finish_reason or self.finish_reason
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


class Client(ServerConnection):
    """Sends timed requests to one model of a server. An async context manager; call :meth:`settle` first.

    Args:
        server: which, and its limits; nothing is repeated.
        model: its name on the server; None for the server's only model.
        chat: ``/v1/chat/completions`` instead of ``/v1/completions``.
        extra: fields for every request, which override the others.

    Attributes:
        model: after :meth:`settle`.
        refused_fields: optional fields that the server does not take.
    """

    def __init__(
        self, server: Server, *, model: str | None = None, chat: bool = False, extra: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(server)
        self.model = Model(model or "")
        self.chat = chat
        self.refused_fields: tuple[str, ...] = ()
        self._path = "/chat/completions" if chat else "/completions"
        self._fields: dict[str, Any] = dict(_OPTIONAL)
        self._extra = dict(extra or {})

    async def settle(self) -> None:
        """Determine the model and the optional fields that the server accepts; drop :attr:`refused_fields`.

        Raises:
            ServerError: if the server cannot be reached or does not answer a plain request.
        """
        self.model = await self.find_model(self.model.name or None)
        answer = await self._try(_TRIES[0])
        for names in _TRIES[1:]:
            if answer.status in (400, 422):
                answer = await self._try(names)
        if answer.error in (None, NO_TOKEN):
            return
        raise ServerError(
            self.server.base_url + self._path,
            expected="an answer",
            got=answer.error,
            hint={
                401: "--api-key",
                403: "--api-key",
                404: "--model, or --chat for a server without /v1/completions",
            }.get(answer.status),
        )

    async def _try(self, names: Sequence[str]) -> TimedAnswer:
        self._fields = {name: _OPTIONAL[name] for name in names}
        self.refused_fields = tuple(name for name in _OPTIONAL if name not in names)
        return await self.ask(self.prepare(_PROBE_PROMPT, 4))

    def prepare(self, prompt: str, tokens: int, *, stream: bool = True) -> Request:
        """Return a request for ``tokens`` tokens, created before timing starts."""
        text: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        fields = {name: value for name, value in self._fields.items() if stream or name != "stream_options"}
        body = {"model": self.model.name, **text, "max_tokens": tokens, "stream": stream, **fields, **self._extra}
        limits = [body.get(name) for name in ("max_tokens", "max_completion_tokens")]
        most = max([limit for limit in limits if isinstance(limit, int)], default=tokens)
        answers = body["n"] if isinstance(body.get("n"), int) else 1
        return Request(json.dumps(body).encode(), most * answers)

    async def ask(self, request: Request) -> TimedAnswer:
        """Send a request and return its answer, also if it fails."""
        import anyio
        import httpx

        answer, limits = TimedAnswer(sent=time.perf_counter()), self.server
        with anyio.move_on_after(limits.timeout_s) as whole, anyio.move_on_after(limits.silence_s) as quiet:
            try:
                await self._exchange(request, answer, quiet)
            except (httpx.HTTPError, OSError) as error:
                answer.error = answer.error or one_line(str(error) or type(error).__name__, 500)
            except ValueError as error:
                answer.error = one_line(f"invalid response: {error}", 500)
        if whole.cancelled_caught:
            answer.error = f"timeout: not complete after {limits.timeout_s:g} s"
        elif quiet.cancelled_caught:
            answer.error = f"timeout: no event for {limits.silence_s:g} s"
        answer.finish(request)
        return answer

    async def _exchange(self, request: Request, answer: TimedAnswer, quiet: Any) -> None:
        url, most = self.server.base_url + self._path, MAX_BYTES + _BYTES_A_TOKEN * request.tokens
        async with self.send("POST", url, request.body, most) as response:
            answer.status = response.status_code
            if response.status_code == 200 and response.headers.get("content-type", "").startswith("text/event-stream"):
                answer.streamed = True
                await self._read_stream(response, request, answer, quiet)
                return
            if answer.status == 200:
                answer.take(read_completion(await response.aread()), time.perf_counter())
                return
            body = b""
            async for part in response.aiter_raw():
                if len(body := body + part) > _MESSAGE_BYTES:
                    break
            answer.error = Reply(answer.status, dict(response.headers), body[:_MESSAGE_BYTES], None, 0, 0).reason()

    async def _read_stream(self, response: httpx.Response, request: Request, answer: TimedAnswer, quiet: Any) -> None:
        import anyio
        from httpx_sse import EventSource

        done, events = False, 0
        async for event in EventSource(response).aiter_sse():
            now = time.perf_counter()
            quiet.deadline = anyio.current_time() + self.server.silence_s
            events += 1
            if events > 1000 + _EVENTS_A_TOKEN * request.tokens:
                raise ValueError(f"{events} events for {request.tokens} tokens")
            if event.data.strip() == "[DONE]":
                done = True
            elif event.data.strip():
                answer.take(read_completion(event.data), now)
            if answer.error:
                return
        if not done and answer.finish_reason is None:
            answer.error = "the stream broke off"

    async def count(self, prompt: str) -> int:
        """Return the server's count of a prompt's tokens, from a request for one token.

        Raises:
            ServerError: if it refuses the prompt or does not count.
        """
        answer = await self.ask(self.prepare(prompt, 1, stream=False))
        if answer.error not in (None, NO_TOKEN) or answer.prompt_tokens is None:
            failed = answer.error if answer.error != NO_TOKEN else None
            raise ServerError(
                self.server.base_url + self._path,
                expected="a prompt's tokens counted in usage.prompt_tokens",
                got=failed or answer.wrong_counts or "no usage",
                hint=None if failed else "name the model's tokenizer with --tokenizer",
            )
        return answer.prompt_tokens
