"""What polymoe adds to Transformers' server: stop strings, sampling, failures; and what it must leave as it is."""

from __future__ import annotations

import asyncio
import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytest.importorskip("prometheus_client")

import openai
from fastapi import HTTPException

from polymoe.engines.transformers import load, paged_attention
from polymoe.errors import UnsupportedProblem
from polymoe.serve import continuous_batching
from polymoe.serve.continuous_batching import Batching, BatchingManager
from polymoe.serve.in_flight import IN_FLIGHT, InFlight
from polymoe.serve.metrics import ServerMetrics
from polymoe.serve.requests import Limits
from support.paged_attention import batching_config, plain_flash
from support.serving import CHECKPOINT, CONTEXT, HELDOUT, Running, user


def said(server: Running, question: str = "498-971=", *, chat: bool, stream: bool, **fields: Any) -> tuple[Any, ...]:
    """Text, finish reason and new tokens of an answer."""
    client = server.client()
    if chat:
        answer: Any = client.chat.completions.create(model="sums", messages=user(question), stream=stream, **fields)
        get = lambda choice: choice.delta.content if stream else choice.message.content  # noqa: E731
    else:
        answer = client.completions.create(model="sums", prompt=question, stream=stream, **fields)
        get = lambda choice: choice.text  # noqa: E731
    parts = list(answer) if stream else [answer]
    text = "".join(get(part.choices[0]) or "" for part in parts)
    return text, parts[-1].choices[0].finish_reason, parts[-1].usage.completion_tokens


EVERY_WAY = pytest.mark.parametrize(("chat", "stream"), [(c, s) for c in (False, True) for s in (False, True)])


@EVERY_WAY
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("7", "-4", 3),
        ("73", "-4", 4),
        (["9", "3"], "-47", 4),
        (["473"], "-", 4),
        ("-", "", 1),
        ("\n", "-473", 5),
        (["never", "74"], "-473", 5),
        ("😀", "-473", 5),
    ],
)
def test_stop_strings(server: Running, stop: Any, text: str, tokens: int, chat: bool, stream: bool) -> None:
    assert said(server, stop=stop, chat=chat, stream=stream) == (text, "stop", tokens)


@EVERY_WAY
def test_an_answer_that_reaches_its_limit_is_cut_where_it_is(server: Running, chat: bool, stream: bool) -> None:
    assert said(server, max_tokens=2, stop="never", chat=chat, stream=stream) == ("-4", "length", 2)
    most = said(server, "1+2=", max_tokens=CONTEXT, chat=chat, stream=stream)
    assert most == ("3", "stop", 2)  # what the context has no room for behind this prompt is no error


def test_a_temperature_samples_and_a_seed_makes_it_repeatable(server: Running) -> None:
    def answers(**fields: Any) -> list[str]:
        return [said(server, chat=False, stream=False, **fields)[0] for _ in range(4)]

    hot = {"temperature": 50.0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    assert len(set(answers(**hot))) > 1
    assert len(set(answers(seed=5, **hot))) == 1
    assert answers(seed=5, **hot) != answers(seed=6, **hot)
    assert set(answers()) == set(answers(temperature=0)) == {"-473"}


def test_reasoning_and_tool_calls_are_parsed_as_transformers_does(server: Running, monkeypatch: Any) -> None:
    """By a template that takes the sign for the opening of a tool call, and 1 to 0 for reasoning."""
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "=",
        "fields": {
            "thinking": {"open": "1", "close": "0", "content": "text"},
            "tool_calls": {
                "open": "-", "close": "<|return|>", "content": "json",
                "transform": {"type": "function", "function": {"name": "note", "arguments": "{content}"}},
                "repeats": True,
            },
            "content": {"close": "<|return|>", "content": "text"},
        },
    }  # fmt: skip
    monkeypatch.setattr(server.tokenizer, "response_template", template, raising=False)
    client = server.client()
    tools: Any = [{"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}]
    ask: dict[str, Any] = {"model": "sums", "messages": user("498-971="), "tools": tools}

    whole: Any = client.chat.completions.create(**ask)
    [call] = whole.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("note", "473")
    assert whole.choices[0].finish_reason == "tool_calls"
    chunks: Any = list(client.chat.completions.create(**ask, stream=True))
    [call] = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("note", "473")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

    ask = {"model": "sums", "messages": user("700+509=")}  # 1209
    whole = client.chat.completions.create(**ask)
    assert (whole.choices[0].message.reasoning_content, whole.choices[0].message.content) == ("2", "9")
    chunks = [chunk.choices[0].delta for chunk in client.chat.completions.create(**ask, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in chunks) == "2"
    assert "".join(delta.content or "" for delta in chunks) == "9"
    for stream in (False, True):
        assert said(server, "700+509=", chat=True, stream=stream, stop="9")[0] == ""
    monkeypatch.undo()
    assert said(server, "700+509=", chat=True, stream=True)[0] == "1209"


def test_reasoning_effort_reaches_the_chat_template(server: Running, monkeypatch: Any) -> None:
    monkeypatch.setattr(server.tokenizer, "chat_template", "{{ 1 if reasoning_effort == 'high' else 2 }}+1=")
    assert said(server, chat=True, stream=False, reasoning_effort="high")[0] == "2"
    assert said(server, chat=True, stream=False)[0] == "3"


def test_tools_are_left_out_when_none_may_be_called(server: Running, monkeypatch: Any) -> None:
    monkeypatch.setattr(server.tokenizer, "chat_template", "{{ 1 if tools else 2 }}+1=")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert said(server, chat=True, stream=False, tools=tools)[0] == "2"
    assert said(server, chat=True, stream=False, tools=tools, tool_choice="none")[0] == "3"


@EVERY_WAY
def test_a_failure_is_an_error_of_openais_form(
    server: Running, monkeypatch: pytest.MonkeyPatch, chat: bool, stream: bool
) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError('no "room"\nfor \\ this')

    monkeypatch.setattr(server.model, "generate", fail)
    with pytest.raises(openai.APIError) as failed:
        said(server, chat=chat, stream=stream)
    message = 'generation failed: no "room"\nfor \\ this'
    assert failed.value.body == {"message": message, "type": "server_error", "param": None, "code": None}
    body = {"messages": user("1+2")} if chat else {"prompt": "1+2="}
    reply = server.post("/v1/chat/completions" if chat else "/v1/completions", {**body, "stream": stream})
    if stream:
        *_, last, done, end = reply.text.split("\n\n")
        assert (json.loads(last.removeprefix("data: "))["error"]["message"], done, end) == (message, "data: [DONE]", "")


@pytest.mark.parametrize(
    ("limits", "wanted", "most"),
    [
        (Limits(100), 100, None),
        (Limits(100), 101, 100),
        (Limits(100, 5), 6, 5),
        (Limits(None, 5), 6, 5),
        (Limits(None), 9**9, None),
    ],
)
def test_what_no_answer_may_have_is_refused(limits: Limits, wanted: int, most: int | None) -> None:
    if most is None:
        limits.check("max_tokens", wanted)
        return
    with pytest.raises(HTTPException) as refused:
        limits.check("max_tokens", wanted)
    error: Any = refused.value.detail
    assert refused.value.status_code == 400
    assert f"has at most {most} tokens" in error["error"]["message"]
    assert error["error"]["param"] == "max_tokens"


def test_continuous_batching_ends_what_nobody_waits_for(server: Running) -> None:
    """With a stand-in for Transformers' batching, which runs on CUDA alone."""
    cancelled: list[str] = []
    batching = SimpleNamespace(
        background_thread_status=SimpleNamespace(fatal_error=None),
        register_result_handler=lambda request_id, handler: None,
        add_request=lambda ids, request_id, **_: request_id,
        cancel_request=cancelled.append,
    )
    metrics = ServerMetrics(name="sums", model=server.model)
    manager = BatchingManager(Limits(100), metrics, Batching())
    manager._cb = batching  # type: ignore[assignment]
    request = InFlight()

    async def ask_and_leave() -> None:
        IN_FLIGHT.set(request)
        config = SimpleNamespace(max_new_tokens=5, eos_token_id=1)
        answer = asyncio.create_task(
            manager.generate_non_streaming(server.model, server.tokenizer, {"input_ids": [1, 2]}, config, "same")
        )
        await asyncio.sleep(0.01)
        assert request.running
        request.leave()
        with pytest.raises(HTTPException) as left:
            await answer
        assert left.value.status_code == 499

    asyncio.run(ask_and_leave())
    assert len(cancelled) == 1
    assert cancelled != ["same"]  # ids of clients' choosing may be equal


def test_requests_share_forward_passes(server: Running, monkeypatch: Any) -> None:
    """With continuous batching itself, and the attention that runs on GPUs by its definition."""
    monkeypatch.setattr(paged_attention, "_flash", plain_flash)
    settings = {"max_batch_tokens": 64, "max_memory_percent": 0.001}
    monkeypatch.setattr(paged_attention, "batching_config", lambda **_: batching_config(**settings))
    model, tokenizer = load(CHECKPOINT, device="cpu")
    metrics = ServerMetrics(name="sums", model=model)
    manager = BatchingManager(Limits(CONTEXT), metrics, Batching(paged=True))

    async def ask(row: Any) -> str:
        IN_FLIGHT.set(InFlight())
        config = copy.deepcopy(model.generation_config)
        config.max_new_tokens = 8
        inputs = {"input_ids": tokenizer(row["prompt"])["input_ids"]}
        text, _, ids = await manager.generate_non_streaming(model, tokenizer, inputs, config, "same")
        assert len(ids) == len(row["answer"]) + 1
        return text

    async def ask_all(rows: Any) -> list[str]:
        return list(await asyncio.gather(*map(ask, rows)))

    manager.init_cb(model, model.generation_config)
    try:
        assert asyncio.run(ask_all(HELDOUT[:12])) == [row["answer"] for row in HELDOUT[:12]]
        assert model.config._attn_implementation == paged_attention.NAME
    finally:
        manager.stop()


def test_graphs_are_where_they_can_be(monkeypatch: Any, server: Running) -> None:
    assert Batching.of(server.model, graphs=None, cache_memory=0.5) == Batching(cache_memory=0.5)  # not on a CPU
    with pytest.raises(UnsupportedProblem, match="CUDA graphs of continuous batching"):
        Batching.of(server.model, graphs=True, cache_memory=None)
    monkeypatch.setattr(paged_attention, "runs_on", lambda _: True)
    assert Batching.of(server.model, graphs=False, cache_memory=None) == Batching(paged=True)
    assert Batching.of(server.model, graphs=None, cache_memory=None) == Batching(paged=True)  # reference looks
    with pytest.raises(UnsupportedProblem, match="got backend 'reference'"):
        Batching.of(server.model, graphs=True, cache_memory=None)
    monkeypatch.setattr(continuous_batching, "require_capturable", lambda _: None)
    assert Batching.of(server.model, graphs=None, cache_memory=None) == Batching(paged=True, graphs=True)
