"""What every client reads in a server's replies: counts, and errors in all their forms."""

from __future__ import annotations

from typing import Any

import pytest

from polymoe.common.openai_client import error_message, token_count


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"error": {"message": "m", "code": 1}}', "m"),
        ('{"error": "m"}', "m"),
        ('{"detail": "m"}', "m"),
        ('{"detail": {"error": {"message": "m"}}}', "m"),
        ('{"object": "error", "message": "m"}', "m"),
        ("<html>m</html>", "<html>m</html>"),
        ('["m"]', '["m"]'),
        ('{"error": "a\\nb\\u001b[2J"}', "a b [2J"),
        ("m" * 9999, "m" * 500),
        ('{"error":' * 900, '{"error":' * 55 + '{"err'),
        ("", ""),
    ],
)
def test_errors_in_all_their_forms(body: str, says: str) -> None:
    assert error_message(body) == says


@pytest.mark.parametrize("count", [None, 0, 7, 10**9])
def test_counts(count: int | None) -> None:
    assert token_count({"tokens": count}, "tokens") == count
    assert token_count({}, "tokens") is None


@pytest.mark.parametrize("count", [-1, 10**9 + 1, True, 1.0, float("nan"), "3", [3], {}])
def test_counts_that_cannot_be_true(count: Any) -> None:
    with pytest.raises(ValueError, match=r"usage\.tokens is "):
        token_count({"tokens": count}, "tokens")
