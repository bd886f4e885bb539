"""Client of an OpenAI-compatible server: sends one streamed request and records when each piece arrives.

A failed request does not raise: a refused, broken or silent request is an :class:`TimedAnswer` with an error.

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

from polymoe.bench.serving.answers import TimedAnswer, error_text, read_event
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
_IDLE_S = 2.0  # below the limit of servers (5 s in uvicorn), since the side that closes second sees a broken connection


class Client:
    """Sends requests to one model of a server. An async context manager; call :meth:`settle` first.

    Args:
        url: the server, with or without ``/v1``.
        model: its name on the server; None to ask the server.
        api_key: sent as a bearer token.
        chat: ``/v1/chat/completions`` instead of ``/v1/completions``.
        extra: fields for every request, which override the others.
        timeout_s: how long a server may be silent.

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
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ArgumentError("--server", expected="a URL such as http://127.0.0.1:8000", got=repr(url))
        self.model = model or ""
        self.owner = ""
        self.chat = chat
        self.refused_fields: tuple[str, ...] = ()
        self._path = "/v1/chat/completions" if chat else "/v1/completions"
        self._fields: dict[str, Any] = dict(_OPTIONAL)
        self._extra = dict(extra or {})
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            # As many connections as requests, so that requests wait in the server.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s, sock_read=self._timeout_s),
            headers=self._headers,
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
        if answer.error is None:
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
            models = [m for m in json.loads(body)["data"] if isinstance(m["id"], str)]
        except (ValueError, KeyError, TypeError):
            models = []
        known = {m["id"]: m for m in models}
        if not self.model:
            if len(known) != 1:
                raise ServerError(
                    f"{self.url}/v1/models",
                    expected="one model",
                    got=", ".join(known) or f"HTTP {status}: {body[:200]}",
                    hint="--api-key" if status in (401, 403) else "choose one with --model",
                )
            self.model = next(iter(known))
        self.owner = str(known.get(self.model, {}).get("owned_by") or "")

    def request(self, prompt: str, tokens: int, *, stream: bool = True) -> bytes:
        """Return the body of a request for ``tokens`` tokens, created before timing starts."""
        text: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        fields = {name: value for name, value in self._fields.items() if stream or name != "stream_options"}
        body = {"model": self.model, **text, "max_tokens": tokens, "stream": stream, **fields, **self._extra}
        return json.dumps(body).encode()

    async def ask(self, request: bytes) -> TimedAnswer:
        """Send a request and return its answer, also if it fails."""
        answer = TimedAnswer(sent=time.perf_counter())
        try:
            await self._exchange(request, answer)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            if not answer.error:
                answer.error = f"{type(error).__name__}: {error}".removesuffix(": ")
        except ValueError as error:
            answer.error = f"invalid response: {error}"
        answer.ended = time.perf_counter()
        if answer.error is None and not answer.chunks:
            answer.chunks.append(answer.ended)  # tokens without text, such as an end token
        return answer

    async def _exchange(self, request: bytes, answer: TimedAnswer) -> None:
        assert self._session is not None, "used outside of its context"
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self.url + self._path, data=request, headers=headers) as response:
            answer.status = response.status
            if response.status != 200:
                body = (await response.read())[:4096].decode(errors="replace")
                answer.error = f"HTTP {response.status}: {error_text(body)}"
            elif response.content_type == "text/event-stream":
                answer.streamed = True
                await self._read_stream(response, answer)
            else:
                whole = read_event(await response.read())
                answer.take(whole, time.perf_counter())

    async def _read_stream(self, response: aiohttp.ClientResponse, answer: TimedAnswer) -> None:
        rest, done = b"", False
        async for data in response.content.iter_any():
            now = time.perf_counter()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue  # blank lines and comments of the protocol
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    done = True
                elif payload:
                    answer.take(read_event(payload), now)
                if answer.error:
                    return
        if not done and answer.finish_reason is None:
            answer.error = "the stream broke off"

    async def count(self, prompt: str) -> int:
        """Return the server's count of a prompt's tokens, from a request for one token.

        Raises:
            ServerError: if it refuses the prompt or does not count.
        """
        answer = await self.ask(self.request(prompt, 1, stream=False))
        if answer.error is not None or answer.prompt_tokens is None:
            raise ServerError(
                self.url + self._path,
                expected="a prompt's tokens counted in usage.prompt_tokens",
                got=answer.error or "no usage",
                hint=None if answer.error else "name the model's tokenizer with --tokenizer",
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
            async with self._session.request(method, self.url + path, json=body) as response:
                return response.status, await response.text(errors="replace")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise ServerError(
                self.url, expected="a server", got=f"{type(error).__name__}: {error}".removesuffix(": ")
            ) from error
