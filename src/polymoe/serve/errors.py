"""Errors as clients of OpenAI's API expect them.

API: https://platform.openai.com/docs/guides/error-codes
"""

from __future__ import annotations

from typing import Any

import jinja2
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

__all__ = ["answer_errors", "client_left", "error_body", "refusal"]


def error_body(
    message: str, *, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error"
) -> dict[str, Any]:
    """The JSON object of an error.

    Args:
        message: for the person who reads the log of the client.
        param: the field of the request at fault.
        code: a name for programs, such as ``context_length_exceeded``.
        kind: the error's ``type``.
    """
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal(message: str, *, param: str | None = None, code: str | None = None) -> HTTPException:
    """The exception that answers 400: the request itself is wrong."""
    return HTTPException(400, detail=error_body(message, param=param, code=code))


def client_left() -> HTTPException:
    """The exception that ends a request whose client has closed the connection; 499 is nginx's status for it."""
    return HTTPException(499, detail=error_body("the client closed the connection"))


def answer_errors(app: FastAPI) -> None:
    """Make ``app`` answer every error in OpenAI's form."""
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _body_error)
    app.add_exception_handler(jinja2.TemplateError, _template_error)
    app.add_exception_handler(Exception, _failure)


async def _http_error(_: Request, error: Any) -> JSONResponse:
    body = error.detail if isinstance(error.detail, dict) else error_body(str(error.detail))
    return JSONResponse(body, status_code=error.status_code)


async def _body_error(_: Request, __: Any) -> JSONResponse:
    message = "the body must be a JSON object with the content type application/json"
    return JSONResponse(error_body(message), status_code=400)


async def _template_error(_: Request, error: Any) -> JSONResponse:
    return JSONResponse(error_body(f"the chat template rejects the messages: {error}"), status_code=400)


async def _failure(_: Request, error: Any) -> JSONResponse:
    # Starlette logs the exception with its traceback.
    return JSONResponse(error_body(f"generation failed: {error}", kind="server_error"), status_code=500)
