"""A request's body: JSON, with limits on what reading it may cost and without anything that two readers could read
differently.

JSON: https://www.rfc-editor.org/rfc/rfc8259
"""

from __future__ import annotations

import json
import re
from typing import Any

from polymoe.common.json_input import DuplicateKeyError, parse_json
from polymoe.serve.errors import refusal

MAX_DEPTH = 64
"""How deep objects and lists may be nested. Python's own limit is an error in the middle of whatever reads them."""
MAX_VALUES = 50_000
"""How many values there may be in all. An empty list is two bytes in JSON and 56 in memory."""


def parse_object(content: bytes) -> dict[str, Any]:
    """The JSON object that ``content`` is, in UTF-8.

    Raises:
        HTTPException: 400 for anything else, and for what :func:`parse` refuses.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise refusal("the body must be a JSON object in UTF-8") from error
    body = parse(text)
    if not isinstance(body, dict):
        raise refusal("the body must be a JSON object")
    return body


def parse(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        HTTPException: 400 for invalid JSON, duplicate names, numbers that no float can have, NaN, halves of surrogate
            pairs, and more depth or values than the limits.
    """
    _check_size(text)
    try:
        return parse_json(text, unique_keys=True, surrogates=False, max_depth=None, parse_int=_int, parse_float=_float)
    except json.JSONDecodeError as error:
        raise refusal(f"invalid JSON: {error}") from error
    except DuplicateKeyError as error:
        raise refusal(f"duplicate name in an object: {error.key[:80]!r}", param=error.key) from error
    except UnicodeEncodeError as error:
        raise refusal("a text is not valid Unicode: half of a surrogate pair") from error
    except ValueError as error:
        raise refusal(str(error)) from error


def _check_size(text: str) -> None:
    # Without escapes, every second part between quotation marks is outside strings.
    outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    values = outside.count(",") + outside.count("[") + outside.count("{")
    if values > MAX_VALUES:
        raise refusal(f"JSON may have at most {MAX_VALUES} values")
    depth = 0
    for bracket in re.finditer(r"[\[\]{}]", outside):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MAX_DEPTH:
            raise refusal(f"objects and lists may be nested at most {MAX_DEPTH} deep")
        if depth < 0:
            break  # this is not JSON, and the parser says where


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise refusal(f"a number is too large: {text[:80]}")
    return value


def _int(text: str) -> int:
    if len(text) > 20:
        raise refusal(f"an integer is too large: {text[:80]}")
    return int(text)
