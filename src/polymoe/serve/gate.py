"""Gate: checks the API key, size and number of requests before the application, and watches their connections."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from polymoe.serve.errors import error_body
from polymoe.serve.in_flight import IN_FLIGHT, InFlight
from polymoe.serve.metrics import ServerMetrics

__all__ = ["Gate", "cors"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

GENERATING = ("/v1/chat/completions", "/v1/completions")
OPEN = ("/health", "/docs", "/openapi.json")
"""What needs no key: it says nothing of the model, or of requests."""
COUNTED = (*GENERATING, "/v1/models", "/metrics", *OPEN)
BODY_S = 60.0
"""Seconds in which a client must send its whole request."""
BODIES = 16
"""All requests together may have this many times the maximum size of one."""


class _Refused(Exception):
    """An error that the gate answers itself."""

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error", **headers: str) -> None:
        super().__init__(status, message)
        self.status, self.message, self.kind, self.headers = status, message, kind, headers


class _Left(Exception):
    """The client closed the connection before its request was complete."""


@dataclass(slots=True, eq=False)
class _Body:
    """The body of a request, as far as it has arrived."""

    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    dropped: bool = False


class Gate:
    """ASGI middleware: API key, size and number of requests, and clients that leave.

    The key and the headers are checked before anything of a body is read. A request counts as running or waiting once
    its body is there. From then on the gate watches the connection, and calls
    :meth:`~polymoe.serve.in_flight.InFlight.leave` when the client closes it.

    Args:
        app: the application.
        metrics: counts requests, and knows those in flight.
        api_key: the bearer token that everything but ``/health`` and ``/docs`` needs; None if nothing does.
        max_request_bytes: maximum size of a request's body. All bodies in the server have at most 16 times this size;
            for more, incomplete ones are dropped, the oldest first.
        max_concurrent_requests: maximum number of generations that run or wait.
        on_answer: called for each request that has left, with its scope in ASGI and its status.
    """

    def __init__(
        self,
        app: Any,
        *,
        metrics: ServerMetrics,
        api_key: str | None,
        max_request_bytes: int,
        max_concurrent_requests: int = 128,
        on_answer: Callable[[InFlight, Message, int], None] = lambda *_: None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._key = None if api_key is None else _digest(api_key.encode())
        self._bytes, self._requests = max_request_bytes, max_concurrent_requests
        self._on_answer = on_answer
        self._held = 0  # bytes of all bodies
        self._incomplete: dict[_Body, None] = {}  # the oldest first
        self._closed = asyncio.Event()
        self._cut = asyncio.Event()

    def close(self) -> None:
        """Answer 503 to every request from now on, and to those that are incomplete. Others are not affected."""
        self._closed.set()

    def cut(self) -> None:
        """Break off every answer at once, with an error; for a model that does not reach its next token."""
        self._cut.set()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, body, status, complete = InFlight(), _Body(), 0, False

        async def watched_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                complete = not request.gone.is_set()  # an answer that nobody reads is not complete
            await send(message)

        try:
            await self._handle(request, body, scope, receive, watched_send)
        except _Refused as refused:
            await (_end_stream if status else _answer)(scope, watched_send, refused)
        except _Left:
            pass
        finally:
            self._forget(body)
            # Also if the server broke the answer off: nobody would read what is still generated.
            request.leave()
            path = scope["path"] if scope["path"] in COUNTED else "other"
            status = status if complete else 499
            self._metrics.answered(request, path, status)
            self._on_answer(request, scope, status)

    async def _handle(self, request: InFlight, body: _Body, scope: Message, receive: Receive, send: Send) -> None:
        self._check_key(scope)
        content = b""
        if scope["path"] in GENERATING and scope["method"] == "POST":
            self._check_headers(scope)
            self._check_number()
            content = await self._whole(body, receive)
            self._check_number()
            request.arrived_s = time.monotonic()
            self._metrics.in_flight.add(request)
        await self._pass_on(request, scope, content, receive, send)

    # --- Checks -----------------------------------------------------------------------------------------------------

    def _check_key(self, scope: Message) -> None:
        if self._closed.is_set():
            raise _stopping()
        if self._key is None or scope["path"] in OPEN:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # Digests have one length whatever the key's length, so the time of the comparison reveals nothing.
        if not hmac.compare_digest(_digest(key.strip(b" \t")), self._key) or scheme.lower() != b"bearer":
            raise _Refused(401, "missing or wrong API key", kind="authentication_error", www_authenticate="Bearer")

    def _check_headers(self, scope: Message) -> None:
        headers = dict(scope["headers"])
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise _Refused(415, "content-encoding must be omitted: requests are not decompressed")
        if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
            raise _Refused(415, "the body must be a JSON object with the content type application/json")
        if int(headers.get(b"content-length", b"0")) > self._bytes:  # h11 has checked that it is a number
            raise self._too_large()

    def _check_number(self) -> None:
        if len(self._metrics.in_flight) >= self._requests:
            raise _busy(f"{self._requests} requests are running or waiting; try again later")

    def _too_large(self) -> _Refused:
        return _Refused(413, f"a request may have at most {self._bytes} bytes")

    # --- Bodies -----------------------------------------------------------------------------------------------------

    async def _whole(self, body: _Body, receive: Receive) -> bytes:
        """The body, once it has arrived."""
        self._incomplete[body] = None
        reading = asyncio.ensure_future(self._read(body, receive))
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({reading, closed}, timeout=BODY_S, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            if closed.done():
                raise _stopping()
            raise _Refused(408, f"the request was not complete after {BODY_S:.0f} s", connection="close")
        finally:
            self._incomplete.pop(body, None)
            for task in (reading, closed):
                task.cancel()
            await asyncio.gather(reading, closed, return_exceptions=True)

    async def _read(self, body: _Body, receive: Receive) -> bytes:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Left
            part, more = message.get("body", b""), message.get("more_body", False)
            body.parts.append(part)
            body.size += len(part)
            self._held += len(part)
            while self._held > BODIES * self._bytes and self._incomplete:
                self._drop(next(iter(self._incomplete)))
            if body.dropped:
                raise _busy(f"more than {BODIES * self._bytes} bytes of requests are in the server; try again later")
            if body.size > self._bytes:
                raise self._too_large()
        return b"".join(body.parts)

    def _drop(self, body: _Body) -> None:
        self._incomplete.pop(body)
        self._forget(body)
        body.dropped = True

    def _forget(self, body: _Body) -> None:
        self._held -= body.size
        body.size = 0
        body.parts.clear()

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


def cors(gate: Gate, origins: Sequence[str]) -> Any:
    """The gate for web pages of these origins too; ``*`` is all. Their browsers ask for leave without a key."""
    if not origins:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


def _stopping() -> _Refused:
    return _Refused(503, "the server is stopping", kind="server_error", retry_after="5", connection="close")


def _busy(message: str) -> _Refused:
    return _Refused(429, message, kind="rate_limit_error", retry_after="1")


async def _end_stream(_: Message, send: Send, refused: _Refused) -> None:
    event = json.dumps(error_body(refused.message, kind=refused.kind))
    await send({"type": "http.response.body", "body": f"data: {event}\n\ndata: [DONE]\n\n".encode()})


async def _answer(scope: Message, send: Send, refused: _Refused) -> None:
    body = json.dumps(error_body(refused.message, kind=refused.kind)).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refused.headers}
    if any(name == b"expect" for name, _ in scope["headers"]):
        headers["connection"] = "close"  # the client may send the body all the same, or not
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
