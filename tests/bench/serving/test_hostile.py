"""The client against servers that send anything, for ever: every request ends, and no wrong number is used."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("httpx_aiohttp")

from bench.serving.test_run import BATCH, ORIGIN
from polymoe.bench.serving.client import NO_TOKEN, TimedAnswer
from polymoe.bench.serving.prompts import Prompts
from polymoe.bench.serving.record import record
from polymoe.errors import ArgumentError, ServerError
from support.standin import client_of

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
TOKEN = b'data: {"choices": [{"text": " a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
PAUSE = b""
"""In a script: 20 ms without a byte."""


def asked(script: Iterable[bytes], tokens: int = 4, **options: Any) -> TimedAnswer:
    """The answer to one request of a server that sends these parts, and then closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            for part in script:
                if part == PAUSE:
                    await asyncio.sleep(0.02)
                writer.write(part)
                await writer.drain()
        except ConnectionError:
            pass  # the client has seen enough
        finally:
            writer.close()

    async def run() -> TimedAnswer:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            async with client_of(url, model="words", **options) as client:
                return await asyncio.wait_for(client.ask(client.prepare("one two", tokens)), 20)
        finally:
            server.close()

    return asyncio.run(run())


def usage(**counts: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


ENDLESS: dict[str, tuple[Callable[[], Iterable[bytes]], dict[str, float], str]] = {
    "tokens": (lambda: itertools.repeat(TOKEN), {}, r"\d{4,5} events"),
    "empty events": (lambda: itertools.repeat(b"data: {}\n\n"), {}, r"\d{4,5} events"),
    "tokens behind the end": (lambda: itertools.chain([DONE], itertools.repeat(TOKEN)), {}, r"\d{4,5} events"),
    "bytes": (lambda: itertools.repeat(b"data: " + b"x" * 2**16), {}, r"more than \d+ bytes"),
    "comments": (lambda: itertools.repeat(b":" + b"x" * 2**16 + b"\n\n"), {}, r"more than \d+ bytes"),
    "pings": (lambda: itertools.cycle([PAUSE, b": ping\n\n"]), {"timeout_s": 1.0}, r"no event for 1 s"),
    "slow tokens": (lambda: itertools.cycle([PAUSE, TOKEN]), {"request_timeout_s": 0.4}, r"not complete after 0\.4 s"),
    "silence": (lambda: itertools.repeat(PAUSE), {"timeout_s": 0.3}, "imeout"),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_endless_streams_end(kind: str) -> None:
    script, options, says = ENDLESS[kind]
    answer = asked(itertools.chain([HEAD], script()), **options)
    assert answer.error is not None
    assert re.search(says, answer.error), answer.error


@pytest.mark.parametrize(("status", "says"), [("200 OK", r"more than \d+ bytes"), ("500 Fault", "HTTP 500")])
def test_endless_bodies_end(status: str, says: str) -> None:
    answer = asked(itertools.chain([f"HTTP/1.1 {status}\r\n\r\n".encode()], itertools.repeat(b" " * 2**16)))
    assert re.search(says, answer.error or "")


def test_endless_headers_end() -> None:
    answer = asked(
        itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.cycle([PAUSE, b"x: y\r\n"])), request_timeout_s=0.3
    )
    assert answer.error == "timeout: not complete after 0.3 s"


def test_other_replies_are_answers_that_say_so() -> None:
    def reply(head: str, body: bytes = b"") -> TimedAnswer:
        return asked([f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body])

    assert "a redirect to 'http://127.0.0.1:9/x'" in (reply("307 No\r\nLocation: http://127.0.0.1:9/x").error or "")
    assert "invalid response" in (reply("200 OK\r\nContent-Type: text/html", b"<html>").error or "")
    assert "invalid response" in (reply("200 OK\r\nContent-Encoding: gzip", gzip.compress(b"{}")).error or "")
    assert "levels of JSON" in (reply("200 OK", b"[" * 100_000).error or "")
    assert reply("500 No", b"[" * 100_000).error == "HTTP 500: " + "[" * 500
    said = reply("500 No", b'{"error": "\\u001b[2J\\nm"}').error or ""
    assert said == "HTTP 500: [2J m"


def test_an_empty_stream_is_no_token() -> None:
    for script in ([DONE], [b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n', DONE]):
        answer = asked([HEAD, *script])
        assert (answer.error, answer.chunks) == (NO_TOKEN, [])
    counted = asked([HEAD, usage(prompt_tokens=2, completion_tokens=1), DONE])  # an end token
    assert (counted.error, counted.chunks) == (None, [counted.ended])


def test_an_event_in_several_lines_of_either_end_is_one() -> None:
    event = '{"choices":\ndata: [{"text": "ü😀"}]}'.encode()
    stream = (b"data: " + event + b"\n\n" + DONE).replace(b"\n", b"\r\n")
    answer = asked([HEAD, *(stream[i : i + 1] for i in range(len(stream)))])
    assert (answer.error, answer.text, len(answer.chunks)) == (None, "ü😀", 1)


WRONG: list[dict[str, Any]] = [
    {"prompt_tokens": 50, "completion_tokens": -20},
    {"prompt_tokens": 50, "completion_tokens": 10**15},
    {"prompt_tokens": 50, "completion_tokens": 21},
    {"prompt_tokens": 50, "completion_tokens": 0},
    {"prompt_tokens": 50, "completion_tokens": True},
    {"prompt_tokens": 50, "completion_tokens": 1.5},
    {"prompt_tokens": 50, "completion_tokens": "20"},
    {"prompt_tokens": 0, "completion_tokens": 2},
    {"prompt_tokens": 10**8, "completion_tokens": 2},
    {"prompt_tokens": 50, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 51}},
    {"prompt_tokens": 50, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": -1}},
]


@pytest.mark.parametrize("counts", WRONG, ids=str)
def test_wrong_counts_are_said_and_not_turned_into_rates(counts: dict[str, Any]) -> None:
    answer = asked([HEAD, TOKEN, PAUSE, TOKEN, usage(**counts), DONE], tokens=20)
    assert (answer.error, answer.prompt_tokens, answer.completion_tokens) == (None, None, None)
    found = record(replace(BATCH, batch_size=1), ORIGIN, [answer], prompt_tokens=50)
    assert (found.input_tokens, found.output_tokens, found.counted_by) == (50, 2, "chunks")
    assert any(note.startswith("the server's counts cannot be true in 1 answers") for note in found.notes)
    assert found.cache_hit_rate is None


def test_true_counts_are_taken() -> None:
    counts = {"prompt_tokens": 50, "completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 50}}
    answer = asked([HEAD, TOKEN, usage(**counts), DONE], tokens=20)
    assert (answer.wrong_counts, answer.completion_tokens, answer.cached_tokens) == (None, 20, 50)
    several = asked([HEAD, TOKEN, usage(prompt_tokens=50, completion_tokens=60), DONE], tokens=20, extra={"n": 3})
    assert several.completion_tokens == 60
    longer = asked([HEAD, TOKEN, usage(completion_tokens=60), DONE], tokens=20, extra={"max_tokens": 60})
    assert longer.completion_tokens == 60


@pytest.mark.parametrize("counts", [lambda n: n**3, lambda n: 10**9, lambda n: 1 + n // 50])
def test_a_server_that_counts_nonsense_makes_no_endless_prompt(counts: Callable[[int], int]) -> None:
    async def count(text: str) -> int:
        return counts(len(text.split()))

    async def make() -> None:
        prompts = Prompts(count, seed=1)
        await prompts.calibrate()
        await prompts.make(64, 1)

    with pytest.raises((ArgumentError, ServerError)):
        asyncio.run(make())
