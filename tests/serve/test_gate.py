"""The gate: keys, sizes and numbers of requests, clients that leave, metrics, and closing it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from fastapi import HTTPException
from fastapi.testclient import TestClient

from polymoe.serve import gate as gates
from polymoe.serve.gate import cors
from support.raw_http import HEADERS, error_of, raw_request, send_raw
from support.serving import BYTES, KEY, Reply, Running, running_server, user

PLACES = 4

CUT = "the server stopped before this answer was complete"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(max_concurrent_requests=PLACES) as running:
        yield running


def head(length: int) -> bytes:
    """The head of a request whose body has ``length`` bytes."""
    return raw_request(headers=(*HEADERS, b"content-length: %d" % length), body=b"")


def in_flight(server: Running) -> tuple[int, int]:
    """How many generations run and wait."""
    requests = list(server.served.metrics.in_flight)
    return sum(r.running for r in requests), sum(not r.running for r in requests)


@contextlib.contextmanager
def client(server: Running, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection on which a request has been sent; closed at the end of the block."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw_request(body=json.dumps({"model": "sums", **body}).encode()))
        yield connection


@contextlib.contextmanager
def stream(server: Running, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    """A stream whose headers have been read, with a timeout for what follows."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        yield connection.getresponse()


def ask(server: Running, replies: list[Reply], **body: Any) -> threading.Thread:
    """A request in a thread, whose reply is added to ``replies``."""
    request = {"prompt": "1+2=", "max_tokens": 4, "ignore_eos": True, **body}
    thread = threading.Thread(target=lambda: replies.append(server.post("/v1/completions", request)))
    thread.start()
    return thread


# --- Keys and sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["wrong", KEY[:-1], KEY + "x", KEY.upper(), None])
def test_a_wrong_key_is_refused(server: Running, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    refused = server.get("/v1/models", headers)
    assert refused.status == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert server.get("/health").status == 200


@pytest.mark.parametrize("size", [BYTES + 1, 10 * BYTES, 400 * BYTES])
def test_an_oversized_request_is_refused(server: Running, size: int) -> None:
    try:
        assert server.post("/v1/completions", b"x" * size).status == 413
    except ConnectionError:
        assert size > 16 * BYTES  # far too much to be read to its end
    with pytest.raises(openai.APIStatusError) as refused:
        server.client().completions.create(model="sums", prompt="1" * (BYTES + 1))
    assert refused.value.status_code == 413


def test_a_request_in_chunks_counts_as_a_whole(server: Running) -> None:
    body = json.dumps({"model": "sums", "prompt": "1+2="}, indent=20).encode()
    chunks = [body[i : i + 7] for i in range(0, len(body), 7)]
    answer = server.post("/v1/completions", iter(chunks))
    assert answer.json()["choices"][0]["text"] == "3", answer.text
    assert server.post("/v1/completions", iter([b"x" * 1000] * 30)).status == 413


# --- How many -------------------------------------------------------------------------------------------------------


def test_more_than_there_is_room_for_are_refused_with_429(server: Running) -> None:
    replies: list[Reply] = []
    with server.held():
        threads = [ask(server, replies) for _ in range(PLACES)]
        server.until(lambda: in_flight(server) == (1, PLACES - 1))
        refused = server.post("/v1/completions", {"prompt": "1+2="})
        assert refused.status == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert server.get("/health").status == 200  # which does not count
    for thread in threads:
        thread.join()
    assert [reply.status for reply in replies] == [200] * PLACES
    assert server.post("/v1/completions", {"prompt": "1+2="}).json()["choices"][0]["text"] == "3"


def test_a_burst_gets_answers_or_429(server: Running) -> None:
    replies: list[Reply] = []
    with server.slow(0.02):
        for thread in [ask(server, replies) for _ in range(40)]:
            thread.join()
    statuses = [reply.status for reply in replies]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= PLACES
    server.until(lambda: in_flight(server) == (0, 0))


def test_a_refused_request_leaves_its_connection_open(server: Running) -> None:
    """A client uses its connection for the next try, so the refused request must have been read to its end."""
    replies: list[Reply] = []
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    body = json.dumps({"prompt": "1+2=", "user": "x" * 10_000})
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        with server.held():
            threads = [ask(server, replies) for _ in range(PLACES)]
            server.until(lambda: in_flight(server) == (1, PLACES - 1))
            for _ in range(3):
                connection.request("POST", "/v1/completions", body, headers)
                answer = connection.getresponse()
                assert (answer.status, bool(answer.read())) == (429, True)
        port = connection.sock.getsockname()[1]
        for thread in threads:
            thread.join()
        connection.request("POST", "/v1/completions", body, headers)
        assert connection.getresponse().status == 200
        assert connection.sock.getsockname()[1] == port


# --- Clients that leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_waiting_gives_up_the_place(server: Running, stream: bool) -> None:
    with server.held(), contextlib.ExitStack() as stack:
        stack.enter_context(client(server, {"prompt": "1+2=", "max_tokens": 60, "ignore_eos": True}))
        server.until(lambda: in_flight(server) == (1, 0))
        with contextlib.ExitStack() as waiting:
            for _ in range(PLACES - 1):
                waiting.enter_context(client(server, {"prompt": "9+9=", "stream": stream}))
            server.until(lambda: in_flight(server) == (1, PLACES - 1))
        # The first still runs: those behind it are gone at once, not when the model reaches them.
        server.until(lambda: in_flight(server) == (1, 0))
        before = server.steps
    server.until(lambda: in_flight(server) == (0, 0))
    assert server.steps - before < 5  # no prompt of those that waited was computed


def test_who_leaves_while_sending_is_not_heard(server: Running) -> None:
    before = server.steps
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head(100) + b'{"prompt": "1+2="')
        server.until(lambda: server.gate._held > 0)
    server.until(lambda: server.gate._held == 0)
    assert server.steps == before


# --- Slow and large bodies ------------------------------------------------------------------------------------------


def test_who_never_finishes_a_request_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "BODY_S", 0.2)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head(100) + b"{")
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_slow_body_takes_no_place(server: Running) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(2 * PLACES):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            slow.sendall(head(100) + b"{")
        server.until(lambda: server.gate._held == 2 * PLACES)
        assert in_flight(server) == (0, 0)
        assert server.post("/v1/completions", {"prompt": "1+2="}).status == 200
    server.until(lambda: server.gate._held == 0)


def test_the_oldest_incomplete_bodies_make_room(server: Running) -> None:
    """All bodies together have a limit, so that slow ones cannot fill the memory."""
    with contextlib.ExitStack() as stack:
        slow = []
        for i in range(gates.BODIES + 4):
            slow.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20)))
            slow[-1].sendall(head(BYTES) + b" " * (BYTES - 100))
            server.until(lambda: len(server.gate._incomplete) == min(i + 1, gates.BODIES))  # noqa: B023
        assert server.gate._held <= gates.BODIES * BYTES
        assert server.post("/v1/completions", {"prompt": "1+2=", "user": "x" * 10_000}).status == 200
        for body in slow[:4]:  # they are told so once they send more
            body.sendall(b" ")
            answer = b""
            while b"bytes of requests are in the server" not in answer:
                answer += body.recv(4096)
            assert answer.startswith(b"HTTP/1.1 429 ")
    server.until(lambda: server.gate._held == 0)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((HEADERS[0], HEADERS[2]), 401),
        ((*HEADERS, HEADERS[1]), 401),  # two keys
        ((HEADERS[0], b"authorization: Bearer \xff", HEADERS[2]), 401),
        ((HEADERS[0], HEADERS[1].replace(b"Bearer", b"Basic"), HEADERS[2]), 401),
        ((*HEADERS, b"content-encoding: gzip"), 415),
        ((*HEADERS[:2], b"content-type: text/plain"), 415),
        (HEADERS[:2], 415),
        (HEADERS, 413),
    ],
)
def test_a_request_is_refused_before_its_body_is_read(
    server: Running, monkeypatch: pytest.MonkeyPatch, headers: tuple[bytes, ...], status: int
) -> None:
    monkeypatch.setattr(gates.Gate, "_read", None)
    data = raw_request(headers=(*headers, b"connection: close", b"content-length: 99999999"), body=b"{")
    [refused] = send_raw(server.port, data)
    assert (refused.status, bool(error_of(refused))) == (status, True)


# --- What is counted ------------------------------------------------------------------------------------------------


def test_metrics_need_the_key(server: Running) -> None:
    assert server.get("/metrics").status == 401
    assert server.get("/metrics", {"Authorization": f"Bearer {KEY}"}).headers["content-type"].startswith("text/plain")


def test_tokens_and_times_are_counted(server: Running) -> None:
    names = (
        "polymoe_prompt_tokens_total",
        "polymoe_generation_tokens_total",
        "polymoe_request_seconds_count",
        "polymoe_queue_seconds_count",
        "polymoe_time_to_first_token_seconds_count",
        "polymoe_time_per_output_token_seconds_count",
    )
    before = [server.metric(name) for name in names]
    for stream in (False, True):
        server.post("/v1/completions", {"prompt": "498-971=", "stream": stream})
        server.post("/v1/chat/completions", {"messages": user("498-971="), "stream": stream})
    server.until(lambda: in_flight(server) == (0, 0))
    gained = [server.metric(name) - old for name, old in zip(names, before, strict=True)]
    assert gained == [4 * 8, 4 * len("-473$"), 4, 4, 4, 4]
    total, first = (server.metric(f"polymoe_{name}_seconds_sum") for name in ("request", "time_to_first_token"))
    assert 0 < first < total


def test_requests_are_counted_by_status(server: Running) -> None:
    def count(path: str, status: int) -> float:
        return server.metric("polymoe_requests_total", path=path, status=str(status))

    calls = (
        ("/v1/completions", 200, lambda: server.post("/v1/completions", {"prompt": "1+2="})),
        ("/v1/completions", 400, lambda: server.post("/v1/completions", {})),
        ("/v1/models", 401, lambda: server.get("/v1/models")),
        ("other", 404, lambda: server.get("/etc/passwd", {"Authorization": f"Bearer {KEY}"})),
    )
    for path, status, call in calls:
        before = count(path, status)
        assert call().status == status
        server.until(lambda: count(path, status) == before + 1)  # noqa: B023
    before = count("/v1/completions", 499)
    with server.slow(0.05), client(server, {"prompt": "1+2=", "stream": True, "ignore_eos": True}) as connection:
        connection.recv(100)
    server.until(lambda: count("/v1/completions", 499) == before + 1)


def test_what_runs_and_waits_is_seen(server: Running) -> None:
    replies: list[Reply] = []
    with server.held():
        threads = [ask(server, replies) for _ in range(3)]
        server.until(lambda: in_flight(server) == (1, 2))
        assert server.metric("polymoe_requests_running") == 1
        assert server.metric("polymoe_requests_waiting") == 2
    for thread in threads:
        thread.join()
    assert server.metric("polymoe_requests_running") == server.metric("polymoe_requests_waiting") == 0


def test_the_backend_in_use_is_told(server: Running) -> None:
    labels = {"model": "sums", "backend": "reference", "layout": "natural", "tokens": "1+"}
    assert server.metric("polymoe_backend_info", **labels) == 4
    assert server.metric("process_resident_memory_bytes") > 1e6


# --- Closing --------------------------------------------------------------------------------------------------------


def test_a_closed_gate_lets_those_in_finish_and_nobody_else_in() -> None:
    replies: list[Reply] = []
    with running_server() as server:
        with server.held():
            threads = [ask(server, replies) for _ in range(2)]
            server.until(lambda: in_flight(server) == (1, 1))
            server.call(server.gate.close)
            for path in ("/v1/completions", "/health", "/v1/models"):
                refused = server.post(path, {"prompt": "1+2="})
                assert refused.status == 503
                assert refused.headers["connection"] == "close"
                assert "stopping" in refused.json()["error"]["message"]
        for thread in threads:
            thread.join()
        assert [reply.status for reply in replies] == [200, 200]


def test_a_closed_gate_waits_for_no_body() -> None:
    with running_server() as server, socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head(100) + b"{")
        server.until(lambda: server.gate._held == 1)
        server.call(server.gate.close)
        assert connection.recv(100).startswith(b"HTTP/1.1 503 ")


def test_the_end_is_an_error_for_the_running_answer_and_those_that_wait() -> None:
    replies: list[Reply] = []
    with running_server() as server, server.slow(0.05):
        threads = [ask(server, replies, max_tokens=200)]
        server.until(lambda: in_flight(server) == (1, 0))
        threads += [ask(server, replies, max_tokens=200) for _ in range(3)]
        server.until(lambda: in_flight(server) == (1, 3))
        time.sleep(0.2)
        start = time.monotonic()
        server.served.end()
        for thread in threads:
            thread.join()
        assert time.monotonic() - start < 5  # all tokens would take 10 s
        assert [reply.status for reply in replies] == [503] * 4
        said = [reply.json()["error"]["message"] for reply in replies]
        assert said.count(CUT) == 1


def test_answers_that_do_not_end_are_cut() -> None:
    replies: list[Reply] = []
    with running_server() as server, server.slow(0.02):
        threads = [ask(server, replies, max_tokens=200)]
        server.until(lambda: server.steps > 5)
        with server.held(busy=True):
            threads.append(ask(server, replies))
            server.until(lambda: in_flight(server) == (1, 1))
            server.call(server.gate.cut)
            for thread in threads:
                thread.join(20)
            assert [(r.status, r.json()["error"]["message"]) for r in replies] == [(503, CUT)] * 2
            server.until(lambda: in_flight(server) == (0, 0))  # counted just after the reply has ended


def test_streams_that_do_not_end_are_cut() -> None:
    request = {"prompt": "1+2=", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with running_server() as server, server.slow(0.02), contextlib.ExitStack() as stack:
        running = stack.enter_context(stream(server, request))
        first = running.readline()
        with server.held(busy=True):
            waiting = stack.enter_context(stream(server, request))
            server.call(server.gate.cut)
            texts = [(first + running.read()).decode(), waiting.read().decode()]
            server.until(lambda: in_flight(server) == (0, 0))
    events = [text.split("\n\n") for text in texts]
    for *_, error, done, end in events:
        assert json.loads(error.removeprefix("data: "))["error"]["message"] == CUT
        assert (done, end) == ("data: [DONE]", "")
    assert [len(parts) > 3 for parts in events] == [True, False]


def test_the_time_that_a_key_takes_is_that_of_its_digest() -> None:
    """The gate compares digests, which have one length, never keys."""
    gate = gates.Gate(None, metrics=None, api_key="k", max_request_bytes=1)  # type: ignore[arg-type]
    assert gate._key is not None
    assert len(gate._key) == 32
    for key, admitted in ((b"k", True), (b"", False), (b"K", False), (b"k" * 10_000, False), (b"\xff", False)):
        with contextlib.nullcontext() if admitted else pytest.raises(HTTPException, match="401"):
            gate._check_key([b"bearer " + key])


def test_a_body_may_be_dropped_while_its_next_part_arrives() -> None:
    metrics: Any = SimpleNamespace(in_flight=set(), answered=lambda *_: None)
    gate = gates.Gate(None, metrics=metrics, api_key=None, max_request_bytes=10)
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": headers}
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        part = asyncio.get_running_loop().create_future()
        request = asyncio.ensure_future(gate(scope, lambda: part, send))
        await asyncio.sleep(0.01)
        part.set_result({"type": "http.request", "body": b"{}", "more_body": False})
        gate._held += 1000
        gate._drop_oldest()
        await request

    asyncio.run(run())
    assert sent[0]["status"] == 429


def test_other_protocols_pass() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    gate = gates.Gate(app, metrics=None, api_key="k", max_request_bytes=1)  # type: ignore[arg-type]
    asyncio.run(gate({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == [{"type": "lifespan"}]


# --- Web pages --------------------------------------------------------------------------------------------------------


def test_a_page_may_ask_where_its_origin_is_named(server: Running) -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    named = TestClient(cors(server.gate, ["https://a.b"]))
    for origin, allowed in (("https://a.b", "https://a.b"), ("https://evil.example", None)):
        asked = named.options("/v1/completions", headers={"origin": origin, **preflight})
        assert (asked.status_code == 200) == (allowed is not None)
        assert asked.headers.get("access-control-allow-origin") == allowed
        refused = named.get("/v1/models", headers={"origin": origin})
        assert refused.status_code == 401  # with the headers, so that the page can read why
        assert refused.headers.get("access-control-allow-origin") == allowed
    every = TestClient(cors(server.gate, ["*"]))
    assert every.get("/health", headers={"origin": "https://c.d"}).headers["access-control-allow-origin"] == "*"
    assert cors(server.gate, []) is server.gate
