"""Requests that are refused with 400 and a message that says why; limits on lengths."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from polymoe.serve.limits import Limits
from support.serving import AUTHORIZED, CONTEXT, TOOLS, Running, refused, user


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [CONTEXT, 3 * CONTEXT])
def test_a_prompt_longer_than_the_context_is_refused(server: Running, length: int, stream: bool) -> None:
    client = server.client()
    for call in (
        lambda: client.completions.create(model="sums", prompt="1" * length, stream=stream),
        lambda: client.chat.completions.create(model="sums", messages=user("1" * length), stream=stream),  # type: ignore[call-overload]
    ):
        with pytest.raises(openai.BadRequestError, match=rf"share a context of {CONTEXT}") as error:
            call()
        assert error.value.code == "context_length_exceeded"
    assert client.completions.create(model="sums", prompt="1" * (CONTEXT - 1)).choices


COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "empty"),
    ({}, "prompt must be a string"),
    ({"prompt": ["1+2=", ""]}, "empty"),
    ({"prompt": ["1+2=", [1]]}, "prompt must be a string"),
    ({"prompt": [1, 16]}, "tokens from 0 to 15"),
    ({"prompt": ["1+2="] * 65, "n": 2}, "n must be at most 1 with 65 prompts"),
    ({"prompt": "1+2=", "min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens, which is 4"),
    ({"prompt": "1+2=", "min_tokens": CONTEXT + 1}, "min_tokens is 257"),
    ({"prompt": "1+2=", "stop_token_ids": [16]}, "tokens from 0 to 15"),
    ({"prompt": "1+2=", "max_tokens": CONTEXT + 1}, "has at most 256 tokens"),
    ({"prompt": "1+2=", "max_tokens": 10**6}, "max_tokens is 1000000"),
    ({"prompt": "1+2=", "max_tokens": 10**40}, "too large"),
    ({"prompt": "1+2=", "temprature": 1}, "unknown parameter: 'temprature'"),
    ({"prompt": "1+2=", "temperature": 1e-40}, "temperature"),
    ({"prompt": "1+2=", "temperature": float("nan")}, "NaN is not JSON"),
    ({"prompt": "\ud800"}, "Unicode"),
    ({"prompt": "1+2=", "logit_bias": {"16": 1}}, "tokens from 0 to 15"),
    ({"prompt": "1+2=", "stream_options": {"include_usage": True}}, "unless stream is true"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": user("1+2"), "max_completion_tokens": 5000}, "max_completion_tokens is 5000"),
    ({"messages": user("1+2"), "max_completion_tokens": 5, "max_tokens": 6}, "must be the same"),
    ({"messages": user("1+2"), "prompt": "1+2="}, "unknown parameter: 'prompt'"),
    ({"messages": user("1+2"), "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": user("1+2"), "logit_bias": {"1" * 5000: 1}}, "logit_bias"),
    ({"messages": user("1+2"), "top_logprobs": 2}, "unless logprobs is true"),
    ({"messages": user("1+2"), "tools": TOOLS}, "chat template does not know them"),
    ({"messages": user("1+2"), "reasoning_effort": "high"}, "chat template does not know reasoning_effort"),
    ({"messages": user("1+2"), "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
    ({"messages": user("1+2"), "chat_template_kwargs": {"enable_thinking": True}}, "does not know enable_thinking"),
]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [*(("completions", *row) for row in COMPLETIONS), *(("chat/completions", *row) for row in CHATS)],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_wrong_request_is_refused(server: Running, path: str, body: dict[str, Any], says: str) -> None:
    reply = server.post(f"/v1/{path}", {"model": "sums", **body})
    assert reply.status == 400
    assert says in reply.json()["error"]["message"]
    assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_another_model_is_not_found(server: Running, path: str) -> None:
    for reply in (server.post(path, {"model": "another"}), server.get("/v1/models/another", AUTHORIZED)):
        error = reply.json()["error"]
        assert (reply.status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "has the model 'sums', not 'another'" in error["message"]
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("another")


def test_the_field_at_fault_is_named(server: Running) -> None:
    for field, code in (("nonsense", "unknown_parameter"), ("temperature", None)):
        error = server.post("/v1/completions", {"prompt": "1+2=", field: "x"}).json()["error"]
        assert (error["param"], error["code"]) == (field, code)


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", b"[1]", b"[" * 10_000, b"\xff\xfe"],
    ids=["empty", "nonsense", "list", "nested", "not UTF-8"],
)
def test_a_body_that_is_no_json_object_is_refused(server: Running, content: bytes) -> None:
    reply = server.post("/v1/completions", content)
    assert reply.status == 400
    assert reply.json()["error"]["message"]


def test_null_means_left_out(server: Running) -> None:
    nothing = dict.fromkeys(("max_tokens", "stop", "n", "logprobs", "temperature", "stream"))
    answer = server.post("/v1/completions", {"model": "sums", "prompt": "1+2=", **nothing})
    assert answer.json()["choices"][0]["text"] == "3"


@pytest.mark.parametrize(
    ("limits", "prompt", "wanted", "bound"),
    [
        (Limits(100), 40, 1000, 60),
        (Limits(100), 40, 7, 7),
        (Limits(100, max_tokens=5), 40, 7, 5),
        (Limits(None), 40, 7, 7),
    ],
)
def test_limits(limits: Limits, prompt: int, wanted: int, bound: int) -> None:
    assert limits.bound(prompt, wanted) == bound


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
    error = refused(lambda: limits.check("max_tokens", wanted))
    assert f"has at most {most} tokens" in error["message"]
    assert error["param"] == "max_tokens"
