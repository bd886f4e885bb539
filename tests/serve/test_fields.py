"""Every field of requests: which values are right, which are refused by name, and the settings that follow."""

from __future__ import annotations

from typing import Any

import pytest

from polymoe.serve.limits import Limits
from polymoe.serve.requests import ChatRequest, CompletionRequest, read_request, settings_of
from polymoe.serve.settings import GenerationSettings
from support.serving import TOOLS, refused, user

ACCEPTED: dict[str, list[Any]] = {
    "best_of": [1],
    "chat_template_kwargs": [{}, {"enable_thinking": False}],
    "echo": [False],
    "frequency_penalty": [-2, 0.5, 2],
    "ignore_eos": [True],
    "logit_bias": [{}, {"0": -100, "15": 0.5}],
    "logprobs": [False, True],
    "max_completion_tokens": [1],
    "max_tokens": [1, 2**31 - 1],
    "messages": [user("1+2")],
    "metadata": [{"a": "b"}],
    "modalities": [["text"]],
    "model": ["sums"],
    "min_p": [0, 0.1, 1],
    "min_tokens": [0, 5],
    "n": [1, 128],
    "parallel_tool_calls": [True],
    "prediction": [{"type": "content", "content": "3"}],
    "presence_penalty": [-2, 2],
    "prompt": ["", "1+2=", ["1+2=", "3"], [1, 2], [[1, 2], [3]]],
    "prompt_cache_key": ["a"],
    "prompt_cache_options": [{}],
    "prompt_cache_retention": ["24h"],
    "reasoning_effort": ["high"],
    "repetition_penalty": [0.01, 1, 1.5],
    "response_format": [{"type": "text"}],
    "safety_identifier": ["a"],
    "seed": [0, 2**63 - 1],
    "service_tier": ["auto", "default"],
    "stop": ["a", ["a"] * 16, ["😀" * 256]],
    "stop_token_ids": [[], [0, 5]],
    "store": [False],
    "stream": [True],
    "stream_options": [
        {},
        {"include_usage": True},
        {"include_usage": None, "include_obfuscation": False},
        {"include_usage": True, "continuous_usage_stats": True},
    ],
    "temperature": [0, 1e-5, 1, 100],
    "tool_choice": ["auto", "none"],
    "tools": [TOOLS],
    "top_k": [-1, 0, 1, 50],
    "top_logprobs": [0, 20],
    "top_p": [1e-300, 1],
    "user": ["a"],
    "verbosity": ["medium"],
}
REFUSED: dict[str, list[Any]] = {
    "best_of": [2, True],
    "echo": [True],
    "frequency_penalty": [-2.1, 3, "1", True],
    "ignore_eos": ["yes"],
    "logit_bias": [[], {"one": 1}, {"1": "much"}, {"01": 1}, {"١": 1}, {"1": 101}, {"-1": 1},
        dict.fromkeys(map(str, range(1025)), 1)],
    "logprobs": [1, "yes"],
    "max_tokens": [0, -1, True, 1.5, 2**31, "many"],
    "messages": [[], {}, "1+2"],
    "modalities": [["text", "audio"], "text"],
    "min_p": [-0.1, 1.1, True],
    "min_tokens": [-1, True, 1.5],
    "n": [129, 0, True, 1.0],
    "parallel_tool_calls": [False],
    "presence_penalty": [3],
    "prompt": [[], [""] * 129, ["1+2=", [1]], [1, "2"], [True], [-1], [[]], [[1], []], 5],
    "repetition_penalty": [0, 101, True],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}},
        {"type": "text", "strict": True}],
    "seed": [-1, 1.5, True, 2**63],
    "service_tier": ["flex"],
    "stop": ["", [], ["a", ""], [1], 7, ["a"] * 17, "a" * 257],
    "stop_token_ids": [[-1], [True], ["1"], 1, [1] * 129],
    "store": [True],
    "stream": ["yes", 1],
    "stream_options": [[], {"include_usage": 1}, {"include_obfuscation": True}, {"continuous_usage_stats": 1}],
    "temperature": [-1, 1e-40, 101, "hot", True],
    "tool_choice": ["required", {"type": "function"}],
    "tools": [[], [1], [{"type": "custom"}], [{"type": "function", "function": {}}],
        [{"type": "function", "function": {"name": "f", "strict": True}}]],
    "top_k": [-2, 1.5, True],
    "top_logprobs": [21, -1, True],
    "top_p": [0, 1.1],
    "verbosity": ["low"],
}  # fmt: skip
KINDS: tuple[Any, ...] = (ChatRequest, CompletionRequest)
FIELDS = [(name, kind) for kind in KINDS for name in kind.model_fields]
UNSUPPORTED = {"audio", "function_call", "functions", "moderation", "suffix", "web_search_options"}


@pytest.mark.parametrize(("name", "kind"), FIELDS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_field_has_right_and_wrong_values(name: str, kind: Any) -> None:
    """A field without a right value is one that the server does not support."""
    accepted, wrong = ACCEPTED.get(name, []), REFUSED.get(name, [])
    if kind is CompletionRequest and name == "logprobs":
        accepted, wrong = [0, 20], [21, -1, True]
    assert accepted or name in UNSUPPORTED
    for value in accepted:
        read = getattr(read_request({name: value}, kind), name)
        assert (read, isinstance(read, bool)) == (value, isinstance(value, bool))
    for value in [*wrong, object()]:
        error = refused(lambda: read_request({name: value}, kind))  # noqa: B023
        assert error["param"] == name
        assert error["message"].startswith(f"{name} must be ")
    assert getattr(read_request({name: None}, kind), name) is None


def test_every_field_of_openai_is_known() -> None:
    """Those that are not are refused as well, but as unknown ones."""
    chat = {
        "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens",
        "max_tokens", "messages", "metadata", "modalities", "model", "moderation", "n", "parallel_tool_calls",
        "prediction", "presence_penalty", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "reasoning_effort", "response_format", "safety_identifier", "seed", "service_tier", "stop", "store", "stream",
        "stream_options", "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity",
        "web_search_options",
    }  # fmt: skip
    completion = {
        "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "model", "n",
        "presence_penalty", "prompt", "seed", "stop", "stream", "stream_options", "suffix", "temperature", "top_p",
        "user",
    }  # fmt: skip
    of_engines = {"ignore_eos", "min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "top_k"}
    assert ChatRequest.model_fields.keys() - chat == {"chat_template_kwargs", *of_engines}
    assert CompletionRequest.model_fields.keys() - completion == of_engines
    assert chat <= ChatRequest.model_fields.keys()
    assert completion <= CompletionRequest.model_fields.keys()


def test_settings() -> None:
    assert settings_of(ChatRequest(), Limits(100)) == GenerationSettings()
    said = {
        "max_completion_tokens": 5, "temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0.5, "frequency_penalty": 1,
        "presence_penalty": -1, "repetition_penalty": 2, "logit_bias": {"3": 7}, "seed": 4, "stop": "a",
        "stop_token_ids": [2], "min_tokens": 3, "ignore_eos": True, "stream": True, "logprobs": True, "n": 2,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    settings = settings_of(read_request(said, ChatRequest), Limits(100))
    assert settings == GenerationSettings(
        max_tokens=5, temperature=1.0, top_p=1.0, top_k=0, min_p=0.5, frequency_penalty=1.0, presence_penalty=-1.0,
        repetition_penalty=2.0, logit_bias={3: 7.0}, seed=4, stop=("a",), stop_token_ids=(2,), min_tokens=3,
        ignore_eos=True, stream=True, include_usage=True, logprobs=0, n=2,
    )  # fmt: skip
    two = ChatRequest(stop=["a", "b"], max_tokens=5, max_completion_tokens=5)
    assert settings_of(two, Limits(None)).stop == ("a", "b")
    assert settings_of(CompletionRequest(logprobs=3), Limits(None)).logprobs == 3
    assert settings_of(ChatRequest(logprobs=True, top_logprobs=4), Limits(None)).logprobs == 4
