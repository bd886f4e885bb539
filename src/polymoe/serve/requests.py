"""Requests of OpenAI's API, checked field by field, and errors as its clients read them.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import jinja2
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

__all__ = ["OWN_FIELDS", "Limits", "answer_errors", "check_request", "error_body", "finish_stream", "refusal"]

OWN_FIELDS = frozenset({"ignore_eos"})
"""Fields that are none of OpenAI's: ``ignore_eos`` as vLLM and SGLang have it."""


def error_body(
    message: str, *, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error"
) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(message: str, *, param: str | None = None, code: str | None = None) -> HTTPException:
    """400 with a message for whoever sent the request, and the field at fault."""
    return HTTPException(400, detail=error_body(message, param=param, code=code))


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for.

    Attributes:
        context: most tokens of prompt and answer together, or None for no limit.
        max_tokens: most tokens of an answer, or None for what fits in the context.
    """

    context: int | None
    max_tokens: int | None = None

    def check(self, name: str, wanted: int) -> None:
        """Refuse what there can be no room for.

        Raises:
            HTTPException: 400, for more tokens than any answer may have.
        """
        most = min((n for n in (self.max_tokens, self.context) if n is not None), default=None)
        if most is not None and wanted > most:
            raise refusal(f"{name} is {wanted}; an answer of this model may have {most} tokens at most", param=name)

    def bound(self, prompt_tokens: int, wanted: int | None) -> int | None:
        """Tokens that the answer may have.

        Raises:
            HTTPException: 400 for a prompt that is empty or leaves no room in the context.
        """
        if prompt_tokens < 1:
            raise refusal("the prompt is empty")
        if self.context is not None and prompt_tokens >= self.context:
            raise refusal(
                f"the prompt has {prompt_tokens} tokens; a context of {self.context} holds prompt and answer",
                code="context_length_exceeded",
            )
        room = None if self.context is None else self.context - prompt_tokens
        return min((n for n in (wanted, self.max_tokens, room) if n is not None), default=None)


def check_request(body: dict[str, Any], known: frozenset[str]) -> None:
    """Check each field by itself; fields that are null are taken out, since null means left out.

    Args:
        body: the request, changed in place.
        known: the names of the endpoint's fields.

    Raises:
        HTTPException: 400, naming the first that is wrong.
    """
    for name in [name for name, value in body.items() if value is None]:
        del body[name]
    for name in body:
        if name not in known:
            raise refusal(f"unknown parameter: {name[:80]!r}", param=name[:80], code="unknown_parameter")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can spell
        raise refusal("the request holds text that is no Unicode") from error
    for name, (fits, expected) in _FIELDS.items():
        if name in body and not fits(body[name]):
            raise refusal(f"{name} must be {expected}", param=name)


async def finish_stream(parts: Any) -> AsyncIterator[str]:
    """Server-sent events as Transformers makes them, with errors in OpenAI's form, and OpenAI's last line."""
    async with aclosing(parts):
        async for part in parts:
            before, error, message = part.partition('data: {"error": ')
            if error:
                body = error_body(json.loads('{"error": ' + message)["error"], kind="server_error")
                yield f"{before}data: {json.dumps(body)}\n\n"
                break
            yield part
    yield "data: [DONE]\n\n"


def answer_errors(app: FastAPI) -> None:
    """Let ``app`` answer every error in this form."""
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _body_error)
    app.add_exception_handler(jinja2.TemplateError, _template_error)
    app.add_exception_handler(Exception, _failure)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e9 < value < 1e9


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)


def _are_stops(value: Any) -> bool:
    return bool(value) and (isinstance(value, str) or (_is_list_of(str, value) and all(value)))


_Check = tuple[Callable[[Any], bool], str]
_LEFT_OUT: _Check = (lambda v: v is False, "left out: this server does not do it")
_ZERO: _Check = (lambda v: v == 0, "0 or left out: this server does not do it")

_FIELDS: Mapping[str, _Check] = {
    "audio": _LEFT_OUT,
    "best_of": (lambda v: v == 1, "1"),
    "chat_template_kwargs": (lambda v: isinstance(v, dict), "an object"),
    "echo": (lambda v: v is False, "false"),
    "frequency_penalty": (lambda v: _is_number(v) and -1 < v <= 2, "a number above -1, at most 2"),
    "function_call": _LEFT_OUT,
    "functions": _LEFT_OUT,
    "generation_config": (lambda v: False, "left out"),
    "ignore_eos": (lambda v: isinstance(v, bool), "true or false"),
    "logit_bias": (lambda v: isinstance(v, dict) and all(map(_is_number, v.values())), "an object of numbers"),
    "logprobs": (lambda v: v is False, "left out"),
    "max_completion_tokens": (_is_count, "an integer from 1 to 2147483647"),
    "max_tokens": (_is_count, "an integer from 1 to 2147483647"),
    "modalities": (lambda v: v == ["text"], '["text"]'),
    "n": (lambda v: v == 1, "1"),
    "presence_penalty": _ZERO,
    "reasoning_effort": (lambda v: isinstance(v, str), "a string"),
    "response_format": (lambda v: v == {"type": "text"}, '{"type": "text"}'),
    "seed": (lambda v: isinstance(v, int) and 0 <= v < 2**63, "an integer of at least 0"),
    "stop": (_are_stops, "a string or a list of strings, none of them empty"),
    "stream": (lambda v: isinstance(v, bool), "true or false"),
    "stream_options": (lambda v: isinstance(v, dict), "an object"),
    "suffix": (lambda v: isinstance(v, str), "a string"),
    "temperature": (lambda v: _is_number(v) and v >= 0, "a number of at least 0"),
    "tool_choice": (lambda v: v in ("auto", "none"), '"auto" or "none"'),
    "tools": (lambda v: _is_list_of(dict, v), "a list of objects"),
    "top_logprobs": _ZERO,
    "top_p": (lambda v: _is_number(v) and 0 < v <= 1, "a number above 0, at most 1"),
    "web_search_options": _LEFT_OUT,
}
"""Fields that Transformers takes as they come or quietly ignores: when one is right, and how to say what is."""


async def _http_error(_: Request, error: Any) -> JSONResponse:
    body = error.detail if isinstance(error.detail, dict) else error_body(str(error.detail))
    return JSONResponse(body, status_code=error.status_code)


async def _body_error(_: Request, __: Any) -> JSONResponse:
    return JSONResponse(error_body("the body must be a JSON object, sent as application/json"), status_code=400)


async def _template_error(_: Request, error: Any) -> JSONResponse:
    return JSONResponse(error_body(f"the chat template refuses the messages: {error}"), status_code=400)


async def _failure(_: Request, error: Any) -> JSONResponse:
    # The error itself goes to the log, with its traceback.
    return JSONResponse(error_body(f"generation failed: {error}", kind="server_error"), status_code=500)
