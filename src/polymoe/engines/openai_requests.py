"""Requests of OpenAI's API, checked field by field, and errors as its clients read them.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

__all__ = ["answer_errors", "check_request", "error_body", "refusal"]


def error_body(message: str, *, code: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def refusal(message: str, *, code: str | None = None) -> HTTPException:
    """400 with a message for whoever sent the request."""
    return HTTPException(400, detail=error_body(message, code=code))


def check_request(body: dict[str, Any]) -> None:
    """Check each field by itself; fields that are null are taken out, since null means left out.

    Raises:
        HTTPException: 400, naming the first that is wrong.
    """
    for name in [name for name, value in body.items() if value is None]:
        del body[name]
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can spell
        raise refusal("the request holds text that is no Unicode") from error
    for name, (fits, expected) in _FIELDS.items():
        if name in body and not fits(body[name]):
            raise refusal(f"{name} must be {expected}")


def answer_errors(app: FastAPI) -> None:
    """Let ``app`` answer every error in this form."""
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _body_error)
    app.add_exception_handler(jinja2.TemplateError, _template_error)
    app.add_exception_handler(Exception, _failure)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e9 < value < 1e9


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)


_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "best_of": (lambda v: v == 1, "1"),
    "chat_template_kwargs": (lambda v: isinstance(v, dict), "an object"),
    "echo": (lambda v: v is False, "false"),
    "frequency_penalty": (lambda v: _is_number(v) and -1 < v <= 2, "a number above -1, at most 2"),
    "generation_config": (lambda v: False, "left out"),
    "ignore_eos": (lambda v: isinstance(v, bool), "true or false"),
    "logit_bias": (lambda v: isinstance(v, dict) and all(map(_is_number, v.values())), "an object of numbers"),
    "logprobs": (lambda v: v is False, "left out"),
    "max_completion_tokens": (_is_count, "an integer of at least 1"),
    "max_tokens": (_is_count, "an integer of at least 1"),
    "n": (lambda v: v == 1, "1"),
    "seed": (lambda v: isinstance(v, int) and 0 <= v < 2**63, "an integer of at least 0"),
    "stop": (lambda v: bool(v) and (isinstance(v, str) or _is_list_of(str, v)), "a string or a list of strings"),
    "stream": (lambda v: isinstance(v, bool), "true or false"),
    "suffix": (lambda v: isinstance(v, str), "a string"),
    "temperature": (lambda v: _is_number(v) and v >= 0, "a number of at least 0"),
    "tools": (lambda v: _is_list_of(dict, v), "a list of objects"),
    "top_p": (lambda v: _is_number(v) and 0 < v <= 1, "a number above 0, at most 1"),
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
