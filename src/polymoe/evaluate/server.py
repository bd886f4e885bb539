"""The server that is asked: its address, its limits, and one request with its repetitions.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from polymoe.common.install_command import install_hint
from polymoe.common.json_input import parse_json
from polymoe.common.server_replies import MAX_BYTES, error_message, one_line
from polymoe.errors import ArgumentError, MissingDependency, ServerError, nearest

try:
    import httpx
except ImportError as error:
    raise MissingDependency("polymoe eval", got=str(error), hint=install_hint("eval")) from error

__all__ = ["Reply", "Server", "Session"]

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 8.0
"""Wait before the first repetition of a request; each further wait is twice as long, up to the longest."""
_LONGEST_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server to ask, and the limits of requests.

    Attributes:
        url: the server's address; without a path, ``/v1`` is added.
        api_key: the bearer token.
        concurrency: number of simultaneous requests.
        timeout_s: longest duration of a request in all, in seconds, however steadily its reply arrives.
        retries: how often a request is repeated after 408, 409, 429, 5xx, a timeout or a broken connection.

    Raises:
        ArgumentError: for an address or a key that no request can have.
    """

    url: str
    api_key: str = field(default="none", repr=False)
    concurrency: int = 16
    timeout_s: float = 1800.0
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

    def model(self, name: str | None) -> str:
        """Return the model to ask: ``name``, if the server has it; without a name, its only model.

        Raises:
            ServerError: if the server cannot be reached, refuses the key, lacks the model, or has several without a
                name.
        """
        names = asyncio.run(self._models())
        if names is None and name is not None:  # the server does not list its models
            return name
        if not names:
            got = "HTTP 404" if names is None else "none"
            raise ServerError(self.base_url, expected="a list of models at /models", got=got, hint=_WRONG_URL)
        if name is None and len(names) == 1:
            return names[0]
        if name not in names:
            raise ServerError(
                self.base_url,
                expected="one of its models" if name else "--model, because the server has several",
                got=repr(name) if name else "none",
                hint=nearest(name or "", names),
            )
        return name

    async def _models(self) -> list[str] | None:
        """Return the models' names; None for a server without a list."""
        limited = Server(url=self.url, api_key=self.api_key, timeout_s=min(30.0, self.timeout_s), retries=2)
        async with Session(limited) as session:
            reply = await session.request("GET", "/models")
        if reply.status == 404:
            return None
        if reply.status != 200:
            raise self.refused(reply)
        try:
            return [str(model["id"]) for model in parse_json(reply.whole())["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(
                self.base_url,
                expected="a list of models at /models",
                got=one_line(reply.body[:80].decode(errors="replace")) or "an empty reply",
                hint=_WRONG_URL,
            ) from error

    def refused(self, reply: Reply, before: str = "") -> ServerError:
        """Return the error for a reply with an error status."""
        hint = "--api-key, or POLYMOE_API_KEY" if reply.status == 401 else _WRONG_URL if reply.redirect else None
        return ServerError(self.base_url, expected="answers", got=before + reply.reason(), hint=hint)


_WRONG_URL = "is this the server's URL?"


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


class Session:
    """Connections to a server. An async context manager."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client = httpx.AsyncClient(
            # Encoded bodies are read as they are, since a few bytes may decode to gigabytes. A server that encodes a
            # body although no encoding is accepted sends nothing that can be parsed.
            headers={"authorization": f"Bearer {server.api_key}", "accept-encoding": "identity"},
            timeout=httpx.Timeout(None, connect=min(10.0, server.timeout_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=server.concurrency),
            follow_redirects=False,
        )

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Reply:
        """Send a request, with a JSON body or none, until it has a reply other than 408, 409, 429 and 5xx, or as often
        as the server's limits allow, and return the last reply.

        Raises:
            ServerError: if there is none.
        """
        retries, wait_s = 0, FIRST_WAIT_S
        while True:
            after_s = None
            try:
                reply = await self._once(method, path, body, retries)
            except (httpx.HTTPError, asyncio.TimeoutError) as error:
                if retries == self._server.retries:
                    got = f"no reply within {self._server.timeout_s:g} s" if not str(error) else str(error)
                    kind = "" if isinstance(error, asyncio.TimeoutError) else f"{type(error).__name__}: "
                    hint = "`polymoe serve MODEL` starts a server, --server names another"
                    raise ServerError(
                        self._server.base_url,
                        expected="answers",
                        got=kind + got,
                        hint=hint if isinstance(error, httpx.ConnectError) else None,
                    ) from error
            else:
                passing = reply.status in (408, 409, 429) or reply.status >= 500
                if not passing or retries == self._server.retries:
                    return reply
                after_s = _retry_after_s(reply.headers.get("retry-after", ""))
            retries += 1
            await asyncio.sleep(random.uniform(0.75, 1) * wait_s if after_s is None else after_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _once(self, method: str, path: str, body: Mapping[str, Any] | None, retries: int) -> Reply:
        start = time.monotonic()
        request = self._client.build_request(method, self._server.base_url + path, json=body)
        response = await asyncio.wait_for(self._client.send(request, stream=True), self._server.timeout_s)
        content, fault = bytearray(), None
        try:
            left_s = start + self._server.timeout_s - time.monotonic()
            await asyncio.wait_for(_read(response, content), max(0.0, left_s))
        except asyncio.TimeoutError:
            fault = f"not complete after {self._server.timeout_s:g} s"
        finally:
            await response.aclose()
        if len(content) > MAX_BYTES:
            fault = f"more than {MAX_BYTES} bytes"
        latency_us = round((time.monotonic() - start) * 1e6)
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Reply(response.status_code, headers, bytes(content[:MAX_BYTES]), fault, latency_us, retries)


async def _read(response: httpx.Response, content: bytearray) -> None:
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > MAX_BYTES:
            return


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
