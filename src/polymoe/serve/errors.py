"""Errors as clients of OpenAI's API expect them.

API: https://platform.openai.com/docs/guides/error-codes
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException


def error_body(
    message: str, *, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error"
) -> dict[str, Any]:
    """The JSON object of an error. Texts are cut at 1,000 characters, and always valid Unicode.

    Args:
        message: for the person who reads the log of the client.
        param: the field of the request at fault.
        code: a name for programs, such as ``context_length_exceeded``.
        kind: the error's ``type``.
    """
    return {"error": {"message": _said(message), "type": kind, "param": _said(param), "code": code}}


def _said(text: str | None) -> str | None:
    return None if text is None else text[:1000].encode(errors="replace").decode()


def refusal(message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> HTTPException:
    """The exception that answers 400, or another status: the request itself is wrong."""
    return HTTPException(status, detail=error_body(message, param=param, code=code))


def client_left() -> HTTPException:
    """The exception that ends a request whose client has closed the connection; 499 is nginx's status for it."""
    return HTTPException(499, detail=error_body("the client closed the connection"))


def unavailable(message: str) -> HTTPException:
    """The exception that answers 503: the server does not run the request."""
    return HTTPException(503, detail=error_body(message, kind="server_error"))


def cut_off() -> HTTPException:
    """The exception that answers 503 in place of an answer that has not got its last token; in a stream, after it."""
    return unavailable("the server stopped before this answer was complete")


def failed(error: object) -> HTTPException:
    """The exception that answers 500 after an error in a generation."""
    return HTTPException(500, detail=error_body(f"generation failed: {error}", kind="server_error"))


def answer_errors(app: FastAPI) -> None:
    """Make ``app`` answer every error in OpenAI's form."""
    app.add_exception_handler(StarletteHTTPException, _http_error)
    app.add_exception_handler(Exception, _failure)


async def _http_error(request: Request, error: Any) -> JSONResponse:
    body = error.detail if isinstance(error.detail, dict) else error_body(_nothing_here(request))
    response = JSONResponse(body, status_code=error.status_code, headers=error.headers)
    if hasattr(request.state, "request_id"):
        response.headers["x-request-id"] = request.state.request_id
    return response


def _nothing_here(request: Request) -> str:
    """What answers to another path or method than there is."""
    there = [
        f"{method} {route.path}"
        for route in request.app.routes
        if getattr(route, "include_in_schema", False)
        for method in sorted(route.methods)
    ]
    return f"no {request.method} {request.url.path[:80]!a} here; there is {', '.join(there)}"


async def _failure(_: Request, error: Any) -> JSONResponse:
    # Starlette logs the exception with its traceback.
    failure: Any = failed(error)
    return JSONResponse(failure.detail, status_code=500)
