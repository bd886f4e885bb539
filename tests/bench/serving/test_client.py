"""The client against a stand-in: what comes back when, what servers refuse, and every way an answer can fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("httpx_aiohttp")

from polymoe.bench.serving.client import NO_TOKEN, Client, TimedAnswer
from polymoe.common.openai_client import read_completion
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
    assert answer.streamed
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish_reason) == (4, 12, "length")
    assert answer.text == " word" * 12
    assert len(answer.chunks) == 12
    assert 0.15 <= answer.chunks[0] - answer.sent < 0.4
    assert 11 * 0.03 - 0.1 <= answer.chunks[-1] - answer.chunks[0] < 11 * 0.03 + 0.3
    assert answer.chunks[-1] <= answer.ended < answer.chunks[-1] + 0.3


def test_a_server_that_does_not_stream() -> None:
    with Standin(streams=False, cached_tokens=3).running() as standin:
        answer = ask(standin)
    assert (answer.error, answer.streamed, len(answer.chunks)) == (None, False, 1)
    assert (answer.completion_tokens, answer.cached_tokens, answer.text) == (12, 3, " word" * 12)


def test_a_stream_without_usage_or_done() -> None:
    with Standin(usage=False, done=False).running() as standin:
        answer = ask(standin)
    assert (answer.error, answer.prompt_tokens, answer.completion_tokens) == (None, None, None)
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
        assert settled(standin, lambda c: (c.model.name, c.model.owner, c.refused_fields)) == ("words", "vllm", ())
        ask(standin, extra={"top_k": 5})
    assert standin.asked[-1] == {
        "model": "words", "prompt": "one two three", "max_tokens": 12, "stream": True, "temperature": 0,
        "stream_options": {"include_usage": True}, "ignore_eos": True, "top_k": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("refuses", "left_out"),
    [
        (("ignore_eos",), ("ignore_eos",)),
        (("stream_options", "ignore_eos"), ("stream_options", "ignore_eos")),
        (("temperature",), ("temperature", "stream_options", "ignore_eos")),
    ],
)
def test_fields_that_a_server_refuses_are_left_out(refuses: tuple[str, ...], left_out: tuple[str, ...]) -> None:
    with Standin(refuses=refuses).running() as standin:
        assert settled(standin, lambda c: c.refused_fields) == left_out
        assert ask(standin).error is None
    assert not set(left_out) & standin.asked[-1].keys()


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
    assert (standin.asked[-1]["max_tokens"], standin.asked[-1]["stream"]) == (1, False)
    assert "stream_options" not in standin.asked[-1]  # refused by some where there is no stream
    with Standin(usage=False).running() as standin, pytest.raises(ServerError, match="name the model's tokenizer"):
        asyncio.run(count())
    with Standin(context=7, added=3).running() as standin:
        assert settled(standin, lambda c: c.model.name) == "words"
        standin.added = 6
        with pytest.raises(ServerError, match="the context holds 7 tokens"):
            asyncio.run(count())


# --- Events ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "text", "generated"),
    [
        ({"choices": [{"text": " a"}]}, " a", True),
        ({"choices": [{"text": ""}]}, "", True),  # half a character
        ({"choices": [{"text": "", "finish_reason": "stop"}]}, "", False),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, "", False),
        ({"choices": [{"delta": {"content": "a"}}]}, "a", True),
        ({"choices": [{"delta": {"reasoning_content": "hm", "reasoning": "hm"}}]}, "hm", True),
        ({"choices": [{"delta": {"tool_calls": [{"function": {"arguments": '{"x":'}}]}}]}, '{"x":', True),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, "", False),
        ({"choices": [], "usage": {"prompt_tokens": 3}}, "", False),
        ({"choices": [{"message": {"content": "all"}, "finish_reason": "stop"}]}, "all", True),
    ],
)
def test_what_events_stand_for_a_token(event: dict[str, Any], text: str, generated: bool) -> None:
    piece = read_completion(json.dumps(event))
    assert (piece.text + piece.reasoning, piece.generated, piece.error) == (text, generated, None)
