"""Gate: checks the API key, size and number of requests before the application, and watches their connections."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import anyio
from fastapi import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from polymoe.serve.errors import client_left, cut_off, error_body, refusal
from polymoe.serve.in_flight import IN_FLIGHT, InFlight
from polymoe.serve.metrics import ServerMetrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

GENERATING = ("/v1/chat/completions", "/v1/completions")
OPEN = ("/health", "/docs", "/openapi.json")
"""What needs no key, with the files of ``/docs``: it says nothing of the model, or of requests."""
FILES = "/static-offline-docs/"
COUNTED = (*GENERATING, "/v1/models", "/metrics", *OPEN)
BODY_S = 60.0
"""Seconds in which a client must send its whole request."""
BODIES = 16
"""All requests together may have this many times the maximum size of one."""


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
        self._app, self._metrics, self._on_answer = app, metrics, on_answer
        self._key = None if api_key is None else _digest(api_key.encode())
        self._bytes, self._requests = max_request_bytes, max_concurrent_requests
        self._bodies: dict[InFlight, int] = {}  # bytes of each, complete or not
        self._incomplete: dict[InFlight, anyio.CancelScope] = {}  # the oldest first
        self._held = 0  # bytes of all bodies
        self._closed = False

    def close(self) -> None:
        """Answer 503 to every request from now on, and to those that are incomplete. Others are not affected."""
        self._closed = True
        for reading in self._incomplete.values():
            reading.cancel()

    def cut(self) -> None:
        """End every answer at once, with an error; for a model that does not reach its next token."""
        for request in list(self._metrics.in_flight):
            request.leave(cut_off())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, status, left, complete = InFlight(), 0, False, False

        async def watched_send(message: Message) -> None:
            nonlocal status, complete
            complete = message["type"] == "http.response.body" and not message.get("more_body") and not left
            status = message.get("status", status)
            await send(message)

        async def watch() -> None:
            nonlocal left
            while (await receive())["type"] != "http.disconnect":
                pass
            left = not complete
            request.leave(client_left())

        try:
            body = await self._admit(request, scope, receive)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                token = IN_FLIGHT.set(request)
                await self._app(scope, _replay(body), watched_send)
                IN_FLIGHT.reset(token)
                tasks.cancel_scope.cancel()
        except HTTPException as refused:
            if any(name == b"expect" for name, _ in scope["headers"]):  # the body may come all the same, or not
                refused.headers = {**(refused.headers or {}), "connection": "close"}
            answer = JSONResponse(refused.detail, refused.status_code, refused.headers)
            left |= refused.status_code == client_left().status_code
            await answer(scope, receive, watched_send)
        finally:
            self._forget(request)
            request.leave(client_left())  # also if the application failed: nobody would read what is still generated
            status = 499 if left or not complete else status
            path = scope["path"] if scope["path"] in COUNTED else "other"
            self._metrics.answered(request, path, status)
            self._on_answer(request, scope, status)

    async def _admit(self, request: InFlight, scope: Message, receive: Receive) -> bytes:
        """Check a request; its body, if it asks for an answer."""
        headers = dict(scope["headers"])
        if self._closed:
            raise _stopping()
        if self._key is not None and scope["path"] not in OPEN and not scope["path"].startswith(FILES):
            self._check_key([value for name, value in scope["headers"] if name == b"authorization"])
        if scope["path"] not in GENERATING or scope["method"] != "POST":
            return b""
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise refusal("content-encoding must be omitted: requests are not decompressed", status=415)
        if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
            raise refusal("the body must be a JSON object with the content type application/json", status=415)
        if int(headers.get(b"content-length", b"0")) > self._bytes:  # the parser has checked that it is a number
            raise self._too_large()
        self._check_number()
        body = await self._read(request, receive)
        self._check_number()
        request.arrived_s = time.monotonic()
        self._metrics.in_flight.add(request)
        return body

    def _check_key(self, given: Sequence[bytes]) -> None:
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # Digests have one length whatever the key's length, so the time of the comparison reveals nothing.
        if not hmac.compare_digest(_digest(key.strip(b" \t")), self._key or b"") or scheme.lower() != b"bearer":
            body = error_body("missing or wrong API key", kind="authentication_error")
            raise HTTPException(401, body, {"www-authenticate": "Bearer"})

    def _check_number(self) -> None:
        if len(self._metrics.in_flight) >= self._requests:
            raise _busy(f"{self._requests} requests are running or waiting; try again later")

    def _too_large(self) -> HTTPException:
        return refusal(f"a request may have at most {self._bytes} bytes", status=413)

    async def _read(self, request: InFlight, receive: Receive) -> bytes:
        """The body, once it has arrived."""
        parts, more = list[bytes](), True
        self._bodies[request] = 0
        with anyio.move_on_after(BODY_S) as reading:
            self._incomplete[request] = reading
            try:
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise client_left()
                    if request not in self._bodies:  # dropped while this part arrived
                        more = True
                        break
                    part, more = message.get("body", b""), message.get("more_body", False)
                    parts.append(part)
                    self._bodies[request] += len(part)
                    self._held += len(part)
                    if self._bodies[request] > self._bytes:
                        raise self._too_large()
                    self._drop_oldest()
            finally:
                self._incomplete.pop(request, None)
        if not more:
            return b"".join(parts)
        if self._closed:
            raise _stopping()
        if request not in self._bodies:
            raise _busy(f"more than {BODIES * self._bytes} bytes of requests are in the server; try again later")
        body = error_body(f"the request was not complete after {BODY_S:.0f} s")
        raise HTTPException(408, body, {"connection": "close"})

    def _drop_oldest(self) -> None:
        while self._held > BODIES * self._bytes and self._incomplete:
            oldest = next(iter(self._incomplete))
            self._incomplete.pop(oldest).cancel()
            self._forget(oldest)

    def _forget(self, request: InFlight) -> None:
        self._held -= self._bodies.pop(request, 0)


def _replay(body: bytes) -> Receive:
    """Receives a body that was read already, and then nothing: the gate itself watches the connection."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for message in messages:
            return message
        return await anyio.sleep_forever()  # type: ignore[return-value]

    return receive


def cors(gate: Gate, origins: Sequence[str]) -> Any:
    """The gate for web pages of these origins too; ``*`` is all. Their browsers ask for leave without a key."""
    if not origins:
        return gate
    exposed = ["x-request-id", "retry-after"]
    return CORSMiddleware(
        gate, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=exposed
    )


def _stopping() -> HTTPException:
    body = error_body("the server is stopping", kind="server_error")
    return HTTPException(503, body, {"retry-after": "5", "connection": "close"})


def _busy(message: str) -> HTTPException:
    return HTTPException(429, error_body(message, kind="rate_limit_error"), {"retry-after": "1"})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
