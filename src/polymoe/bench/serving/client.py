"""Client of an OpenAI-compatible server: sends one streamed request and records when each piece arrives.

A request that fails does not raise: refused, broken or silent, it is a :class:`TimedAnswer` with an error.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from polymoe.bench.serving.answers import NO_TOKEN, Request, TimedAnswer, read_event
from polymoe.bench.serving.events import EventReader
from polymoe.common.json_input import parse_json
from polymoe.common.server_replies import MAX_BYTES, error_message, one_line
from polymoe.errors import ArgumentError, ServerError

__all__ = ["Client"]

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
_BYTES_A_TOKEN, _EVENTS_A_TOKEN = 2**14, 4
"""Limits of a stream, beside a constant: far above any that carries tokens."""
_IDLE_S = 2.0  # below the limit of servers (5 s in uvicorn), since the side that closes second sees a broken connection


class Client:
    """Sends requests to one model of a server. An async context manager; call :meth:`settle` first.

    Args:
        url: the server, with or without ``/v1``.
        model: its name on the server; None to ask the server.
        api_key: sent as a bearer token.
        chat: ``/v1/chat/completions`` instead of ``/v1/completions``.
        extra: fields for every request, which override the others.
        timeout_s: how long a server may be silent; comments in a stream are silence.
        request_timeout_s: longest duration of a request in all, however steadily its answer arrives.

    Raises:
        ArgumentError: for an invalid URL.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        chat: bool = False,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        request_timeout_s: float = 3600.0,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ArgumentError("server", expected="a URL such as http://127.0.0.1:8000", got=repr(url))
        if not (api_key or "").isascii() or not (api_key or "").isprintable():
            raise ArgumentError("api_key", expected="printable ASCII characters", got="others")
        self.model = model or ""
        self.owner = ""
        self.chat = chat
        self.refused_fields: tuple[str, ...] = ()
        self._path = "/v1/chat/completions" if chat else "/v1/completions"
        self._fields: dict[str, Any] = dict(_OPTIONAL)
        self._extra = dict(extra or {})
        # Encoded bodies are read as they are, since a few bytes may decode to gigabytes.
        self._headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
        self._timeout_s = timeout_s
        self._request_timeout_s = request_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            # As many connections as requests, so that requests wait in the server.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(
                total=self._request_timeout_s, sock_connect=self._timeout_s, sock_read=self._timeout_s
            ),
            headers=self._headers,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def host(self) -> str:
        """The server's name or address, without port."""
        return urlsplit(self.url).hostname or ""

    async def settle(self) -> None:
        """Determine the model's name and the optional fields that the server accepts; drop :attr:`refused_fields`.

        Raises:
            ServerError: if the server cannot be reached or does not answer a plain request.
        """
        await self._name_model()
        answer = await self._try(_TRIES[0])
        for names in _TRIES[1:]:
            if answer.status in (400, 422):
                answer = await self._try(names)
        if answer.error in (None, NO_TOKEN):
            return
        raise ServerError(
            self.url + self._path,
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
        return await self.ask(self.request(_PROBE_PROMPT, 4))

    async def _name_model(self) -> None:
        status, body = await self.get("/v1/models")
        try:
            models = [m for m in parse_json(body)["data"] if isinstance(m["id"], str) and m["id"].isprintable()]
        except (ValueError, KeyError, TypeError):
            models = []
        known = {m["id"]: m for m in models}
        if not self.model:
            if len(known) != 1:
                raise ServerError(
                    f"{self.url}/v1/models",
                    expected="one model",
                    got=", ".join(known) or f"HTTP {status}: {one_line(body, 200)}",
                    hint="--api-key" if status in (401, 403) else "choose one with --model",
                )
            self.model = next(iter(known))
        self.owner = one_line(str(known.get(self.model, {}).get("owned_by") or ""))

    def request(self, prompt: str, tokens: int, *, stream: bool = True) -> Request:
        """Return a request for ``tokens`` tokens, created before timing starts."""
        text: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        fields = {name: value for name, value in self._fields.items() if stream or name != "stream_options"}
        body = {"model": self.model, **text, "max_tokens": tokens, "stream": stream, **fields, **self._extra}
        limits = [body.get(name) for name in ("max_tokens", "max_completion_tokens")]
        most = max([limit for limit in limits if isinstance(limit, int)], default=tokens)
        answers = body["n"] if isinstance(body.get("n"), int) else 1
        return Request(json.dumps(body).encode(), most * answers)

    async def ask(self, request: Request) -> TimedAnswer:
        """Send a request and return its answer, also if it fails."""
        answer = TimedAnswer(sent=time.perf_counter())
        try:
            await self._exchange(request, answer)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            if not answer.error:
                whole = isinstance(error, asyncio.TimeoutError) and not str(error)  # of the request
                what = f"not complete after {self._request_timeout_s:g} s" if whole else str(error)
                answer.error = one_line(f"{type(error).__name__}: {what}".removesuffix(": "), 500)
        except ValueError as error:
            answer.error = one_line(f"invalid response: {error}", 500)
        answer.finish(request)
        return answer

    async def _exchange(self, request: Request, answer: TimedAnswer) -> None:
        assert self._session is not None, "used outside of its context"
        headers = {"Content-Type": "application/json"}
        async with self._session.post(
            self.url + self._path, data=request.body, headers=headers, allow_redirects=False
        ) as response:
            answer.status = response.status
            if response.status != 200:
                answer.error = await _refusal(response)
            elif response.content_type == "text/event-stream":
                answer.streamed = True
                await self._read_stream(response, request, answer)
            else:
                whole = read_event(await _body(response))
                answer.take(whole, time.perf_counter())

    async def _read_stream(self, response: aiohttp.ClientResponse, request: Request, answer: TimedAnswer) -> None:
        reader, done = EventReader(), False
        size, events, heard = 0, 0, time.perf_counter()
        async for part in response.content.iter_any():
            now = time.perf_counter()
            size += len(part)
            for payload in reader.feed(part):
                events, heard = events + 1, now
                done |= _take(payload, answer, now)
                if answer.error:
                    return
            if now - heard > self._timeout_s:
                raise asyncio.TimeoutError(f"no event for {self._timeout_s:g} s")
            if size > MAX_BYTES + _BYTES_A_TOKEN * request.tokens or events > 1000 + _EVENTS_A_TOKEN * request.tokens:
                raise ValueError(f"{events} events and {size} bytes for {request.tokens} tokens")
        for payload in reader.end():
            done |= _take(payload, answer, time.perf_counter())
        if not done and answer.finish_reason is None and not answer.error:
            answer.error = "the stream broke off"

    async def count(self, prompt: str) -> int:
        """Return the server's count of a prompt's tokens, from a request for one token.

        Raises:
            ServerError: if it refuses the prompt or does not count.
        """
        answer = await self.ask(self.request(prompt, 1, stream=False))
        if answer.error not in (None, NO_TOKEN) or answer.prompt_tokens is None:
            failed = answer.error if answer.error != NO_TOKEN else None
            raise ServerError(
                self.url + self._path,
                expected="a prompt's tokens counted in usage.prompt_tokens",
                got=failed or answer.wrong_counts or "no usage",
                hint=None if failed else "name the model's tokenizer with --tokenizer",
            )
        return answer.prompt_tokens

    async def get(self, path: str) -> tuple[int, str]:
        """Request another path and return status and body.

        Raises:
            ServerError: if the server cannot be reached.
        """
        return await self._other("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
        """Like :meth:`get`, with a JSON body."""
        return await self._other("POST", path, body)

    async def _other(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, str]:
        assert self._session is not None, "used outside of its context"
        try:
            async with self._session.request(method, self.url + path, json=body, allow_redirects=False) as response:
                return response.status, (await _body(response)).decode(errors="replace")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            got = one_line(f"{type(error).__name__}: {error}".removesuffix(": "), 500)
            raise ServerError(self.url, expected="a server", got=got) from error


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of a response.

    Raises:
        ValueError: if it is larger than ``MAX_BYTES``.
    """
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
    return bytes(body)


async def _refusal(response: aiohttp.ClientResponse) -> str:
    """Return status and message of a response without an answer. Redirects are not followed."""
    if 300 <= response.status < 400:
        return f"HTTP {response.status}: a redirect to {one_line(response.headers.get('Location', ''), 200)!r}"
    body = await response.content.read(4096)
    return f"HTTP {response.status}: {error_message(body.decode(errors='replace'))}"


def _take(payload: bytes, answer: TimedAnswer, now: float) -> bool:
    """Add an event to the answer; returns whether it is the last one."""
    if payload.strip() == b"[DONE]":
        return True
    if payload.strip():
        answer.take(read_event(payload), now)
    return False
