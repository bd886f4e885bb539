"""Parts of an OpenAI-compatible server's replies that every client reads. The server may send anything.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polymoe.common.json_input import parse_json

__all__ = ["MAX_BYTES", "MAX_TOKENS", "error_message", "one_line", "percentile", "token_count"]

MAX_BYTES = 32 * 2**20
"""Largest reply that is read. A million tokens with their probabilities are smaller."""
MAX_TOKENS = 10**9
"""No count of tokens in one reply is larger."""


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile of at least one value, interpolated linearly between the two nearest, as numpy's default.

    Definition: R. J. Hyndman and Y. Fan, "Sample quantiles in statistical packages", 1996, type 7.
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def token_count(usage: Mapping[str, Any], name: str) -> int | None:
    """Return a count of ``usage``; None if the server does not count.

    Raises:
        ValueError: for anything but a whole number from 0 to :data:`MAX_TOKENS`.
    """
    value = usage.get(name)
    if value is not None and not (type(value) is int and 0 <= value <= MAX_TOKENS):  # a bool is not a count
        raise ValueError(f"usage.{name} is {one_line(repr(value))}")
    return value


def error_message(body: str) -> str:
    """Return the message in the body of an error, in any of the usual forms, else the body itself."""
    try:
        found = parse_json(body)
    except ValueError:
        found = None
    return one_line(_message(found) if isinstance(found, dict) else body, 500)


def one_line(text: str, length: int = 80) -> str:
    """Return the beginning of a server's text for a message: without line breaks and control sequences."""
    return "".join(c if c.isprintable() else " " for c in text[:length]).strip()


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error") or body.get("detail") or body.get("message")
    if isinstance(error, dict):
        return _message(error) if "error" in error else str(error.get("message", error))
    return str(error)
