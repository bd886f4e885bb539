"""The listening socket, bound before the model is loaded so that an address in use is reported at once, and how many
connections it may have."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from polymoe.errors import ArgumentError

__all__ = ["bind", "connection_limit", "is_loopback", "url"]

_BACKLOG = 1024
"""Connections that may wait to be accepted: those that arrive at once, or while the model is loaded."""
_RESERVED = 64
"""File descriptors that connections leave for everything else, among them those accepted at once."""


@contextmanager
def bind(host: str, port: int) -> Iterator[socket.socket]:
    """A TCP socket that listens on the address; closed at the end.

    Args:
        host: a name or address of this machine.
        port: 0 takes a free one.

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
        raise ArgumentError("host", expected="an address of this machine", got=f"{host!r}: {error}") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            # Two sockets can be bound to one address as long as neither listens. Listening reserves the address while
            # the model is loaded; clients that connect early wait.
            listener.listen(_BACKLOG)
        except OSError as error:
            raise ArgumentError(
                where,
                expected="an address that is free to listen on",
                got=str(error),
                hint="port=0 takes any free port",
            ) from error
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
    """The maximum number of connections, which this process's limit on file descriptors must allow.

    Args:
        asked: the number that the user names; None for at most 1024, or what the limit allows.
        requests: maximum number of requests that run or wait. Each has a connection, and there must be room for more.

    Raises:
        ArgumentError: if ``asked`` or ``requests`` is too high.
    """
    room = _free_descriptors() - _RESERVED
    most = min(1024, room) if asked is None else asked
    if most > room:
        raise ArgumentError(
            "max_connections",
            expected=f"at most {max(room, 0)}: the limit on file descriptors, less those in use and {_RESERVED} others",
            got=str(asked),
            hint="raise the limit with ulimit -n",
        )
    if most <= requests:
        raise ArgumentError(
            "max_concurrent_requests",
            expected=f"fewer than there may be connections, which are {max(most, 0)}",
            got=str(requests),
            hint="raise --max-connections, or the limit on file descriptors with ulimit -n",
        )
    return most


def _free_descriptors() -> int:
    if sys.platform == "win32":
        return 512
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 2**20
    try:
        return soft - len(os.listdir("/dev/fd"))
    except OSError:
        return soft - _RESERVED
