"""HTTP requests byte by byte, as no well-behaved client sends them."""

from __future__ import annotations

import json
import socket
from typing import Any

from support.serving import KEY, Reply

BODY = b'{"prompt": "1+2=", "max_tokens": 4}'
HEADERS = (b"host: x", b"authorization: Bearer " + KEY.encode(), b"content-type: application/json")
CHUNKED = (*HEADERS, b"transfer-encoding: chunked")


def raw_request(
    method: bytes = b"POST",
    path: bytes = b"/v1/completions",
    version: bytes = b"HTTP/1.1",
    headers: tuple[bytes, ...] | None = None,
    body: bytes = BODY,
) -> bytes:
    """The bytes of a request; without ``headers`` of one that is answered."""
    if headers is None:
        headers = (*HEADERS, b"connection: close", b"content-length: %d" % len(body))
    return b"\r\n".join([b" ".join([method, path, version]), *headers, b"", body])


def chunk(data: bytes) -> bytes:
    """One chunk of a body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def send_raw(port: int, data: bytes, timeout: float = 20) -> list[Reply]:
    """Send bytes to a server in this process, and read all its answers until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        received = b""
        try:
            connection.sendall(data)
            while part := connection.recv(65536):
                received += part
        except (ConnectionResetError, BrokenPipeError):
            pass  # the server has closed the connection before it had read everything
    return replies(received)


def replies(received: bytes) -> list[Reply]:
    """The responses in what a server has sent; each must have its length."""
    found = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        headers: dict[str, Any] = {k.lower(): v for k, _, v in (header.partition(": ") for header in lines)}
        status = int(line.split()[1])
        length = int(headers.get("content-length", 0)) if status != 100 else 0
        found.append(Reply(status, headers, rest[:length].decode()))
        received = rest[length:]
    return found


def error_of(reply: Reply) -> str:
    """The message of an error in OpenAI's form."""
    error = json.loads(reply.text)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error["message"]
