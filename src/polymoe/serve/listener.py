"""The listening socket: bound before the model is loaded, so that an address in use is reported at once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from polymoe.errors import ArgumentError

__all__ = ["bind", "is_loopback", "url"]


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
        raise ArgumentError(where, expected="an address of this machine", got=str(error)) from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            # Two sockets can be bound to one address as long as neither listens. Listening reserves the address while
            # the model is loaded; clients that connect early wait.
            listener.listen()
        except OSError as error:
            raise ArgumentError(
                where,
                expected="an address that is free to listen on",
                got=str(error),
                hint="--port 0 takes any free port",
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
