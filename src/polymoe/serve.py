"""``polymoe serve``: one model behind an OpenAI-compatible address.

:func:`serve` runs until it is told to stop. The model and its endpoints are
:class:`~polymoe.engines.transformers_server.ModelServer`'s; here is what stands between it and the network: the
listening socket, the API key, the size of requests, clients that go away, and a clean end.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polymoe.errors import ArgumentError, MissingDependency

__all__ = ["Gate", "bind", "serve"]

log = logging.getLogger("polymoe")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

GRACE_S = 2
"""How long answers that are under way may go on after SIGTERM before they are cut short."""


def serve(
    path: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    name: str | None = None,
    backend: str = "auto",
    role: str = "mixed",
    device: str = "auto",
    max_tokens: int | None = None,
    max_request_bytes: int = 4 * 2**20,
    continuous_batching: bool = False,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the checkpoint at ``path`` until SIGTERM or Ctrl-C. Answers under way are then cut short after two seconds.

    Args:
        path: a checkpoint's directory or a Hub id.
        host, port: where to listen; port 0 takes a free one.
        api_key: what clients must send as a bearer token; None lets everybody in. ``/health`` needs none.
        name: what clients call the model; by default the last part of ``path``.
        backend, role, device: as in :func:`polymoe.engines.transformers.load`.
        max_tokens: most tokens of one answer; None is what fits in the model's context.
        max_request_bytes: larger requests are refused with 413.
        continuous_batching: let requests share forward passes (CUDA only); otherwise they run one after the other.
        on_ready: called with the server's URL once it answers.

    Raises:
        ArgumentError: for an address that cannot be listened on, as when the port is in use. Found before loading.
        MissingDependency: if the serving packages are not installed.
        CheckpointError, UnsupportedProblem: as for loading.
    """
    try:
        import uvicorn
        from transformers.utils.logging import set_verbosity_error
    except ImportError as error:
        raise MissingDependency("polymoe serve", got=str(error), hint="pip install 'polymoe[serve]'") from error
    from polymoe.engines.transformers import load
    from polymoe.engines.transformers_server import ModelServer

    if api_key == "" or max_request_bytes < 1 or (max_tokens is not None and max_tokens < 1):
        raise ArgumentError(
            "serve", expected="a key that is not empty, limits of at least 1", got="an empty key or limit"
        )
    with bind(host, port) as listener:
        if api_key is None and not _is_loopback(listener):
            log.warning("%s can be reached from other machines, and there is no API key", host)
        model, tokenizer = load(path, device=device, backend=backend, role=role)
        set_verbosity_error()  # Transformers' server warns of every request
        served = ModelServer(
            model,
            tokenizer,
            name=name or Path(path).resolve().name,
            max_tokens=max_tokens,
            continuous_batching=continuous_batching,
        )

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if self.started and on_ready:
                    on_ready(_url(listener))

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                asyncio.get_running_loop().call_later(GRACE_S, served.end)
                await super().shutdown(sockets)

        config = uvicorn.Config(
            Gate(served.app, api_key=api_key, max_request_bytes=max_request_bytes),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2 * GRACE_S,  # for answers that even then do not end
        )
        with _signals_end_here():
            Server(config).run(sockets=[listener])
            served.close()


@contextmanager
def bind(host: str, port: int) -> Iterator[socket.socket]:
    """A TCP socket that listens on the address; closed at the end.

    Raises:
        ArgumentError: if the host is unknown, or the port in use or not allowed.
    """
    where = f"{host}:{port}"
    if not 0 <= port < 2**16:
        raise ArgumentError(where, expected="a port from 0 to 65535", got=str(port))
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise ArgumentError(where, expected="an address of this machine", got=str(error)) from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            # Two sockets may be bound to one address while neither listens. Listening takes it for good, before the
            # model is loaded; who connects early waits.
            listener.listen()
        except OSError as error:
            raise ArgumentError(
                where,
                expected="an address that is free to listen on",
                got=str(error),
                hint="--port 0 takes any free port",
            ) from error
        yield listener


class Gate:
    """ASGI middleware in front of the application: API key, request size, and watching whether the client is there.

    A request is read as a whole before the application sees it. From then on the connection is watched, and
    :data:`~polymoe.engines.transformers_server.CLIENT_GONE` set when it closes.
    """

    def __init__(self, app: Any, *, api_key: str | None, max_request_bytes: int) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._limit = max_request_bytes

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif not self._admits(scope):
            await _answer(send, 401, "wrong or missing API key", kind="authentication_error")
        elif (body := await self._read(receive)) is None:
            await _answer(send, 413, f"a request may have {self._limit} bytes at most")
        else:
            await self._pass_on(scope, body, receive, send)

    def _admits(self, scope: Message) -> bool:
        if self._key is None or scope["path"] == "/health":
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body, or None if it is too large. What is too much is read too, up to a point: a client that still writes
        would see a broken connection instead of the answer."""
        parts: list[bytes] = []
        size = 0
        while size <= 16 * self._limit:
            message = await receive()
            part = message.get("body", b"")
            size += len(part)
            if size <= self._limit:
                parts.append(part)
            if not message.get("more_body", False):
                break
        return b"".join(parts) if size <= self._limit else None

    async def _pass_on(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        from polymoe.engines.transformers_server import CLIENT_GONE

        gone, disconnected = threading.Event(), asyncio.Event()
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()
            disconnected.set()

        async def replay() -> Message:
            for message in messages:
                return message
            await disconnected.wait()
            return {"type": "http.disconnect"}

        watcher = asyncio.create_task(watch())
        token = CLIENT_GONE.set(gone)
        try:
            await self._app(scope, replay, send)
        finally:
            # Also after an answer cut short by the server's end: nobody reads what would still be generated.
            gone.set()
            CLIENT_GONE.reset(token)
            watcher.cancel()


async def _answer(send: Send, status: int, message: str, *, kind: str = "invalid_request_error") -> None:
    from polymoe.engines.openai_requests import error_body

    body = json.dumps(error_body(message, kind=kind)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def _signals_end_here() -> Iterator[None]:
    """uvicorn raises a signal that stopped it once more when it has stopped; here that must not end the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_loopback(listener: socket.socket) -> bool:
    host = listener.getsockname()[0]
    return host.startswith("127.") or host == "::1"


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
