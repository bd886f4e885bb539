"""The listening socket, and uvicorn's server on it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from polymoe.errors import ArgumentError

HEAD_S = 10.0
"""Seconds in which a client must send the request line and headers."""
UNREAD_S = 60.0
"""Seconds for which a client may leave more than 64 KiB of an answer unread."""
MAX_HEAD_BYTES = 32 * 1024
"""Headers that are still incomplete at this size are refused."""
_RESERVED = 64
"""File descriptors that connections leave for everything else."""


class HttpServer(Server):
    """uvicorn's server, which parses requests with llhttp, for one ASGI application and a listening socket.

    Of more than ``most`` connections, requests are answered with 503. Answers may continue for ``stop_s`` seconds after
    a signal.

    Attributes:
        on_ready, on_stop: called in the event loop, once it answers and when it begins to end.
    """

    on_ready: Callable[[], None] = staticmethod(lambda: None)
    on_stop: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, app: Any, listener: socket.socket, *, most: int, stop_s: float) -> None:
        config = Config(
            app, http=_Connection, loop="asyncio", ws="none", lifespan="off", log_config=None, log_level="error",
            access_log=False, server_header=False, proxy_headers=False, limit_concurrency=most + 1,
            # Longer than clients keep an idle connection, so that the server never closes one that is about to be used.
            timeout_keep_alive=30, timeout_graceful_shutdown=stop_s,  # type: ignore[arg-type]
        )  # fmt: skip
        super().__init__(config)
        self._listener = listener

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal."""
        super().run(sockets or [self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new connections, and wait for running answers."""
        self.on_stop()
        await super().shutdown(sockets)


class _Connection(HttpToolsProtocol):
    """uvicorn's connection with what it lacks: limits on headers, on the time for them, and on that for reading."""

    _unparsed = 0  # bytes of headers that are incomplete
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._abort_after(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.cycle is not None and self.cycle.response_complete:
            self._abort_after(HEAD_S)  # the next request begins, or a body that was refused continues
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"a request may have at most {MAX_HEAD_BYTES} bytes of headers")

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._unparsed = 0
        self._stop_timer()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unparsed = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._unparsed = 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_after(UNREAD_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer()

    def _abort_after(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket that listens on the address, before the model is loaded: clients that connect early wait.

    Raises:
        ArgumentError: if the host is unknown, or the port in use or not allowed.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((address[0], port), family=family, backlog=1024)
    except socket.gaierror as error:
        expected = "a name or an address of this machine"
        raise ArgumentError("host", expected=expected, got=f"{host!r}: {error.strerror}") from error
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
            raise ArgumentError("host", expected="an address of this machine", got=repr(host)) from error
        expected, hint = "a port that is free to listen on", "port=0 takes any free port"
        raise ArgumentError(f"{host}:{port}", expected=expected, got=str(error), hint=hint) from error


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can connect."""
    host = listener.getsockname()[0]
    return host.startswith("127.") or host == "::1"


def url(listener: socket.socket) -> str:
    """The URL of a server that listens here."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def connection_limit(requests: int) -> int:
    """The maximum number of connections: what this process's limit on file descriptors allows, which is raised as far
    as the process may.

    Args:
        requests: maximum number of requests that run or wait. Each has a connection, and there must be room for more.

    Raises:
        ArgumentError: if ``requests`` is too high.
    """
    most = _free_descriptors() - _RESERVED
    if most <= requests:
        expected = f"fewer than there may be connections, which are {max(most, 0)}"
        hint = "raise the limit on file descriptors with ulimit -n"
        raise ArgumentError("max_concurrent_requests", expected=expected, got=str(requests), hint=hint)
    return most


def _free_descriptors() -> int:
    if sys.platform == "win32":
        return 512
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft - len(os.listdir("/dev/fd"))
