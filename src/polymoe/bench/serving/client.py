"""One streamed request to a server, with the times at which its pieces arrive.

Requests are httpx's, events httpx-sse's; aiohttp carries them, because httpx's own transport needs three times its
processor time, which is missing where hundreds of streams are timed. A request that fails does not raise: refused,
broken or silent, it is a :class:`TimedAnswer` with an error.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from polymoe.common.install_command import packages_of
from polymoe.common.json_input import parse_json
from polymoe.errors import ArgumentError, ServerError, nearest

NO_TOKEN = "an answer without a token"
_NO_USAGE = "no usage in the stream, although stream_options.include_usage was sent"
_IDLE_S = 2.0  # below the limit of servers (5 s in uvicorn), since the side that closes second sees a broken connection
_HINTS = {401: "--api-key", 403: "--api-key", 404: "--model, or --chat for a server without /v1/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server.

    Attributes:
        url: its address; without a path, ``/v1`` is added.
        api_key: the bearer token.
        timeout_s: its longest silence, in seconds.

    Raises:
        ArgumentError: for an address or a key that no request can have.
    """

    url: str
    api_key: str = field(default="none", repr=False)
    timeout_s: float = 600.0

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
    def host(self) -> str:
        """Its name or address, without port."""
        return urlsplit(self.url).hostname or ""


@dataclass(slots=True)
class TimedAnswer:
    """The response to one request. Times are those of :func:`time.perf_counter`, in seconds.

    Attributes:
        sent: when the request was sent.
        chunks: arrival time of each piece of the stream that has a token.
        ended: when the answer was complete or had failed.
        prompt_tokens, completion_tokens: as counted by the server.
        cached_tokens: of the prompt, in the server's prefix cache; None if it does not say.
        finish_reason: from the server.
        status: HTTP status; 0 if there was none.
        error: why the answer is not complete, or None.
    """

    sent: float
    ended: float = 0.0
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: str | None = None
    status: int = 0
    error: str | None = None

    @property
    def refused(self) -> bool:
        """Whether the server refused it for lack of room: HTTP 429."""
        return self.status == 429

    def take(self, event: Any, now: float) -> None:
        """Add an event that arrived at ``now``.

        Raises:
            AttributeError, KeyError, TypeError: if it is none of the API.
        """
        if event.get("error"):
            self.error = _message(event)
            return
        choices = event.get("choices") or ()
        if any(map(_has_token, choices)):
            self.chunks.append(now)
        for choice in choices:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if usage := event.get("usage"):
            self.prompt_tokens, self.completion_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def finish(self) -> None:
        """Note the end, and whether a complete answer has a token and its counts."""
        self.ended = time.perf_counter()
        if self.error is not None:
            return
        if not self.chunks and self.completion_tokens:
            self.chunks.append(self.ended)  # tokens without text, such as an end token
        elif not self.chunks:
            self.error = NO_TOKEN
        elif not self.completion_tokens:
            self.error = _NO_USAGE


def _has_token(choice: Mapping[str, Any]) -> bool:
    """Whether a piece stands for a token: in ``/v1/completions`` also one without text, which vLLM sends for half a
    character. In a chat such a piece only names the role."""
    said = choice.get("delta")
    if said is None:
        return bool(choice["text"]) or not choice.get("finish_reason")
    return any(said.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


class Client:
    """Sends timed requests to one model of a server. An async context manager; call :meth:`settle` first.

    Args:
        server: which.
        model: its name on the server; None for the server's only model.
        chat: ``/v1/chat/completions`` instead of ``/v1/completions``.
        extra: fields for every request, which override the others.

    Attributes:
        model: after :meth:`settle`.
        owner: of the model, as the server says.
        max_tokens: its context length (``max_model_len``), or None if the server does not say.
        ignores_eos: whether the server takes ``ignore_eos``, as vLLM and SGLang, and generates all requested tokens.

    Raises:
        MissingDependency: without httpx, httpx-sse, httpx-aiohttp and what they need.
    """

    def __init__(
        self, server: Server, *, model: str | None = None, chat: bool = False, extra: Mapping[str, Any] | None = None
    ) -> None:
        self.server, self.model, self.chat = server, model or "", chat
        self.owner, self.max_tokens, self.ignores_eos = "", None, True
        self._path, self._extra = "/chat/completions" if chat else "/completions", dict(extra or {})
        with packages_of("bench", "requests to a server"):
            import httpx
            from httpx_aiohttp import AiohttpTransport

        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {server.api_key}"},
            timeout=httpx.Timeout(server.timeout_s, connect=min(10.0, server.timeout_s), pool=None),
            transport=AiohttpTransport(limits=httpx.Limits(max_connections=0, keepalive_expiry=_IDLE_S)),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def settle(self) -> None:
        """Determine the model, and whether the server takes ``ignore_eos``.

        Raises:
            ServerError: if the server cannot be reached or does not answer a plain request.
        """
        await self._find_model()
        answer = await self.ask(self.prepare("1 2 3 4", 4))
        if answer.status in (400, 422):
            self.ignores_eos = False
            answer = await self.ask(self.prepare("1 2 3 4", 4))
        if answer.error not in (None, NO_TOKEN):
            raise self._failed("an answer", answer.error or "", answer.status)

    async def _find_model(self) -> None:
        import httpx

        try:
            response = await self._http.get(f"{self.server.base_url}/models")
        except (httpx.HTTPError, OSError) as error:
            hint = "`polymoe serve MODEL` starts a server, --server names another"
            got = str(error) or type(error).__name__
            raise ServerError(self.server.base_url, expected="a server that answers", got=got, hint=hint) from error
        if response.status_code == 404 and self.model:  # the server does not list its models
            return
        expected = "a list of models at /models"
        if response.status_code != 200:
            raise self._failed(expected, _reason(response.status_code, response.text), response.status_code)
        try:
            known = {model["id"]: model for model in parse_json(response.text)["data"]}
        except (ValueError, KeyError, TypeError) as error:
            hint = "is this the server's URL?"
            raise ServerError(self.server.base_url, expected=expected, got=response.text[:80], hint=hint) from error
        if not self.model and len(known) != 1:
            got = ", ".join(sorted(known)) or "none"
            raise ServerError(self.server.base_url, expected="one model", got=got, hint="choose one with --model")
        self.model = self.model or next(iter(known))
        if self.model not in known:
            got, hint = repr(self.model), nearest(self.model, known)
            raise ServerError(self.server.base_url, expected="one of its models", got=got, hint=hint)
        self.owner, self.max_tokens = known[self.model].get("owned_by") or "", known[self.model].get("max_model_len")

    def prepare(self, prompt: str, tokens: int) -> bytes:
        """Return the body of a request for ``tokens`` tokens, created before timing starts."""
        text: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        fields = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        if self.ignores_eos:
            fields["ignore_eos"] = True
        return json.dumps({"model": self.model, **text, "max_tokens": tokens, **fields, **self._extra}).encode()

    async def ask(self, body: bytes) -> TimedAnswer:
        """Send a request and return its answer, also if it fails."""
        import aiohttp
        import httpx

        answer = TimedAnswer(sent=time.perf_counter())
        try:
            await self._exchange(body, answer)
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:  # the transport does not translate all
            answer.error = str(error) or type(error).__name__
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            answer.error = f"invalid response: {error!r}"
        answer.finish()
        return answer

    async def _exchange(self, body: bytes, answer: TimedAnswer) -> None:
        from httpx_sse import EventSource

        url, headers = self.server.base_url + self._path, {"content-type": "application/json"}
        async with self._http.stream("POST", url, content=body, headers=headers) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                answer.error = _reason(response.status_code, (await response.aread()).decode(errors="replace"))
                return
            done = False
            async for event in EventSource(response).aiter_sse():
                now = time.perf_counter()
                if event.data.strip() == "[DONE]":
                    done = True
                elif event.data.strip():
                    answer.take(parse_json(event.data), now)
                if answer.error:
                    return
            if not done and answer.finish_reason is None:
                answer.error = "the stream broke off"

    async def count(self, prompt: str) -> int:
        """Return the server's count of a prompt's tokens, from a request for one token.

        Raises:
            ServerError: if it refuses the prompt or does not count.
        """
        answer = await self.ask(self.prepare(prompt, 1))
        if answer.error not in (None, NO_TOKEN) or not answer.prompt_tokens:
            raise self._failed("a prompt's tokens counted in usage.prompt_tokens", answer.error or _NO_USAGE)
        return answer.prompt_tokens

    def _failed(self, expected: str, got: str, status: int = 0) -> ServerError:
        return ServerError(self.server.base_url + self._path, expected=expected, got=got, hint=_HINTS.get(status))


def _reason(status: int, body: str) -> str:
    """The status with the server's message, in any of the usual forms of an error, else with the body itself."""
    try:
        found = parse_json(body)
    except ValueError:
        found = None
    return f"HTTP {status}: {_message(found) if isinstance(found, dict) else body[:500]}"


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error") or body.get("detail") or body.get("message")
    if isinstance(error, dict):
        return _message(error) if "error" in error else str(error.get("message", error))
    return str(error)[:500]
