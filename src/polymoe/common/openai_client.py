"""Client of OpenAI-compatible servers, for benchmarks and evaluation. The server may send anything.

Requests are httpx's, events httpx-sse's; aiohttp carries them, because httpx's own transport needs three times its
processor time, which is missing where hundreds of streams are timed.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from polymoe.common.install_command import packages_of
from polymoe.common.json_input import parse_json
from polymoe.errors import ArgumentError, ServerError, nearest

if TYPE_CHECKING:
    import httpx

__all__ = [
    "MAX_BYTES", "Completion", "Model", "Reply", "Server", "ServerConnection", "all_results", "error_message",
    "one_line", "read_completion", "token_count",
]  # fmt: skip

_T = TypeVar("_T")
_Own = TypeVar("_Own", bound="ServerConnection")

MAX_BYTES = 32 * 2**20
"""Largest reply that is read. A million tokens with their probabilities are smaller."""
MAX_TOKENS = 10**9
"""No count of tokens in one reply is larger."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 8.0
"""Wait before the first repetition of a request; each further wait is twice as long, up to the longest."""
_LONGEST_RETRY_AFTER_S = 60.0
_IDLE_S = 2.0  # below the limit of servers (5 s in uvicorn), since the side that closes second sees a broken connection
_WRONG_URL = "is this the server's URL?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server, and the limits of requests to it.

    Attributes:
        url: its address; without a path, ``/v1`` is added.
        api_key: the bearer token.
        concurrency: number of simultaneous requests, for those who send several.
        timeout_s: longest duration of a request in all, in seconds, however steadily its reply arrives.
        silence_s: longest time without an event of a stream, in seconds; comments are silence.
        retries: how often a request is repeated after 408, 409, 429, 5xx, a timeout or a broken connection.

    Raises:
        ArgumentError: for an address or a key that no request can have.
    """

    url: str
    api_key: str = field(default="none", repr=False)
    concurrency: int = 16
    timeout_s: float = 1800.0
    silence_s: float = 600.0
    retries: int = 8

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            raise ArgumentError("server", expected="a URL such as http://127.0.0.1:8000", got=repr(self.url))
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ArgumentError("api_key", expected="printable ASCII characters", got="others")

    @property
    def base_url(self) -> str:
        """The address to which paths such as ``/chat/completions`` are added."""
        return self.url.rstrip("/") + ("" if urlsplit(self.url).path.strip("/") else "/v1")

    @property
    def root(self) -> str:
        """The address without the API's ``/v1``, for records."""
        return self.base_url.removesuffix("/v1")

    @property
    def host(self) -> str:
        """Its name or address, without port."""
        return urlsplit(self.url).hostname or ""

    def model(self, name: str | None) -> Model:
        """Return the model to ask: ``name``, if the server has it; without a name, its only model.

        Raises:
            ServerError: if the server cannot be reached, refuses the key, lacks the model, or has several without a
                name.
        """

        async def ask() -> Model:
            async with ServerConnection(self) as connection:
                return await connection.find_model(name)

        return asyncio.run(ask())

    def refused(self, reply: Reply, before: str = "") -> ServerError:
        """Return the error for a reply with an error status."""
        hint = "--api-key, or POLYMOE_API_KEY" if reply.status in (401, 403) else _WRONG_URL if reply.redirect else None
        return ServerError(self.base_url, expected="answers", got=before + reply.reason(), hint=hint)


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a server.

    Attributes:
        name: in requests.
        owner: as the server says, often the engine's name.
        max_tokens: prompt and answer together (``max_model_len``), or None if the server does not say.
    """

    name: str
    owner: str = ""
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server sent.

    Attributes:
        status: the HTTP status.
        headers: with names in lower case.
        body: its bytes, at most ``MAX_BYTES``.
        fault: why the body is not complete, or None.
        latency_us: from sending the request to the end of the reply, without earlier repetitions.
        retries: failed requests before it.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    fault: str | None
    latency_us: int
    retries: int

    @property
    def redirect(self) -> bool:
        """Whether the server names another address, which is not asked: it would get the question and the key."""
        return 300 <= self.status < 400

    def whole(self) -> bytes:
        """Return the body.

        Raises:
            ValueError: if it is not complete.
        """
        if self.fault is not None:
            raise ValueError(self.fault)
        return self.body

    def reason(self) -> str:
        """Return the status with the server's message, in one line."""
        if self.redirect:
            return f"HTTP {self.status}: a redirect to {one_line(self.headers.get('location', ''), 200)!r}"
        return f"HTTP {self.status}: {error_message(self.body.decode(errors='replace'))}"


class ServerConnection:
    """Connections to a server, as many as there are requests at once. An async context manager.

    Raises:
        MissingDependency: without httpx, httpx-sse, httpx-aiohttp and what they need.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        with packages_of("bench", "requests to a server"):
            import httpx
            from httpx_aiohttp import AiohttpTransport

        self._http = httpx.AsyncClient(
            # Encoded bodies are read as they are, since a few bytes may decode to gigabytes.
            headers={"authorization": f"Bearer {server.api_key}", "accept-encoding": "identity"},
            timeout=httpx.Timeout(None, connect=min(10.0, server.timeout_s)),
            transport=AiohttpTransport(limits=httpx.Limits(max_connections=0, keepalive_expiry=_IDLE_S)),
        )

    async def __aenter__(self: _Own) -> _Own:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    @asynccontextmanager
    async def send(
        self, method: str, url: str, content: bytes | None = None, max_bytes: int = MAX_BYTES
    ) -> AsyncIterator[httpx.Response]:
        """Send one request; the response's body is not read yet, and raises a ValueError where it is too large.

        Raises:
            HTTPError: of httpx, if there is no response.
        """
        import aiohttp
        import httpx

        headers = {} if content is None else {"content-type": "application/json"}
        try:
            async with self._http.stream(method, url, content=content, headers=headers) as response:
                response.headers.pop("content-encoding", None)
                response.encoding = "utf-8"
                response.stream = _limited(response.stream, max_bytes)
                yield response
        except aiohttp.ClientError as error:  # those that the transport does not translate
            raise httpx.RemoteProtocolError(str(error)) from error

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Reply:
        """Send a request, with a JSON body or none, until it has a reply other than 408, 409, 429 and 5xx, or as often
        as the server's limits allow, and return the last reply.

        Args:
            method: of HTTP.
            path: added to the server's ``base_url``.
            body: of the request.

        Raises:
            ServerError: if there is none.
        """
        import httpx

        retries, wait_s, url = 0, FIRST_WAIT_S, self.server.base_url + path
        while True:
            after_s = None
            try:
                reply = await self._once(method, url, body, retries)
            except (httpx.HTTPError, TimeoutError) as error:
                if retries == self.server.retries:
                    unreachable = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
                    hint = "`polymoe serve MODEL` starts a server, --server names another"
                    raise ServerError(
                        self.server.base_url,
                        expected="a server that answers",
                        got=one_line(str(error) or type(error).__name__, 500),
                        hint=hint if unreachable else None,
                    ) from error
            else:
                passing = reply.status in (408, 409, 429) or reply.status >= 500
                if not passing or retries == self.server.retries:
                    return reply
                after_s = _retry_after_s(reply.headers.get("retry-after", ""))
            retries += 1
            await asyncio.sleep(random.uniform(0.75, 1) * wait_s if after_s is None else after_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _once(self, method: str, url: str, body: Mapping[str, Any] | None, retries: int) -> Reply:
        import anyio
        import httpx

        start, limit_s = time.monotonic(), self.server.timeout_s
        content = None if body is None else httpx.Request(method, url, json=body).content
        status, headers, read, fault = 0, {}, b"", None
        with anyio.move_on_after(limit_s) as scope:
            async with self.send(method, url, content) as response:
                status, headers = response.status_code, dict(response.headers)
                try:
                    read = await response.aread()
                except ValueError as error:
                    fault = str(error)
        if scope.cancelled_caught and not status:
            raise TimeoutError(f"no reply within {limit_s:g} s")
        if scope.cancelled_caught:
            fault = f"not complete after {limit_s:g} s"
        return Reply(status, headers, read, fault, round((time.monotonic() - start) * 1e6), retries)

    async def find_model(self, name: str | None) -> Model:
        """As :meth:`Server.model`."""
        reply = await self.request("GET", "/models")
        where = self.server.base_url
        if reply.status == 404:  # the server does not list its models
            if name is not None:
                return Model(name)
            raise ServerError(where, expected="a list of models at /models", got="HTTP 404", hint=_WRONG_URL)
        if reply.status != 200:
            raise self.server.refused(reply)
        try:
            listed = [
                m for m in parse_json(reply.whole())["data"] if isinstance(m["id"], str) and m["id"].isprintable()
            ]
        except (ValueError, KeyError, TypeError) as error:
            got = one_line(reply.body[:80].decode(errors="replace")) or "an empty reply"
            raise ServerError(where, expected="a list of models at /models", got=got, hint=_WRONG_URL) from error
        known = {m["id"]: m for m in listed}
        if name is None and len(known) != 1:
            got = ", ".join(sorted(known)) or "none"
            raise ServerError(where, expected="one model", got=got, hint="choose one with --model")
        chosen = next(iter(known)) if name is None else name
        if chosen not in known:
            raise ServerError(where, expected="one of its models", got=repr(chosen), hint=nearest(chosen, known))
        most = known[chosen].get("max_model_len")
        owner = one_line(str(known[chosen].get("owned_by") or ""))
        return Model(chosen, owner, most if type(most) is int and most > 0 else None)


async def all_results(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run all at once and return their results, in order; where one of them raises, the others end."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _limited(stream: Any, most: int) -> httpx.AsyncByteStream:
    import httpx

    class Limited(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for part in stream:
                size += len(part)
                if size > most:
                    raise ValueError(f"more than {most} bytes")
                yield part

        async def aclose(self) -> None:
            await stream.aclose()

    return Limited()


def _retry_after_s(text: str) -> float | None:
    """Return the seconds of a ``Retry-After`` header, which has a number or a date; None without one that is near."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, IndexError):
            return None
    return seconds if 0 < seconds <= _LONGEST_RETRY_AFTER_S else None


@dataclass(frozen=True, slots=True)
class Completion:
    """What a response says, or one event of a stream.

    Attributes:
        text: the answer's text, or a part of it.
        reasoning: reasoning, and arguments of tool calls: generated tokens beside the text.
        generated: whether an event stands for a token: also for pieces of ``/v1/completions`` without text, which vLLM
            sends for half a character. In a chat such a piece only names the role.
        finish_reason: the server's reason for the answer's end.
        usage: its counts of tokens, unchecked.
        answers: number of answers.
        error: the server's message instead of an answer.
    """

    text: str = ""
    reasoning: str = ""
    generated: bool = False
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    answers: int = 0
    error: str | None = None


def read_completion(payload: bytes | str) -> Completion:
    """Read a response of ``/v1/completions`` or ``/v1/chat/completions``, or one event of a stream.

    Raises:
        ValueError: if it is not JSON, no object, or fields have other types.
    """
    start = payload[:80]
    try:
        body = parse_json(payload)
    except ValueError as error:
        said = start if isinstance(start, str) else start.decode(errors="replace")
        raise ValueError(f"not JSON: {one_line(said)!r}: {error}") from None
    if isinstance(body, dict) and body.get("error"):
        return Completion(error=error_message(payload if isinstance(payload, str) else payload.decode()))
    text, reasoning, empty, finish_reason, answers = "", "", False, None, 0
    for choice in _field(body, "choices", list) or ():
        said = next((part for name in ("delta", "message") if (part := _field(choice, name, dict)) is not None), choice)
        answers += said is not choice or "text" in choice
        text += _field(said, "text", str) or _field(said, "content", str) or ""
        reasoning += _field(said, "reasoning_content", str) or _field(said, "reasoning", str) or ""
        for call in _field(said, "tool_calls", list) or ():
            reasoning += _field(_field(call, "function", dict) or {}, "arguments", str) or ""
        ended = _field(choice, "finish_reason", str)
        empty |= choice.get("text") == "" and not ended
        finish_reason = ended or finish_reason
    usage = _field(body, "usage", dict) or {}
    return Completion(text, reasoning, bool(text or reasoning) or empty, finish_reason, usage, answers)


def _field(value: Any, name: str, kind: type) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"no {name} in {one_line(repr(value))}")
    found = value.get(name)
    if found is None or isinstance(found, kind):
        return found
    raise ValueError(f"{name} is {one_line(repr(found))}")


def token_count(usage: Mapping[str, Any], name: str) -> int | None:
    """Return a count of ``usage``; None if the server does not count.

    Raises:
        ValueError: for anything but a whole number from 0 to :data:`MAX_TOKENS`.
    """
    value = usage.get(name)
    if value is not None and not (type(value) is int and 0 <= value <= MAX_TOKENS):  # a bool is not a count
        raise ValueError(f"usage.{name} is {one_line(repr(value))}")
    return value


def error_message(body: str) -> str:
    """Return the message in the body of an error, in any of the usual forms, else the body itself."""
    try:
        found = parse_json(body)
    except ValueError:
        found = None
    return one_line(_message(found) if isinstance(found, dict) else body, 500)


def one_line(text: str, length: int = 80) -> str:
    """Return the beginning of a server's text for a message: without line breaks and control sequences."""
    return "".join(c if c.isprintable() else " " for c in text[:length]).strip()


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error") or body.get("detail") or body.get("message")
    if isinstance(error, dict):
        return _message(error) if "error" in error else str(error.get("message", error))
    return str(error)
