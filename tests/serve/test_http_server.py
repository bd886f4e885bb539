"""Connections: how many there may be, answers that nobody reads, and requests that are not HTTP."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from polymoe.errors import ArgumentError
from polymoe.serve import http_server
from polymoe.serve.http_server import _Connection, connection_limit
from support.raw_http import BODY, CHUNKED, HEADERS, chunk, error_of, raw_request, replies, send_raw
from support.serving import BYTES, Running, running_server

MOST = 12
HEALTH = raw_request(b"GET", b"/health", headers=(b"host: x", b"connection: close"), body=b"")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(connections=MOST, max_concurrent_requests=MOST - 4) as running:
        yield running


def connect(server: Running, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(data)
    return connection


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def everything(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return received


# --- How many -------------------------------------------------------------------------------------------------------


def test_of_more_connections_requests_are_refused(server: Running) -> None:
    connections = server.http.server_state.connections
    with server.held(), contextlib.ExitStack() as stack:
        asking = [stack.enter_context(connect(server, raw_request())) for _ in range(4)]
        server.until(lambda: len(server.served.metrics.in_flight) == 4)
        for _ in range(MOST - 5):
            stack.enter_context(connect(server, b"GET /hea"))
        server.until(lambda: len(connections) == MOST - 1)
        assert send_raw(server.port, HEALTH)[0].status == 200
        stack.enter_context(connect(server))
        server.until(lambda: len(connections) == MOST)
        assert send_raw(server.port, HEALTH)[0].status == 503
        server.released.set()
        assert [replies(everything(connection))[0].status for connection in asking] == [200] * 4
    server.until(lambda: not connections)


@pytest.mark.parametrize(("hard", "most"), [(300, 200), (5000, 4900)])
def test_the_limit_on_descriptors_limits_connections(monkeypatch: pytest.MonkeyPatch, hard: int, most: int) -> None:
    limits = [100, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, raised: limits.__setitem__(slice(None), raised))
    monkeypatch.setattr(http_server.os, "listdir", lambda _: ["0"] * 36)
    assert connection_limit(128) == most
    assert limits == [hard, hard]


def test_more_requests_than_connections_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 300))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(http_server.os, "listdir", lambda _: ["0"] * 36)
    says = "max_concurrent_requests: expected fewer than there may be connections, which are 200.*\n.*ulimit -n"
    with pytest.raises(ArgumentError, match=says):
        connection_limit(200)


# --- How long -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [False, True], ids=["first request", "second request"])
def test_slow_headers_end_their_connection(server: Running, monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.2)
    with connect(server, HEALTH.replace(b"connection: close\r\n", b"") if used else b"") as slow:
        if used:
            assert b" 200 " in slow.recv(4096)
            time.sleep(0.3)  # an idle connection is not one that is slow
            assert not is_closed(slow)
        start = time.monotonic()
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        while time.monotonic() - start < 5 and not is_closed(slow):
            with contextlib.suppress(OSError):
                slow.sendall(b"a: b\r\n")
        assert time.monotonic() - start < 2


def test_the_rest_of_a_refused_body_is_not_waited_for(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.2)
    with connect(server, raw_request(headers=(*HEADERS, b"content-length: 1000000"), body=b"x")) as connection:
        assert b" 413 " in connection.recv(4096)
        start = time.monotonic()
        while time.monotonic() - start < 5 and not is_closed(connection):
            with contextlib.suppress(OSError):
                connection.sendall(b"x")
        assert time.monotonic() - start < 2


def test_an_answer_that_nobody_reads_ends(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "UNREAD_S", 0.2)
    made = _Connection.connection_made

    def with_a_small_buffer(self: _Connection, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(_Connection, "connection_made", with_a_small_buffer)
    metrics = raw_request(b"GET", b"/metrics", headers=HEADERS, body=b"")
    connections = server.http.server_state.connections
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(metrics * 40)
        server.until(lambda: len(connections) == 1)
        server.until(lambda: not connections)


# --- What is no request ---------------------------------------------------------------------------------------------

LONG = b"x" * 300_000
MANY = tuple(b"a%d: b" % i for i in range(60_000))
LAST = chunk(BODY) + b"0\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 300,  # TLS
        bytes(range(256)) * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        raw_request(b"CONNECT", b"x:1", headers=(*HEADERS, b"connection: close"), body=b""),
        raw_request(b"FOO"),
        raw_request(version=b"HTTP/3.0"),
        raw_request(b"GET", b"/health", headers=(b"host: x", b"a: \x00"), body=b""),
        raw_request(headers=(*HEADERS, b"content-length: -1")),
        raw_request(headers=(*HEADERS, b"content-length: " + b"9" * 50)),
        raw_request(headers=(*HEADERS, b"content-length: 3", b"content-length: 4")),
        raw_request(headers=(*CHUNKED, b"content-length: 3"), body=LAST + b"\r\n"),
        raw_request(headers=CHUNKED, body=b"zz\r\n"),
        raw_request(b"GET", b"/health", headers=(b"host: x", b"a: " + LONG), body=b""),
        raw_request(b"GET", b"/" + LONG, headers=HEADERS, body=b""),
        raw_request(b"GET", b"/health", headers=(b"host: x", *MANY), body=b""),
        raw_request(headers=CHUNKED, body=LAST + b"a: b\r\n" * 60_000 + b"\r\n"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_anything_but_http_is_refused(server: Running, data: bytes) -> None:
    [refused] = send_raw(server.port, data)
    assert (refused.status, refused.headers["connection"]) == (400, "close")


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (raw_request(version=b"HTTP/1.0", headers=(*HEADERS[1:], b"content-length: %d" % len(BODY))), [200]),
        (
            raw_request(headers=(b"host: [::", *HEADERS[1:], b"connection: close", b"content-length: 0"), body=b""),
            [400],
        ),
        (raw_request(headers=(*CHUNKED, b"connection: close"), body=LAST + b"a: b\r\n\r\n"), [200]),
        (raw_request(b"GET", b"/health", headers=(b"host: x",), body=b"") * 20 + HEALTH, [200] * 21),
        (raw_request(b"GET", b"/health/", headers=(*HEADERS, b"connection: close"), body=b""), [404]),
        (raw_request(b"GET", b"/%ff%00/../x", headers=(*HEADERS, b"connection: close"), body=b""), [404]),
        (raw_request(b"DELETE", b"/v1/models"), [405]),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else "",
)
def test_unusual_requests_are_answered(server: Running, data: bytes, statuses: list[int]) -> None:
    found = send_raw(server.port, data)
    assert [reply.status for reply in found] == statuses
    assert all(error_of(reply) for reply in found if reply.status >= 400)


def test_a_websocket_is_answered_like_any_request(server: Running) -> None:
    upgrade = (b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-version: 13", b"sec-websocket-key: eA==")
    with connect(server, raw_request(b"GET", b"/health", headers=(b"host: x", *upgrade), body=b"")) as connection:
        assert b" 200 " in connection.recv(4096)


def test_a_body_is_asked_for_only_if_it_is_read(server: Running) -> None:
    length = b"content-length: %d" % len(BODY)
    with connect(server, raw_request(headers=(*HEADERS, b"expect: 100-continue", length), body=b"")) as connection:
        assert b" 100 " in connection.recv(4096)
        connection.sendall(BODY)
        assert b" 200 " in connection.recv(4096)
    for headers, status in (
        ((HEADERS[0], HEADERS[2], length), 401),
        ((*HEADERS[:2], length), 415),
        ((*HEADERS, b"content-length: %d" % (BYTES + 1)), 413),
    ):
        [refused] = send_raw(server.port, raw_request(headers=(*headers, b"expect: 100-continue"), body=b""))
        assert (refused.status, refused.headers["connection"]) == (status, "close")
