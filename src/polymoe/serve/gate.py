"""Gate: checks the API key, size and number of requests before the application, and watches their connections."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from polymoe.serve.errors import error_body
from polymoe.serve.in_flight import IN_FLIGHT, InFlight
from polymoe.serve.metrics import ServerMetrics

__all__ = ["Gate"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

GENERATING = ("/v1/chat/completions", "/v1/completions")
COUNTED = (*GENERATING, "/v1/models", "/health", "/metrics")
BODY_S = 60.0
"""Seconds in which a client must send its whole request."""


class _Refused(Exception):
    """An error that the gate answers itself."""

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error", **headers: str) -> None:
        self.status, self.message, self.kind, self.headers = status, message, kind, headers


class _Left(Exception):
    """The client closed the connection before its request was complete."""


class Gate:
    """ASGI middleware: API key, size and number of requests, and clients that leave.

    A request is read as a whole before the application sees it. From then on the gate watches the connection, and
    calls :meth:`~polymoe.serve.in_flight.InFlight.leave` when the client closes it.

    Args:
        app: the application.
        metrics: counts requests, and knows those in flight.
        api_key: the bearer token that everything but ``/health`` needs; None if nothing does.
        max_request_bytes: maximum size of a request's body.
        max_concurrent_requests: maximum number of generations that run or wait.
    """

    def __init__(
        self,
        app: Any,
        *,
        metrics: ServerMetrics,
        api_key: str | None,
        max_request_bytes: int,
        max_concurrent_requests: int = 128,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._key = None if api_key is None else _digest(api_key.encode())
        self._bytes, self._requests = max_request_bytes, max_concurrent_requests
        self._closed = False
        self._cut = asyncio.Event()

    def close(self) -> None:
        """Answer 503 to every request from now on. Requests that were admitted before are not affected."""
        self._closed = True

    def cut(self) -> None:
        """Break off every answer at once, with an error; for a model that does not reach its next token."""
        self._cut.set()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, status, complete = InFlight(), 0, False

        async def watched_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                complete = not request.gone.is_set()  # an answer that nobody reads is not complete
            await send(message)

        try:
            await self._handle(request, scope, receive, watched_send)
        except _Refused as refused:
            await (_end_stream if status else _answer)(watched_send, refused)
        except _Left:
            pass
        finally:
            # Also if the server broke the answer off: nobody would read what is still generated.
            request.leave()
            path = scope["path"] if scope["path"] in COUNTED else "other"
            self._metrics.answered(request, path, status if complete else 499)

    async def _handle(self, request: InFlight, scope: Message, receive: Receive, send: Send) -> None:
        refused = self._refuses(scope)
        if refused is None and scope["path"] in GENERATING:
            self._metrics.in_flight.add(request)
        try:
            # Refused requests are read too: a client that is still writing would see a broken connection instead of
            # the answer.
            body = await asyncio.wait_for(self._read(receive, keep=refused is None), BODY_S)
        except asyncio.TimeoutError:
            raise _Refused(408, f"the request was not complete after {BODY_S:.0f} s", connection="close") from None
        if refused is not None:
            raise refused
        await self._pass_on(request, scope, body, receive, send)

    def _refuses(self, scope: Message) -> _Refused | None:
        if self._closed:
            return _Refused(503, "the server is stopping", kind="server_error", retry_after="5", connection="close")
        if not self._admits(scope):
            kind, scheme = "authentication_error", "Bearer"
            return _Refused(401, "missing or wrong API key", kind=kind, www_authenticate=scheme)
        if scope["path"] in GENERATING and len(self._metrics.in_flight) >= self._requests:
            message = f"{self._requests} requests are running or waiting; try again later"
            return _Refused(429, message, kind="rate_limit_error", retry_after="1")
        return None

    def _admits(self, scope: Message) -> bool:
        if self._key is None or scope["path"] == "/health":
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        # Digests have one length whatever the key's length, so the time of the comparison reveals nothing.
        return hmac.compare_digest(_digest(key.strip()), self._key) and scheme.lower() == b"bearer"

    async def _read(self, receive: Receive, *, keep: bool) -> bytes:
        """The body, or nothing unless ``keep``. A body that is too large is read as well, up to 16 times the limit."""
        parts: list[bytes] = []
        size = 0
        while size <= 16 * self._bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Left
            part = message.get("body", b"")
            size += len(part)
            if keep and size <= self._bytes:
                parts.append(part)
            if not message.get("more_body", False):
                break
        if keep and size > self._bytes:
            raise _Refused(413, f"a request may have at most {self._bytes} bytes")
        return b"".join(parts)

    async def _pass_on(self, request: InFlight, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        disconnected = asyncio.Event()
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            request.leave()
            disconnected.set()

        async def replay() -> Message:
            for message in messages:
                return message
            await disconnected.wait()
            return {"type": "http.disconnect"}

        token = IN_FLIGHT.set(request)
        app = asyncio.create_task(self._app(scope, replay, send))
        IN_FLIGHT.reset(token)
        watcher, cut = asyncio.create_task(watch()), asyncio.create_task(self._cut.wait())
        try:
            await asyncio.wait({app, cut}, return_when=asyncio.FIRST_COMPLETED)
            if not app.done():
                raise _Refused(503, "the server has stopped", kind="server_error", connection="close")
            app.result()
        finally:
            for task in (app, watcher, cut):
                task.cancel()
            await asyncio.gather(app, watcher, cut, return_exceptions=True)


async def _end_stream(send: Send, refused: _Refused) -> None:
    event = json.dumps(error_body(refused.message, kind=refused.kind))
    await send({"type": "http.response.body", "body": f"data: {event}\n\ndata: [DONE]\n\n".encode()})


async def _answer(send: Send, refused: _Refused) -> None:
    body = json.dumps(error_body(refused.message, kind=refused.kind)).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refused.headers}
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
