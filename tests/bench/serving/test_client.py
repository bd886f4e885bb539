"""The client against a stand-in: what comes back when, what servers refuse, and every way an answer can fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("httpx_aiohttp")

from polymoe.bench.serving import client
from polymoe.bench.serving.client import NO_TOKEN, Client, TimedAnswer
from polymoe.errors import ServerError
from support.standin import Standin, client_of


def ask(standin: Standin, prompt: str = "one two three", tokens: int = 12, **kwargs: Any) -> TimedAnswer:
    async def one() -> TimedAnswer:
        async with client_of(standin.url, **kwargs) as client:
            await client.settle()
            return await client.ask(client.prepare(prompt, tokens))

    return asyncio.run(one())


def settled(standin: Standin, look: Callable[[Client], Any] = lambda client: None, **kwargs: Any) -> Any:
    async def one() -> Any:
        async with client_of(standin.url, **kwargs) as client:
            await client.settle()
            return look(client)

    return asyncio.run(one())


# --- Answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
def test_tokens_come_when_they_come(chat: bool) -> None:
    with Standin(first_s=0.15, gap_s=0.03).running() as standin:
        answer = ask(standin, chat=chat)
    assert answer.error is None
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish_reason) == (4, 12, "length")
    assert len(answer.chunks) == 12
    assert 0.15 <= answer.chunks[0] - answer.sent < 0.4
    assert 11 * 0.03 - 0.1 <= answer.chunks[-1] - answer.chunks[0] < 11 * 0.03 + 0.3
    assert answer.chunks[-1] <= answer.ended < answer.chunks[-1] + 0.3


def test_a_server_without_streams_or_usage() -> None:
    with Standin(streams=False).running() as standin, pytest.raises(ServerError, match="text/event-stream"):
        ask(standin)
    with Standin(usage=False).running() as standin, pytest.raises(ServerError, match="no usage in the stream"):
        ask(standin)


def test_a_stream_may_lack_its_last_event() -> None:
    with Standin(done=False, cached_tokens=3).running() as standin:
        answer = ask(standin)
    assert (answer.error, answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (None, 4, 12, 3)
    assert len(answer.chunks) == 12


def test_an_answer_without_a_token_is_none() -> None:
    with Standin().running() as standin:
        answer = ask(standin, tokens=0)
    assert (answer.error, answer.chunks) == (NO_TOKEN, [])


@pytest.mark.parametrize(
    ("fault", "says", "chunks"),
    [
        ("500", "HTTP 500: a fault", 0),
        ("error", "out of memory", 1),
        ("nonsense", "invalid response: ", 1),
        ("early", "the stream broke off", 1),
        ("cut", "payload is not completed", 1),
    ],
)
def test_every_way_to_fail_is_an_answer_that_says_so(fault: str, says: str, chunks: int) -> None:
    with Standin(breaks={0: fault}).running() as standin:
        answer = ask(standin)
    assert says in (answer.error or "")
    assert len(answer.chunks) == chunks
    assert answer.ended >= answer.sent
    assert not answer.refused


def test_no_room_is_a_refusal() -> None:
    with Standin(room=0).running() as standin:
        answer = ask(standin)
    assert (answer.refused, answer.error) == (True, "HTTP 429: no room")


def test_a_server_that_falls_silent() -> None:
    with Standin(first_s=0.5).running() as standin:
        answer = asyncio.run(_impatient(standin))
    assert "imeout" in (answer.error or "")
    assert answer.ended - answer.sent < 0.45


async def _impatient(standin: Standin) -> TimedAnswer:
    async with client_of(standin.url, model="words", timeout_s=0.2) as client:
        return await client.ask(client.prepare("one", 12))


# --- What is agreed on before ---------------------------------------------------------------------------------------


def test_names_the_model_and_sends_what_every_server_knows() -> None:
    with Standin(owner="vllm").running() as standin:
        assert settled(standin, lambda c: (c.model, c.owner, c.ignores_eos)) == ("words", "vllm", True)
        ask(standin, extra={"top_k": 5})
    assert standin.asked[-1] == {
        "model": "words", "prompt": "one two three", "max_tokens": 12, "stream": True, "temperature": 0,
        "stream_options": {"include_usage": True}, "ignore_eos": True, "top_k": 5,
    }  # fmt: skip


def test_a_server_that_refuses_ignore_eos() -> None:
    with Standin(refuses=("ignore_eos",)).running() as standin:
        assert settled(standin, lambda c: c.ignores_eos) is False
        assert ask(standin).error is None
        assert "ignore_eos" not in standin.asked[-1]
    with Standin(refuses=("stream_options",)).running() as standin, pytest.raises(ServerError, match="HTTP 422: Unexp"):
        settled(standin)


def test_the_key_is_sent_and_its_lack_is_said() -> None:
    with Standin(key="secret").running() as standin:
        assert ask(standin, api_key="secret").error is None
        with pytest.raises(ServerError, match=r"HTTP 401: wrong key\n  hint: --api-key"):
            settled(standin)


def test_a_path_that_is_not_there() -> None:
    with Standin().running() as standin:
        client = client_of(standin.url)
        client._path = "/v1/nothing"
        with pytest.raises(ServerError, match=r"HTTP 404: Not Found\n  hint: --model, or --chat"):
            asyncio.run(_settle(client))


async def _settle(client: Client) -> None:
    async with client:
        await client.settle()


def test_counts_prompts_by_asking() -> None:
    async def count(**kwargs: Any) -> int:
        async with client_of(standin.url, **kwargs) as client:
            await client.settle()
            return await client.count("one two three")

    with Standin(added=5).running() as standin:
        assert asyncio.run(count()) == asyncio.run(count(chat=True)) == 8
    assert standin.asked[-1]["max_tokens"] == 1
    with Standin(context=7, added=3).running() as standin:
        assert settled(standin, lambda c: c.model) == "words"
        standin.added = 6
        with pytest.raises(ServerError, match="the context holds 7 tokens"):
            asyncio.run(count())


# --- Events ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "generated"),
    [
        ({"choices": [{"text": " a"}]}, True),
        ({"choices": [{"text": ""}]}, True),  # half a character
        ({"choices": [{"text": "", "finish_reason": "stop"}]}, False),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, False),
        ({"choices": [{"delta": {"content": "a"}}]}, True),
        ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, True),
        ({"choices": [{"delta": {"reasoning": "hm"}}]}, True),
        ({"choices": [{"delta": {"tool_calls": [{"function": {"arguments": '{"x":'}}]}}]}, True),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, False),
        ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 0}}, False),
    ],
)
def test_what_events_stand_for_a_token(event: dict[str, Any], generated: bool) -> None:
    answer = TimedAnswer(sent=0.0)
    answer.take(event, 1.0)
    assert (answer.chunks, answer.error) == ([1.0] * generated, None)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"error": {"message": "m", "code": 1}}', "m"),
        ('{"error": "m"}', "m"),
        ('{"detail": {"error": {"message": "m"}}}', "m"),
        ('{"object": "error", "message": "m"}', "m"),
        ("<html>m</html>", "<html>m</html>"),
        ("m" * 9999, "m" * 500),
        ('{"error":' * 9000, ('{"error":' * 56)[:500]),
    ],
)
def test_errors_in_all_their_forms(body: str, says: str) -> None:
    assert client._reason(500, body) == f"HTTP 500: {says}"


@pytest.mark.parametrize("event", [[], {"choices": [3]}, {"usage": {"completion_tokens": 1}}])
def test_events_of_another_form_are_invalid(event: Any) -> None:
    with pytest.raises((AttributeError, KeyError, TypeError)):
        TimedAnswer(sent=0.0).take(event, 1.0)
