"""Numbers as text."""

from __future__ import annotations

import pytest

from polymoe.common.units import format_tokens


@pytest.mark.parametrize(("tokens", "text"), [("1", "1 token"), ("1+", "1+ tokens"), ("2-32", "2-32 tokens")])
def test_only_one_token_is_singular(tokens: str, text: str) -> None:
    assert format_tokens(tokens) == text
