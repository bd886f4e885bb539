"""The description of the API that ``/docs`` shows: the fields of requests, from the models that check them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

__all__ = ["describe"]


def describe(app: FastAPI, requests: Mapping[str, type[BaseModel]]) -> None:
    """Describe the bodies of requests, which the application reads itself, and the API key.

    Args:
        app: the application.
        requests: the fields of the POST requests to each path.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version="1", routes=app.routes)
            for path, kind in requests.items():
                schema = kind.model_json_schema()
                found["paths"][path]["post"]["requestBody"] = {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                }
            found.setdefault("components", {})["securitySchemes"] = {"API key": {"type": "http", "scheme": "bearer"}}
            found["security"] = [{"API key": []}]
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
