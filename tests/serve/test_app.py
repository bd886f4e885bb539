"""Answers of the application to OpenAI's own client, and which endpoints there are."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from support.serving import CONTEXT, HELDOUT, KEY, TOOLS, UNENDING, Running, said, user


def test_lists_the_model_and_is_healthy(server: Running) -> None:
    [model] = server.client().models.list()
    assert (model.id, model.max_model_len) == ("sums", CONTEXT)  # type: ignore[attr-defined]
    assert server.client().models.retrieve("sums") == model
    assert server.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/load_model", "/reset", "/v1/responses", "/v1/audio/transcriptions", "/redoc"])
def test_nothing_else_is_offered(server: Running, path: str) -> None:
    refused = server.post(path, {"model": "sums"})
    assert refused.status == 404
    assert "there is POST /v1/chat/completions, POST /v1/completions, GET /v1/models" in refused.text
    assert [model.id for model in server.client().models.list()] == ["sums"]


def test_completions_answer_sums(server: Running) -> None:
    for row in HELDOUT[:4]:
        answer = server.client().completions.create(model="sums", prompt=row["prompt"])
        assert answer.choices[0].text == row["answer"]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(row["prompt"])
        assert answer.usage.completion_tokens == len(row["answer"]) + 1


def test_chat_answers_sums(server: Running) -> None:
    answer: Any = server.client().chat.completions.create(model="sums", messages=user("What is 12+34?"))
    assert answer.choices[0].message.content == "46"
    assert answer.choices[0].finish_reason == "stop"


def test_streams_say_the_same_in_pieces(server: Running) -> None:
    client = server.client()
    chunks = list(client.completions.create(model="sums", prompt="512+499=", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "1011"
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len(chunks) > 2

    chat: Any = client.chat.completions.create(model="sums", messages=user("512+499"), stream=True)
    deltas = [c.choices[0] for c in chat]
    assert "".join(d.delta.content or "" for d in deltas) == "1011"
    assert deltas[-1].finish_reason == "stop"


def test_ends_at_the_context(server: Running) -> None:
    client = server.client()
    full: Any = client.chat.completions.create(model="sums", messages=user("1" * 240), **UNENDING)  # type: ignore[arg-type]
    assert full.usage.total_tokens == CONTEXT
    assert full.choices[0].finish_reason == "length"


def test_16_requests_at_once(server: Running) -> None:
    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
            requests = [
                client.completions.create(model="sums", prompt=row["prompt"], max_tokens=8) for row in HELDOUT[:8]
            ]
            chats = [
                client.chat.completions.create(model="sums", messages=user(row["prompt"]))  # type: ignore[arg-type]
                for row in HELDOUT[8:16]
            ]
            answers = await asyncio.gather(*requests, *chats)
        return [getattr(a.choices[0], "text", None) or a.choices[0].message.content for a in answers]

    assert asyncio.run(all_at_once()) == [row["answer"] for row in HELDOUT[:16]]


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_ends_with_the_usage_when_asked_to(server: Running, chat: bool) -> None:
    """As in OpenAI's API, in a part without choices."""
    client = server.client()
    create: Any = client.chat.completions.create if chat else client.completions.create
    ask = {"messages": user("1+2=")} if chat else {"prompt": "1+2="}
    *parts, last = create(model="sums", stream=True, stream_options={"include_usage": True}, **ask)
    assert (last.choices, last.usage.completion_tokens, last.usage.total_tokens) == ([], 2, 6)
    assert [part.usage for part in parts] == [None] * len(parts)
    assert parts[-1].choices[0].finish_reason == "stop"
    assert {part.id for part in parts} == {last.id}


def test_a_request_has_an_id(server: Running) -> None:
    for given, kept in (("mine-7", True), ("a b", False), ("x" * 200, False), ("é", False)):
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", "X-Request-Id": given}
        for body, status in ((b'{"prompt": "1+2="}', 200), (b"{", 400)):
            reply = server._send("POST", "/v1/completions", body, headers, 60)
            assert reply.status == status
            assert (reply.headers["x-request-id"] == given) == kept
            assert status == 400 or reply.json()["id"] == reply.headers["x-request-id"]


# --- Chat templates ---------------------------------------------------------------------------------------------------


def test_reasoning_and_tool_calls_are_parsed_as_transformers_does(server: Running, monkeypatch: Any) -> None:
    """With a template that reads a minus sign as the start of a tool call, and text between 1 and 0 as reasoning."""
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
    ask: dict[str, Any] = {"model": "sums", "messages": user("498-971="), "tools": TOOLS}
    monkeypatch.setattr(server.tokenizer, "chat_template", "{# tools #}{{ messages[0].content }}")

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


def test_fields_of_the_chat_template(server: Running, monkeypatch: Any) -> None:
    for of_the_template, given, others in (
        ("reasoning_effort == 'high'", {"reasoning_effort": "high"}, {}),
        ("tools", {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}),
    ):
        monkeypatch.setattr(server.tokenizer, "chat_template", f"{{{{ 1 if {of_the_template} else 2 }}}}+1=")
        assert said(server, chat=True, stream=False, **given)[0] == "2"
        assert said(server, chat=True, stream=False, **others)[0] == "3"


def test_what_the_chat_template_refuses_is_said(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for template, says in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 + messages }}", "unsupported operand"),
        ("{{ [1, 2][messages[0].content | int] }}{{ nothing.x }}", "undefined"),
        ("{{ messages", "unexpected end"),
        (None, "no chat template"),
    ):
        monkeypatch.setattr(server.tokenizer, "chat_template", template)
        with pytest.raises(openai.BadRequestError, match=says):
            server.client().chat.completions.create(model="sums", messages=user("1+2"))  # type: ignore[arg-type]
