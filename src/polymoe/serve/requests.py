"""The fields of requests: every one of OpenAI's is supported, without effect, or refused by name.

A new field is a row in :data:`CHAT_FIELDS`, :data:`COMPLETION_FIELDS` or both, an attribute of
:class:`~polymoe.serve.settings.GenerationSettings`, and its use in :mod:`polymoe.serve.sampling`.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polymoe.serve.errors import refusal
from polymoe.serve.limits import Limits
from polymoe.serve.settings import GenerationSettings

__all__ = ["CHAT_FIELDS", "COMPLETION_FIELDS", "Field", "check_fields", "settings_of"]


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a request.

    Attributes:
        accepts: whether a value is right.
        expected: what is right, for the message to the client.
    """

    accepts: Callable[[Any], bool]
    expected: str


def _is_number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int | float) and not isinstance(v, bool) and low <= v <= high


def _is_int(low: int, high: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, kind)


def _equals(*values: Any) -> Callable[[Any], bool]:
    return lambda v: any(type(v) is type(value) and v == value for value in values)


def _is_temperature(value: Any) -> bool:
    # Logits over less than 1e-5 may be more than a float32 can have.
    return _is_number(0, 100)(value) and (value == 0 or value >= 1e-5)


def _is_bias(value: Any) -> bool:
    # An object's names are unique, and so must be the tokens: no leading zeros, no digits of other scripts.
    return (
        isinstance(value, dict)
        and len(value) <= 1024
        and all(token.isascii() and token.isdecimal() and str(int(token[:20])) == token for token in value)
        and all(map(_is_number(-100, 100), value.values()))
    )


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return (
        isinstance(texts, list)
        and 1 <= len(texts) <= 16
        and all(isinstance(text, str) and 1 <= len(text) <= 256 for text in texts)
    )


def _is_stream_options(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() <= {"include_usage", "include_obfuscation"}
        and isinstance(value.get("include_usage") or False, bool)
        and not value.get("include_obfuscation")
    )


def _is_tools(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_function, value))


def _is_function(tool: Any) -> bool:
    if not isinstance(tool, dict) or tool.keys() != {"type", "function"} or tool["type"] != "function":
        return False
    function = tool["function"]
    return (
        isinstance(function, dict)
        and function.keys() <= {"name", "description", "parameters", "strict"}
        and isinstance(function.get("name"), str)
        and bool(function["name"])
        and isinstance(function.get("description") or "", str)
        and isinstance(function.get("parameters") or {}, dict)
        and not function.get("strict")
    )


_OMITTED = Field(lambda v: False, "omitted: this server does not support it")
_NOT_TRUE = Field(_equals(False), "false or omitted: this server does not support it")
_ONE = Field(_equals(1), "1: this server gives one answer to a request")
_TEXT = Field(_is(str), "a string")
_TOKENS = Field(_is_int(1, 2**31 - 1), "an integer from 1 to 2147483647")
_PENALTY = Field(_is_number(-2, 2), "a number from -2 to 2")

_BOTH: Mapping[str, Field] = {
    "frequency_penalty": _PENALTY,
    "ignore_eos": Field(_is(bool), "true or false"),  # not OpenAI's, but of vLLM and SGLang
    "logit_bias": Field(_is_bias, "an object of at most 1024 numbers from -100 to 100, named by token ids"),
    "max_tokens": _TOKENS,
    "model": _TEXT,
    "n": _ONE,
    "presence_penalty": _PENALTY,
    "seed": Field(_is_int(0, 2**63 - 1), "an integer of at least 0"),
    "stop": Field(_is_stop, "a string or a list of at most 16 strings, each of 1 to 256 characters"),
    "stream": Field(_is(bool), "true or false"),
    "stream_options": Field(_is_stream_options, 'an object in which only "include_usage" may be true'),
    "temperature": Field(_is_temperature, "0, or a number from 0.00001 to 100"),
    "top_p": Field(lambda v: _is_number(0, 1)(v) and v > 0, "a number above 0, at most 1"),
    "user": _TEXT,  # without effect
}

CHAT_FIELDS: Mapping[str, Field] = {
    **_BOTH,
    "audio": _OMITTED,
    "chat_template_kwargs": Field(_is(dict), "an object"),  # of vLLM and SGLang
    "function_call": _OMITTED,
    "functions": _OMITTED,
    "logprobs": _NOT_TRUE,
    "max_completion_tokens": _TOKENS,
    "messages": Field(lambda v: isinstance(v, list) and bool(v), "a list with at least one message"),
    "metadata": Field(_is(dict), "an object"),  # without effect
    "modalities": Field(_equals(["text"]), '["text"]'),
    "moderation": _OMITTED,
    "parallel_tool_calls": Field(_equals(True), "true or omitted: the model decides how many tools it calls"),
    "prediction": Field(_is(dict), "an object"),  # without effect on the answer; the next three neither
    "prompt_cache_key": _TEXT,
    "prompt_cache_options": Field(_is(dict), "an object"),
    "prompt_cache_retention": _TEXT,
    "reasoning_effort": _TEXT,
    "response_format": Field(_equals({"type": "text"}), '{"type": "text"}'),
    "safety_identifier": _TEXT,  # without effect
    "service_tier": Field(_equals("auto", "default"), '"auto" or "default"'),
    "store": _NOT_TRUE,
    "tool_choice": Field(_equals("auto", "none"), '"auto" or "none"'),
    "tools": Field(
        _is_tools,
        'a list of {"type": "function", "function": {"name", "description", "parameters"}}, where strict is not true',
    ),
    "top_logprobs": Field(_equals(0), "0 or omitted: this server does not support it"),
    "verbosity": Field(_equals("medium"), '"medium" or omitted: this server does not support it'),
    "web_search_options": _OMITTED,
}
"""The fields of ``/v1/chat/completions``."""

COMPLETION_FIELDS: Mapping[str, Field] = {
    **_BOTH,
    "best_of": _ONE,
    "echo": _NOT_TRUE,
    "logprobs": _OMITTED,
    "prompt": _TEXT,
    "suffix": _OMITTED,
}
"""The fields of ``/v1/completions``."""


def check_fields(body: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """The fields of a request that say something, checked. Null means that a field is omitted.

    Args:
        body: the request.
        fields: of its endpoint.

    Raises:
        HTTPException: 400, naming the first field that is wrong or unknown: it could change the answer.
    """
    said = {name: value for name, value in body.items() if value is not None}
    for name, value in said.items():
        if name not in fields:
            raise refusal(f"unknown parameter: {name[:80]!r}", param=name[:80], code="unknown_parameter")
        if not fields[name].accepts(value):
            raise refusal(f"{name} must be {fields[name].expected}", param=name)
    return said


def settings_of(said: Mapping[str, Any], limits: Limits) -> GenerationSettings:
    """The settings of a request.

    Args:
        said: as :func:`check_fields` returns it.
        limits: of the server.

    Raises:
        HTTPException: 400 for fields that contradict each other or the limits.
    """
    lengths = [name for name in ("max_tokens", "max_completion_tokens") if name in said]
    for name in lengths:
        limits.check(name, said[name])
    if len({said[name] for name in lengths}) > 1:
        raise refusal("max_tokens and max_completion_tokens must be the same, or one omitted", param="max_tokens")
    if "stream_options" in said and not said.get("stream"):
        raise refusal("stream_options must be omitted unless stream is true", param="stream_options")
    bias = {int(token): float(value) for token, value in said.get("logit_bias", {}).items()}
    if limits.vocabulary is not None and max(bias, default=0) >= limits.vocabulary:
        raise refusal(f"logit_bias must name tokens from 0 to {limits.vocabulary - 1}", param="logit_bias")
    stop = said.get("stop", ())
    numbers = ("temperature", "top_p", "frequency_penalty", "presence_penalty")
    plain = ("seed", "ignore_eos", "stream")
    return GenerationSettings(
        max_tokens=said[lengths[0]] if lengths else None,
        logit_bias=bias,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        include_usage=bool(said.get("stream_options", {}).get("include_usage")),
        **{name: float(said[name]) for name in numbers if name in said},
        **{name: said[name] for name in plain if name in said},
    )
