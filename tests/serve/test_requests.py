"""Requests that are refused with 400 and a message that says why; limits on lengths."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytest.importorskip("prometheus_client")

import openai
from fastapi import HTTPException

from polymoe.serve.requests import Limits
from support.serving import CONTEXT, Running, user


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [CONTEXT, 3 * CONTEXT])
def test_a_prompt_longer_than_the_context_is_refused(server: Running, length: int, stream: bool) -> None:
    client = server.client()
    for call in (
        lambda: client.completions.create(model="sums", prompt="1" * length, stream=stream),
        lambda: client.chat.completions.create(model="sums", messages=user("1" * length), stream=stream),  # type: ignore[call-overload]
    ):
        with pytest.raises(openai.BadRequestError, match=rf"share a context of {CONTEXT}") as refused:
            call()
        assert refused.value.code == "context_length_exceeded"
    assert client.completions.create(model="sums", prompt="1" * (CONTEXT - 1)).choices


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": ""}, "empty"),
        ({}, "prompt must be a string"),
        ({"prompt": ["1+2="]}, "prompt must be a string"),
        ({"prompt": "1+2=", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "1+2=", "max_tokens": CONTEXT + 1}, "has at most 256 tokens"),
        ({"prompt": "1+2=", "max_tokens": 10**6}, "max_tokens is 1000000"),
        ({"prompt": "1+2=", "max_tokens": 10**40}, "max_tokens"),
        ({"prompt": "1+2=", "temprature": 1}, "unknown parameter: 'temprature'"),
        ({"prompt": "1+2=", "messages": []}, "unknown parameter: 'messages'"),
        ({"prompt": "1+2=", "presence_penalty": 1}, "presence_penalty"),
        ({"prompt": "1+2=", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "1+2=", "max_tokens": True}, "max_tokens"),
        ({"prompt": "1+2=", "temperature": -1}, "temperature"),
        ({"prompt": "1+2=", "temperature": "hot"}, "temperature"),
        ({"prompt": "1+2=", "temperature": 10**400}, "temperature"),
        ({"prompt": "1+2=", "temperature": float("nan")}, "temperature"),
        ({"prompt": "\ud800"}, "Unicode"),
        ({"prompt": "1+2=", "top_p": 0}, "top_p"),
        ({"prompt": "1+2=", "frequency_penalty": -1}, "frequency_penalty"),
        ({"prompt": "1+2=", "n": 2}, "n must be 1"),
        ({"prompt": "1+2=", "best_of": 3}, "best_of"),
        ({"prompt": "1+2=", "echo": True}, "echo"),
        ({"prompt": "1+2=", "ignore_eos": "yes"}, "ignore_eos"),
        ({"prompt": "1+2=", "logprobs": 1}, "logprobs"),
        ({"prompt": "1+2=", "seed": -1}, "seed"),
        ({"prompt": "1+2=", "stop": [1]}, "stop"),
        ({"prompt": "1+2=", "stop": []}, "stop"),
        ({"prompt": "1+2=", "stop": ["3", ""]}, "stop"),
        ({"prompt": "1+2=", "stop": 7}, "stop"),
        ({"prompt": "1+2=", "stream": "yes"}, "stream"),
        ({"prompt": "1+2=", "suffix": 1}, "suffix"),
        ({"prompt": "1+2=", "generation_config": "{}"}, "generation_config"),
        ({"prompt": "1+2=", "model": "another"}, "another"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_wrong_completion_request_is_refused(server: Running, body: dict[str, Any], says: str) -> None:
    refused = server.post("/v1/completions", {"model": "sums", **body})
    assert refused.status == 400
    assert says in refused.json()["error"]["message"]
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_the_field_at_fault_is_named(server: Running) -> None:
    for field, code in (("nonsense", "unknown_parameter"), ("temperature", None)):
        error = server.post("/v1/completions", {"prompt": "1+2=", field: "x"}).json()["error"]
        assert (error["param"], error["code"]) == (field, code)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "1+2"}, "messages"),
        ({"messages": [{"content": "1+2"}]}, "role"),
        ({"messages": ["1+2"]}, "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"text": "1+2"}]}]}, "content"),
        ({"messages": [{"role": "user", "tool_calls": [{}]}]}, "tool call"),
        ({"messages": user("1+2"), "max_completion_tokens": -5}, "max_completion_tokens"),
        ({"messages": user("1+2"), "max_completion_tokens": 5000}, "max_completion_tokens is 5000"),
        ({"messages": user("1+2"), "prompt": "1+2="}, "unknown parameter: 'prompt'"),
        ({"messages": user("1+2"), "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": user("1+2"), "tool_choice": "required"}, "tool_choice"),
        ({"messages": user("1+2"), "top_logprobs": 5}, "top_logprobs"),
        ({"messages": user("1+2"), "logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"messages": user("1+2"), "logit_bias": {"1": "much"}}, "logit_bias"),
        ({"messages": user("1+2"), "logit_bias": {"one": 1}}, "logit_bias"),
        ({"messages": user("1+2"), "logit_bias": {"16": 1}}, "logit_bias"),
        ({"messages": user("1+2"), "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"messages": user("1+2"), "chat_template_kwargs": 3}, "chat_template_kwargs"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_wrong_chat_request_is_refused(server: Running, body: dict[str, Any], says: str) -> None:
    refused = server.post("/v1/chat/completions", {"model": "sums", **body})
    assert refused.status == 400
    assert says in refused.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"", b"nonsense", b"[1]", b"[" * 10_000, b"\xff\xfe"], ids=repr)
def test_a_body_that_is_no_json_object_is_refused(server: Running, content: bytes) -> None:
    refused = server.post("/v1/completions", content)
    assert refused.status == 400
    assert refused.json()["error"]["message"]


def test_null_means_left_out(server: Running) -> None:
    nothing = dict.fromkeys(("max_tokens", "stop", "n", "logprobs", "temperature", "stream"))
    answer = server.post("/v1/completions", {"model": "sums", "prompt": "1+2=", **nothing})
    assert answer.json()["choices"][0]["text"] == "3"


@pytest.mark.parametrize(
    ("limits", "prompt", "wanted", "bound"),
    [
        (Limits(100), 40, None, 60),
        (Limits(100), 40, 1000, 60),
        (Limits(100), 40, 7, 7),
        (Limits(100, max_tokens=5), 40, 7, 5),
        (Limits(None), 40, 7, 7),
        (Limits(None), 40, None, None),
    ],
)
def test_limits(limits: Limits, prompt: int, wanted: int | None, bound: int | None) -> None:
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
    with pytest.raises(HTTPException) as refused:
        limits.check("max_tokens", wanted)
    error: Any = refused.value.detail
    assert refused.value.status_code == 400
    assert f"has at most {most} tokens" in error["error"]["message"]
    assert error["error"]["param"] == "max_tokens"
