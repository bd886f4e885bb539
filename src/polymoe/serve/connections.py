"""Connections: how many there are, and how long each may take for a request and for reading its answer.

A connection waits from its start, and again after each answer, until a whole request has arrived. When there is no room
for another connection, the one that has waited longest is closed: clients that never finish their requests close each
other's connections, and everybody else is served. A connection whose request is being answered is never closed for
another one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from polymoe.serve.errors import error_body
from polymoe.serve.http_parser import HttpParser

__all__ = ["Connection", "Connections"]

log = logging.getLogger("polymoe")

HEAD_S = 10.0
"""Seconds in which a client must send the request line and headers."""
UNREAD_S = 60.0
"""Seconds for which a client may leave unread what has been sent to it."""

_ACCEPTED_AT_ONCE = 16
_PAUSE_S = 0.05


class Connections:
    """Accepts the connections of one server, and closes those that have to go.

    Args:
        listener: the listening socket; made non-blocking.
        most: maximum number of open connections, but for those that are accepted at once.
        protocol: makes the protocol of a new connection.

    Attributes:
        open: all connections.
        waiting: those of which a whole request has not arrived, the one that has waited longest first.
    """

    def __init__(self, listener: socket.socket, most: int, protocol: Callable[[Connections], Connection]) -> None:
        self._listener, self._most, self._protocol = listener, most, protocol
        self.open: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task] = set()
        self._closed = False
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more connections."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Nothing to wait for, unlike :class:`asyncio.Server`'s."""

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        if len(self.open) >= self._most and not self.waiting:
            self._pause()  # all of them are being answered
            return
        # asyncio's own servers accept until the backlog is empty before any new connection is handled, and log each
        # try that finds no free descriptor.
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # other parts of the process have taken the reserved descriptors
                log.warning("a connection cannot be accepted: %s", error)
                self._close_longest_waiting()
                self._pause()
                return
            task = self._loop.create_task(self._start(accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener)
        self._loop.call_later(_PAUSE_S, self._listen)

    async def _start(self, accepted: socket.socket) -> None:
        try:
            accepted.setblocking(False)
            await self._loop.connect_accepted_socket(lambda: self._protocol(self), accepted)
        except OSError:  # the client has closed it already
            accepted.close()

    def add(self, connection: Connection) -> None:
        """Count a new connection; if there are too many, one is closed."""
        self.open.add(connection)
        if self._closed:  # it was being accepted; nothing else would close it
            connection.transport.close()
        self._make_room()

    def sort(self, connection: Connection, *, waits: bool) -> None:
        """Record whether a connection waits for a whole request."""
        if not waits:
            self.waiting.pop(connection, None)
        elif connection in self.open:
            self.waiting.setdefault(connection)
            self._make_room()

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self.open.discard(connection)
        self.waiting.pop(connection, None)

    def _make_room(self) -> None:
        while len(self.open) > self._most and self.waiting:
            self._close_longest_waiting()

    def _close_longest_waiting(self) -> None:
        connection = next(iter(self.waiting), None)
        if connection is not None:
            self.remove(connection)
            connection.transport.abort()


class Connection(H11Protocol):
    """One connection of uvicorn's server, with limits.

    Args:
        connections: all of the server.
        arguments: uvicorn's.
    """

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._all = connections
        self._parser = self.conn = HttpParser()
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # pause_writing is called whenever the client has not read everything, which then has a time limit.
        transport.set_write_buffer_limits(high=0)
        self._start_head_timer()
        self._all.add(self)
        # It waits after the next turn of the event loop, which reads what has arrived with the connection: a
        # client that sends its request at once is not closed for another one.
        self.loop.call_soon(self.loop.call_soon, self._sort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_unread_timer()
        self._all.remove(self)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._answered() and self._head_timer is None:
            self._start_head_timer()
        super().data_received(data)

    def handle_events(self) -> None:
        """Handle what has been received."""
        super().handle_events()
        self._sort()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._sort()
        if self._answered() and self.conn.their_state is h11.SEND_BODY and self._head_timer is None:
            self._start_head_timer()  # for the rest of a body that was refused, and the next head

    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _sort(self) -> None:
        """Record whether the connection waits, after that may have changed."""
        answered = self._answered()
        if not answered:
            self._stop_head_timer()
        self._all.sort(self, waits=answered or self.cycle.more_body)

    def shutdown(self) -> None:
        """Close the connection, after the answer if there is one."""
        if self._answered():
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, and close the connection."""
        status, message = self._parser.refusal or (400, "the request is not valid HTTP/1.1")
        self._refuse(status, message)

    def _refuse(self, status: int, message: str) -> None:
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = json.dumps(error_body(message)).encode()
            head = (
                f"HTTP/1.1 {status} {STATUS_PHRASES[status].decode()}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        if self.cycle is not None:  # its application must not write anything any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._end_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _end_head(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0] and not self.transport.is_closing():
            self._refuse(408, f"the headers were not complete after {HEAD_S:.0f} s")
        else:  # nothing of a request has arrived, or the rest of a body that was refused
            self.transport.abort()
