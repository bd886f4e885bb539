"""The listening socket, and uvicorn's server on it, with limits on connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from polymoe.errors import ArgumentError
from polymoe.serve.errors import error_body

__all__ = ["HttpServer", "bind", "connection_limit", "is_loopback", "url"]

HEAD_S = 10.0
"""Seconds in which a client must send the request line and headers."""
UNREAD_S = 60.0
"""Seconds for which a client may leave unread what has been sent to it."""
MAX_HEAD_BYTES = 32 * 1024
"""Headers that are still incomplete at this size are refused."""
MAX_HEADERS = 128
"""Maximum number of headers, with those after the last chunk of a body."""
SMALL_CHUNKS = 256
"""Chunks of a body beyond this number must have 1 KiB on average: each costs as much time as a large one."""

_ACCEPTED_AT_ONCE = 16
_BACKLOG = 1024
"""Connections that may wait to be accepted: those that arrive at once, or while the model is loaded."""
_RESERVED = 64
"""File descriptors that connections leave for everything else, among them those accepted at once."""


class HttpServer(Server):
    """uvicorn's server, which parses requests with llhttp, for one ASGI application and a listening socket.

    A connection waits until a whole request has arrived, and again after each answer. Of more than ``most``
    connections, the one that has waited longest is closed: clients that never finish a request displace each other.
    Answers may continue for ``stop_s`` seconds after a signal.

    Attributes:
        on_ready, on_stop: called in the event loop, once it answers and when it begins to end.
    """

    on_ready: Callable[[], None] = staticmethod(lambda: None)
    on_stop: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, app: Any, listener: socket.socket, *, most: int, stop_s: float) -> None:
        protocol: Any = partial(_Connection, {}, most)
        config = Config(
            app, http=protocol, loop="asyncio", ws="none", lifespan="off", log_config=None, log_level="error",
            access_log=False, server_header=False, proxy_headers=False, backlog=_ACCEPTED_AT_ONCE,
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
        self._listener.listen(_BACKLOG)  # asyncio has set it to what it accepts at once
        self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new connections, and wait for running answers."""
        self.on_stop()
        await super().shutdown(sockets)


class _Connection(HttpToolsProtocol):
    """One connection, with limits on its headers, on the time for them, and on that for reading answers.

    Args:
        waiting: all connections that wait for a request, the one that has waited longest first.
        most: maximum number of connections.
        arguments: uvicorn's.
    """

    def __init__(self, waiting: dict[_Connection, None], most: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._waiting, self._most = waiting, most
        self._running: Any = None  # the request that is answered; uvicorn's cycle is the newest of a pipeline
        self._unparsed = 0  # bytes of headers that are incomplete
        self._refusal = (400, "the request is not valid HTTP/1.1")
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # pause_writing is called whenever the client has not read everything, which then has a time limit.
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self._most:
            longest = next(iter(self._waiting), self)
            self._waiting.pop(longest, None)
            self.connections.discard(longest)
            longest.transport.abort()
        self._waiting[self] = None
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.pop(self, None)
        for timer in (self._head_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    @property
    def _answered(self) -> bool:
        return self._running is None or self._running.response_complete

    def data_received(self, data: bytes) -> None:
        if self._answered and self._head_timer is None:
            self._start_head_timer()
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"a request may have at most {MAX_HEAD_BYTES} bytes of headers")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._chunks = self._body_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refusal = 431, f"a request may have at most {MAX_HEADERS} headers"
            raise ValueError

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle
        self._unparsed = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def on_chunk_header(self) -> None:
        """Count the chunks of a body."""
        self._chunks += 1
        if self._chunks > SMALL_CHUNKS + self._body_bytes // 1024:
            self._refusal = 400, "the chunks of the request's body are too small"
            raise ValueError

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._body_bytes += len(body)
        self._unparsed = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._unparsed = 0
        if not self._answered:
            self._waiting.pop(self, None)

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]  # which is started
        super().on_response_complete()
        if self in self.connections and (self._answered or self._running.more_body):
            self._waiting.setdefault(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, and close the connection."""
        self._refuse(*self._refusal)

    def _refuse(self, status: int, message: str) -> None:
        if self._answered or not self._running.response_started:
            body = json.dumps(error_body(message)).encode()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        if self._running is not None:  # its application must not write anything any more
            self._running.disconnected = True
            self._running.message_event.set()
        self.transport.close()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._end_head)

    def _end_head(self) -> None:
        if self._unparsed and not self.transport.is_closing():
            self._refuse(408, f"the headers were not complete after {HEAD_S:.0f} s")
        else:  # nothing of a request has arrived, or the rest of a body that was refused
            self.transport.abort()


@contextlib.contextmanager
def bind(host: str, port: int) -> Iterator[socket.socket]:
    """A TCP socket that listens on the address, before the model is loaded: clients that connect early wait.

    Raises:
        ArgumentError: if the host is unknown, or the port in use or not allowed.
    """
    if not 0 <= port < 2**16:
        raise ArgumentError(f"{host}:{port}", expected="a port from 0 to 65535", got=str(port))
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise ArgumentError("host", expected="an address of this machine", got=f"{host!r}: {error}") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)  # two sockets can be bound to one address as long as neither listens
        except OSError as error:
            expected, hint = "an address that is free to listen on", "port=0 takes any free port"
            raise ArgumentError(f"{host}:{port}", expected=expected, got=str(error), hint=hint) from error
        yield listener


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can connect."""
    host = listener.getsockname()[0]
    return host.startswith("127.") or host == "::1"


def url(listener: socket.socket) -> str:
    """The URL of a server that listens here."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def connection_limit(asked: int | None, requests: int) -> int:
    """The maximum number of connections, which this process's limit on file descriptors must allow. That limit is
    raised as far as the process may.

    Args:
        asked: the number that the user names; None for at most 1024, or what the limit allows.
        requests: maximum number of requests that run or wait. Each has a connection, and there must be room for more.

    Raises:
        ArgumentError: if ``asked`` or ``requests`` is too high.
    """
    room = _free_descriptors() - _RESERVED
    most = min(1024, room) if asked is None else asked
    if most > room:
        expected = f"at most {max(room, 0)}: the limit on file descriptors, less those in use and {_RESERVED} others"
        hint = "raise the limit with ulimit -n"
        raise ArgumentError("max_connections", expected=expected, got=str(asked), hint=hint)
    if most <= requests:
        expected = f"fewer than there may be connections, which are {max(most, 0)}"
        hint = "raise --max-connections, or the limit on file descriptors with ulimit -n"
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
