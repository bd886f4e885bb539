"""Checks of a request's fields, and the limits on the length of its answer.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polymoe.serve.errors import refusal
from polymoe.serve.in_flight import InFlight, current

__all__ = ["OWN_FIELDS", "Limits", "begin_generation", "check_request"]

OWN_FIELDS = frozenset({"ignore_eos"})
"""Fields that OpenAI's API does not have: ``ignore_eos`` as in vLLM and SGLang."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many tokens a request may use.

    Attributes:
        context: maximum number of tokens of prompt and answer together; None for no limit.
        max_tokens: maximum number of tokens in an answer; None if only the context limits it.
    """

    context: int | None
    max_tokens: int | None = None

    def check(self, name: str, tokens: int) -> None:
        """Check the length of an answer that a request asks for.

        Args:
            name: the field that asks.
            tokens: its value.

        Raises:
            HTTPException: 400, if no answer can have so many tokens.
        """
        most = min((n for n in (self.max_tokens, self.context) if n is not None), default=None)
        if most is not None and tokens > most:
            raise refusal(f"{name} is {tokens}, but an answer of this model has at most {most} tokens", param=name)

    def bound(self, prompt_tokens: int, max_tokens: int | None) -> int | None:
        """The maximum number of tokens in an answer; None for no limit.

        Args:
            prompt_tokens: length of the prompt.
            max_tokens: what the request asks for; None if it does not say.

        Raises:
            HTTPException: 400 for a prompt that is empty or leaves no room in the context.
        """
        if prompt_tokens < 1:
            raise refusal("the prompt is empty")
        if self.context is not None and prompt_tokens >= self.context:
            raise refusal(
                f"the prompt has {prompt_tokens} tokens, but prompt and answer share a context of {self.context}",
                code="context_length_exceeded",
            )
        room = None if self.context is None else self.context - prompt_tokens
        return min((n for n in (max_tokens, self.max_tokens, room) if n is not None), default=None)


def begin_generation(inputs: Mapping[str, Any], gen_config: Any, limits: Limits) -> InFlight:
    """The request that the current task works on, with its prompt counted and its answer limited.

    Args:
        inputs: the tokenizer's output for the prompt.
        gen_config: Transformers' generation config of this request; ``max_new_tokens`` is changed in place.
        limits: of the server.

    Raises:
        HTTPException: 400, as :meth:`Limits.bound`.
    """
    request, ids = current(), inputs["input_ids"]
    request.prompt_tokens = len(ids) if isinstance(ids, list) else ids.shape[-1]
    gen_config.max_new_tokens = limits.bound(request.prompt_tokens, gen_config.max_new_tokens)
    return request


def check_request(body: dict[str, Any], known: frozenset[str]) -> None:
    """Check each field of a request. Fields that are null are removed: null means that the field is omitted.

    Args:
        body: the request, changed in place.
        known: names of the endpoint's fields.

    Raises:
        HTTPException: 400, naming the first field that is wrong.
    """
    for name in [name for name, value in body.items() if value is None]:
        del body[name]
    for name in body:
        if name not in known:
            raise refusal(f"unknown parameter: {name[:80]!r}", param=name[:80], code="unknown_parameter")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
        raise refusal("the request contains text that is not valid Unicode") from error
    for name, (fits, expected) in _FIELDS.items():
        if name in body and not fits(body[name]):
            raise refusal(f"{name} must be {expected}", param=name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e9 < value < 1e9


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)


def _is_stop(value: Any) -> bool:
    return bool(value) and (isinstance(value, str) or (_is_list_of(str, value) and all(value)))


_Check = tuple[Callable[[Any], bool], str]
_OMITTED: _Check = (lambda v: v is False, "omitted: this server does not support it")
_ZERO: _Check = (lambda v: v == 0, "0 or omitted: this server does not support it")

_FIELDS: Mapping[str, _Check] = {
    "audio": _OMITTED,
    "best_of": (lambda v: v == 1, "1"),
    "chat_template_kwargs": (lambda v: isinstance(v, dict), "an object"),
    "echo": (lambda v: v is False, "false"),
    "frequency_penalty": (lambda v: _is_number(v) and -1 < v <= 2, "a number above -1, at most 2"),
    "function_call": _OMITTED,
    "functions": _OMITTED,
    "generation_config": (lambda v: False, "omitted"),
    "ignore_eos": (lambda v: isinstance(v, bool), "true or false"),
    "logit_bias": (lambda v: isinstance(v, dict) and all(map(_is_number, v.values())), "an object of numbers"),
    "logprobs": (lambda v: v is False, "omitted"),
    "max_completion_tokens": (_is_count, "an integer from 1 to 2147483647"),
    "max_tokens": (_is_count, "an integer from 1 to 2147483647"),
    "modalities": (lambda v: v == ["text"], '["text"]'),
    "n": (lambda v: v == 1, "1"),
    "presence_penalty": _ZERO,
    "reasoning_effort": (lambda v: isinstance(v, str), "a string"),
    "response_format": (lambda v: v == {"type": "text"}, '{"type": "text"}'),
    "seed": (lambda v: isinstance(v, int) and 0 <= v < 2**63, "an integer of at least 0"),
    "stop": (_is_stop, "a string or a list of strings, none of them empty"),
    "stream": (lambda v: isinstance(v, bool), "true or false"),
    "stream_options": (lambda v: isinstance(v, dict), "an object"),
    "suffix": (lambda v: isinstance(v, str), "a string"),
    "temperature": (lambda v: _is_number(v) and v >= 0, "a number of at least 0"),
    "tool_choice": (lambda v: v in ("auto", "none"), '"auto" or "none"'),
    "tools": (lambda v: _is_list_of(dict, v), "a list of objects"),
    "top_logprobs": _ZERO,
    "top_p": (lambda v: _is_number(v) and 0 < v <= 1, "a number above 0, at most 1"),
    "web_search_options": _OMITTED,
}
"""Fields that Transformers does not check, or silently ignores: whether a value is right, and what is expected."""
