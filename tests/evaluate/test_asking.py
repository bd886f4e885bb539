"""Asking a server: what is sent, how many at once, what is retried, and when to give up."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import gzip
import itertools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx_aiohttp")

from polymoe.common import openai_client as server_module
from polymoe.common.openai_client import ServerConnection
from polymoe.errors import ArgumentError, ServerError
from polymoe.evaluate import Run, Server, evaluate, read_records
from polymoe.evaluate.asking import FAILURES_IN_A_ROW, answer_of
from support.evaluation import Reply, add, refused, said, serving, sums


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between retries of some milliseconds."""
    monkeypatch.setattr(server_module, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(server_module, "LONGEST_WAIT_S", 0.02)


def run(tmp_path: Path, url: str, count: int = 20, **options: Any) -> Run:
    to = {name: options.pop(name) for name in ("concurrency", "timeout_s", "retries", "api_key") if name in options}
    data = options.pop("data", None) or sums(tmp_path / "sums.jsonl", count)
    return evaluate(data, server=Server(url=url, **to), **{"out": tmp_path / "answers.jsonl", **options})


def test_every_question_is_asked_once_and_scored(tmp_path: Path) -> None:
    with serving(add) as server:
        found = run(tmp_path, server.url, api_key="secret")
    assert found.score is not None
    assert (found.score.answers, found.score.pass_at_1, found.failures) == (20, 1.0, ())
    assert sorted(r["messages"][0]["content"] for r in server.requests) == sorted(f"{i}+1=" for i in range(20))
    assert {r["key"] for r in server.requests} == {"Bearer secret"}
    assert {r["path"] for r in server.requests} == {"/v1/chat/completions"}
    # Nothing is sent that was not asked for: the server's own defaults hold.
    assert {frozenset(r) - {"path", "key"} for r in server.requests} == {frozenset({"model", "messages"})}
    records = read_records(tmp_path / "answers.jsonl")[1]
    assert all(r.latency_us > 0 and r.completion_tokens == 3 and r.prompt_tokens == 5 for r in records)


def test_settings_are_sent(tmp_path: Path) -> None:
    with serving(add) as server:
        run(
            tmp_path, server.url + "/v1/", 3, repeats=2, temperature=0.6, top_p=0.9, max_tokens=100, seed=7,
            system="Be brief.", extra={"chat_template_kwargs": {"reasoning_effort": "high"}},
        )  # fmt: skip
        for body in server.requests:
            assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.6, 0.9, 100)
            assert body["messages"][0] == {"role": "system", "content": "Be brief."}
            assert body["chat_template_kwargs"] == {"reasoning_effort": "high"}
        seeds = {body["seed"] for body in server.requests}
        assert len(seeds) == 6
        run(tmp_path, server.url, 3, repeats=2, seed=7, out=tmp_path / "again.jsonl")
        assert {body["seed"] for body in server.requests} == seeds


def test_completions_go_without_the_chat_template(tmp_path: Path) -> None:
    with serving(add) as server:
        found = run(tmp_path, server.url, 3, endpoint="completions")
    assert found.score is not None
    assert found.score.pass_at_1 == 1
    assert {(r["path"], r["prompt"]) for r in server.requests} == {("/v1/completions", f"{i}+1=") for i in range(3)}


def test_wrong_invalid_and_cut_off_answers_are_told_apart(tmp_path: Path) -> None:
    answers = [said("1"), said("9"), said(""), said(None), said("<think>long", finish_reason="length")]
    with serving(lambda _, number: answers[number]) as server:
        found = run(tmp_path, server.url, 5, concurrency=1)
    assert found.score is not None
    assert (found.score.correct, found.score.invalid, found.score.cut_off) == (1, 3, 1)


def test_requests_are_sent_together_up_to_the_limit(tmp_path: Path) -> None:
    def slow(body: dict[str, Any], _: int) -> Reply:
        time.sleep(0.05)
        return add(body)

    with serving(slow) as server:
        run(tmp_path, server.url, 40, concurrency=5)
    assert server.most_at_once == 5


@pytest.mark.parametrize("status", [429, 500, 503, 408])
def test_what_may_pass_is_tried_again(tmp_path: Path, status: int) -> None:
    tried: dict[str, int] = {}

    def sometimes(body: dict[str, Any], _: int) -> Reply:
        prompt = body["messages"][0]["content"]
        tried[prompt] = tried.get(prompt, 0) + 1
        return add(body) if tried[prompt] == 3 else refused(status)

    with serving(sometimes) as server:
        found = run(tmp_path, server.url, 5, retries=3)
    assert found.score is not None
    assert (found.score.pass_at_1, found.failures) == (1, ())
    assert {r.retries for r in read_records(tmp_path / "answers.jsonl")[1]} == {2}


def test_latency_is_that_of_the_request_that_succeeded(tmp_path: Path) -> None:
    def first_late(body: dict[str, Any], number: int) -> Reply:
        time.sleep(0.5 if number == 0 else 0)
        return refused(500) if number == 0 else add(body)

    with serving(first_late) as server:
        run(tmp_path, server.url, 1)
    [record] = read_records(tmp_path / "answers.jsonl")[1]
    assert record.retries == 1
    assert record.latency_us < 400_000


def test_timeouts_are_tried_again(tmp_path: Path) -> None:
    release = threading.Event()

    def hang(body: dict[str, Any], number: int) -> Reply:
        if number == 0:
            release.wait(10)
        return add(body)

    with serving(hang) as server:
        found = run(tmp_path, server.url, 2, concurrency=1, timeout_s=0.5)
        release.set()
    assert found.score is not None
    assert found.score.pass_at_1 == 1


def test_a_server_that_goes_on_saying_429_is_asked_less_at_once(tmp_path: Path) -> None:
    places = threading.Semaphore(2)  # requests that are refused take none, however long their refusal takes

    def two_at_once(body: dict[str, Any], _: int) -> Reply:
        if not places.acquire(blocking=False):
            return refused(429, retry_after="0.01")
        try:
            time.sleep(0.03)
            return add(body)
        finally:
            places.release()

    with serving(two_at_once) as server:
        found = run(tmp_path, server.url, 40, concurrency=30, retries=1)
    assert found.score is not None
    assert (found.score.pass_at_1, found.score.answers, found.failures) == (1, 40, ())


def test_a_question_that_fails_is_asked_again_by_the_next_run(tmp_path: Path) -> None:
    def bad_seven(body: dict[str, Any], _: int) -> Reply:
        return refused(500, "overheated") if body["messages"][0]["content"] == "7+1=" else add(body)

    with serving(bad_seven) as server:
        first = run(tmp_path, server.url, 12, retries=1)
    assert first.score is not None
    assert (first.score.answers, len(first.failures)) == (11, 1)
    assert "overheated" in first.failures[0]
    with serving(add) as server:
        second = run(tmp_path, server.url, 12)
    assert second.score is not None
    assert (second.score.answers, second.failures) == (12, ())
    assert [r["messages"][0]["content"] for r in server.requests] == ["7+1="]


def test_a_server_that_only_fails_ends_the_run(tmp_path: Path) -> None:
    def ten_then_none(body: dict[str, Any], number: int) -> Reply:
        return add(body) if number < 10 else refused(500, "out of memory")

    with serving(ten_then_none) as server:
        with pytest.raises(ServerError, match=rf"{FAILURES_IN_A_ROW} failures in a row.*out of memory"):
            run(tmp_path, server.url, 1000, retries=0, concurrency=4)
        assert len(server.requests) < 30
    assert len(read_records(tmp_path / "answers.jsonl")[1]) == 10


@pytest.mark.parametrize(("status", "says"), [(401, "--api-key"), (403, "no"), (404, "no")])
def test_a_refusal_of_every_request_ends_the_run_at_once(tmp_path: Path, status: int, says: str) -> None:
    with serving(lambda body, number: refused(status)) as server:
        with pytest.raises(ServerError, match=says):
            run(tmp_path, server.url, 100, concurrency=3)
        assert len(server.requests) <= 6


def test_a_prompt_that_is_too_long_is_an_invalid_answer(tmp_path: Path) -> None:
    def short_memory(body: dict[str, Any], _: int) -> Reply:
        status, error, headers = refused(400, "the prompt has 300 tokens")
        error["error"]["code"] = "context_length_exceeded"
        return (status, error, headers) if body["messages"][0]["content"] == "3+1=" else add(body)

    with serving(short_memory) as server:
        found = run(tmp_path, server.url, 5)
    assert found.score is not None
    assert (found.score.answers, found.score.correct, found.score.invalid, found.failures) == (5, 4, 1, ())
    # It may as well be that this many tokens fit behind no prompt.
    with serving(short_memory) as server:
        found = run(tmp_path, server.url, 5, max_tokens=300, out=tmp_path / "other")
    assert found.score is not None
    assert (found.score.answers, found.score.invalid, len(found.failures)) == (4, 0, 1)


def with_usage(**counts: Any) -> Reply:
    status, body, headers = said("3")
    return status, {**body, "usage": {**body["usage"], **counts}}, headers


def drips(body: bytes, *, every_s: float = 0.02) -> Iterator[bytes]:
    """White space, which JSON allows, for longer than any test waits."""
    yield body
    for _ in range(200):
        time.sleep(every_s)
        yield b" "


MALFORMED: dict[str, tuple[Callable[[], Reply], str]] = {
    "no choices": (lambda: (200, {}, {}), r"no answer in the response: \{\}"),
    "empty choices": (lambda: (200, {"choices": []}, {}), "no answer in the response"),
    "no message": (lambda: (200, {"choices": [{"index": 0}]}, {}), "no answer in the response"),
    "choices of text": (lambda: (200, {"choices": ["3"]}, {}), "no delta in '3'"),
    "a list": (lambda: (200, [1], {}), "no choices in"),
    "a number as text": (lambda: (200, {"choices": [{"message": {"content": 3}}]}, {}), "content is 3"),
    "parts as text": (lambda: (200, {"choices": [{"message": {"content": [{"text": "3"}]}}]}, {}), "content is "),
    "a number as reason": (lambda: said("3", finish_reason=3), "finish_reason is 3"),  # type: ignore[arg-type]
    "half of it": (lambda: (200, b'{"choices": [', {}), "not JSON"),
    "empty": (lambda: (200, b"", {}), "not JSON"),
    "a page": (lambda: (200, b"<html>\x1b[2Jlog in</html>", {"content-type": "text/html"}), r"<html> \[2Jlog in"),
    "events": (lambda: (200, b"data: {}\n\n", {"content-type": "text/event-stream"}), "not JSON"),
    "no UTF-8": (lambda: (200, b'{"choices": "\xff"}', {}), "not JSON"),
    "deep": (lambda: (200, b"[" * 100_000, {}), "levels of JSON"),
    "encoded": (lambda: (200, gzip.compress(b"{}"), {"content-encoding": "gzip"}), "not JSON"),
    "negative tokens": (lambda: with_usage(completion_tokens=-3), "completion_tokens is -3"),
    "absurd tokens": (lambda: with_usage(prompt_tokens=10**18), "prompt_tokens is 10"),
    "true tokens": (lambda: with_usage(completion_tokens=True), "completion_tokens is True"),
    "NaN tokens": (lambda: with_usage(completion_tokens=float("nan")), "NaN is not JSON"),
    "tokens in text": (lambda: with_usage(completion_tokens="3"), "completion_tokens is '3'"),
    "usage in a list": (lambda: (200, {**said("3")[1], "usage": [3]}, {}), r"usage is \[3\]"),
    "a redirect": (lambda: (307, b"", {"location": "http://127.0.0.1:9/v1"}), "redirect to 'http://127.0.0.1:9/v1'"),
    "nothing": (lambda: (204, b"", {}), "HTTP 204"),
    "too much": (lambda: (200, itertools.repeat(b" " * 2**20), {}), r"more than \d+ bytes"),
    "an endless body": (lambda: (200, drips(b'{"choices": '), {}), r"not complete after 0\.5 s"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_reply_that_is_not_a_response_is_an_invalid_answer(tmp_path: Path, kind: str) -> None:
    reply, says = MALFORMED[kind]
    with serving(lambda body, number: reply() if body["messages"][0]["content"] == "2+1=" else add(body)) as server:
        found = run(tmp_path, server.url, 4, timeout_s=0.5 if kind == "an endless body" else 30)
    assert len(server.requests) == 4  # none is repeated
    assert found.score is not None
    assert (found.score.answers, found.score.correct, found.score.invalid, found.failures) == (4, 3, 1, ())
    (message,) = found.malformed
    assert re.search(says, message)
    assert "\x1b" not in message
    wrong = next(r for r in read_records(tmp_path / "answers.jsonl")[1] if r.malformed)
    assert (wrong.answer, wrong.correct, wrong.text) == (None, False, "")


def test_a_run_continues_behind_any_number_of_malformed_replies(tmp_path: Path) -> None:
    with serving(lambda body, number: (200, b"<html>", {}) if number < 30 else add(body)) as server:
        found = run(tmp_path, server.url, 40, concurrency=4)
    assert found.score is not None
    assert (found.score.invalid, found.score.correct, len(found.malformed)) == (30, 10, 30)


def test_a_redirect_is_not_followed_with_question_and_key(tmp_path: Path) -> None:
    with (
        serving(add) as other,
        serving(lambda *_: (307, b"", {"location": f"{other.url}/v1/chat/completions"})) as server,
    ):
        run(tmp_path, server.url, 3)
    assert other.requests == []


def test_headers_that_never_end_are_a_timeout(tmp_path: Path) -> None:
    """A timeout of each read would never pass: bytes keep arriving."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
                while True:
                    connection.sendall(b"x")
                    time.sleep(0.02)

        thread = threading.Thread(target=drip)
        thread.start()
        started = time.monotonic()
        to = Server(url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3, retries=0)
        with pytest.raises(ServerError, match=r"no reply within 0\.3 s"):
            asyncio.run(_once(to))
        assert time.monotonic() - started < 2
        thread.join()


async def _once(to: Server) -> None:
    async with ServerConnection(to) as session:
        await session.request("GET", "/models")


def test_an_error_with_the_wrong_status_is_a_failure(tmp_path: Path) -> None:
    with serving(lambda *_: (200, {"error": "overheated"}, {})) as server:
        found = run(tmp_path, server.url, 2, retries=0)
    assert (found.score, len(found.failures)) == (None, 2)
    assert "HTTP 200: overheated" in found.failures[0]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3), ("0.5", 0.5), ("", None), ("-1", None), ("nan", None), ("inf", None), ("1e9", None), ("soon", None)],
)
def test_how_long_a_server_asks_to_wait(header: str, seconds: float | None) -> None:
    assert server_module._retry_after_s(header) == seconds
    date = email.utils.formatdate(time.time() + 30, usegmt=True)
    assert 25 < (server_module._retry_after_s(date) or 0) < 31


def test_a_run_goes_on_and_may_ask_for_more(tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    with serving(add) as server:
        for limit, repeats in ((5, 1), (12, 1), (12, 3), (12, 3)):
            run(
                tmp_path,
                server.url,
                limit=limit,
                repeats=repeats,
                on_start=lambda path, done, total: progress.append((done, total)),
            )
    assert progress == [(0, 5), (5, 12), (12, 36), (36, 36)]
    assert len(server.requests) == 36


def test_other_settings_do_not_mix(tmp_path: Path) -> None:
    with serving(add) as server:
        run(tmp_path, server.url, 2)
        with pytest.raises(ArgumentError, match=r"temperature: None, not 0\.5"):
            run(tmp_path, server.url, 2, temperature=0.5)
        with pytest.raises(ArgumentError, match="data_sha256"):
            run(tmp_path, server.url, 3)
        assert len(server.requests) == 2


def test_by_default_each_settings_have_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(add, models=("org/a model",)) as server:
        paths = [run(tmp_path, server.url, 2, out=None, temperature=t).path for t in (None, 0.5, None)]
    assert paths[0] == paths[2] != paths[1]
    assert paths[0].name.startswith("eval-sums-org-a-model-")
    assert len(server.requests) == 4


def test_which_model(tmp_path: Path) -> None:
    with serving(add, models=("small", "large")) as server:
        with pytest.raises(ServerError, match=r"expected one model, got large, small\n  hint: choose one with --model"):
            run(tmp_path, server.url)
        with pytest.raises(ServerError, match="did you mean 'small'"):
            run(tmp_path, server.url, model="smal")
        assert run(tmp_path, server.url, 1, model="large").settings.model == "large"
        assert server.requests[0]["model"] == "large"
    with serving(add, models=()) as server:  # it does not list them
        assert run(tmp_path, server.url, 1, model="x", out=tmp_path / "x").settings.model == "x"
        with pytest.raises(ServerError, match="expected a list of models at /models, got HTTP 404"):
            run(tmp_path, server.url, 1)


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with serving(add) as server:
        url = server.url
    with pytest.raises(ServerError, match=rf"{url}/v1: expected a server that answers, got Cannot connect to host"):
        run(tmp_path, url)
    assert not (tmp_path / "answers.jsonl").exists()


@pytest.mark.parametrize(
    ("url", "base", "root"),
    [
        ("http://h:1", "http://h:1/v1", "http://h:1"),
        ("http://h:1/", "http://h:1/v1", "http://h:1"),
        ("http://h:1/v1/", "http://h:1/v1", "http://h:1"),
        ("https://h/api/openai", "https://h/api/openai", "https://h/api/openai"),
    ],
)
def test_urls(url: str, base: str, root: str) -> None:
    server = Server(url=url)
    assert (server.base_url, server.root, server.host) == (base, root, "h")


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://", "http://h:x", "http://[::1"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ArgumentError, match="a URL such as"):
        Server(url=url)


def test_a_key_that_no_header_can_have() -> None:
    with pytest.raises(ArgumentError, match="printable ASCII"):
        Server(url="http://h", api_key="secret\r\nx: y")


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(Server(url="http://h", api_key="secret"))


def test_a_system_message_needs_a_chat(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="system message"):
        run(tmp_path, "http://h", endpoint="completions", system="x")
    with pytest.raises(ArgumentError, match="endpoint"):
        run(tmp_path, "http://h", endpoint="chats")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 42\n", "42"),
        ("<think>1 or 2</think>\n\n2", "2"),
        ("maybe 1</think>2", "2"),
        ("\n<think>1, no", None),
        ("<think>1</think> ", None),
        ("", None),
        ("a <think>", "a <think>"),
    ],
)
def test_the_answer_is_the_text_after_the_reasoning(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer
