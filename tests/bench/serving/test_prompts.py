"""Prompts: exact under very different ways to count tokens, no two alike, and what cannot be made."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest

from polymoe.bench.serving.prompts import Prompts
from polymoe.errors import ArgumentError, ServerError


def made(count: Callable[[str], int], tokens: int, number: int = 3, *, seed: int = 1) -> tuple[list[str], int]:
    """Prompts, and how often was counted."""
    asked = []

    async def counted(text: str) -> int:
        asked.append(text)
        return count(text)

    async def make() -> list[str]:
        prompts = Prompts(counted, seed=seed)
        await prompts.calibrate()
        return await prompts.make(tokens, number)

    return asyncio.run(make()), len(asked)


def a_token_a_word(text: str) -> int:
    return 3 + len(text.split())


def a_token_a_character_and_few_of_them(text: str) -> int:
    if len(text) > 256:
        raise ServerError("/v1/completions", got="HTTP 400: too long")
    return len(text.replace(" ", ""))


def more_for_long_texts(text: str) -> int:
    """Not additive: the texts that calibrate are longer than 100 words."""
    words = len(text.split())
    return words + 50 * (words > 100)


def three_tokens_a_word(text: str) -> int:
    return 3 * len(text.split()) + 1


@pytest.mark.parametrize("tokens", [64, 200, 8192])
def test_prompts_have_the_tokens_wanted(tokens: int) -> None:
    texts, asked = made(a_token_a_word, tokens)
    assert [a_token_a_word(text) for text in texts] == [tokens] * 3
    assert asked == 3  # twice to calibrate, once to see that it is right


def test_digits_where_letters_are_too_many_tokens() -> None:
    texts, _ = made(a_token_a_character_and_few_of_them, 64)
    assert all(re.fullmatch(r"\d{64}", text) for text in texts)


def test_a_guess_that_is_off_is_set_right() -> None:
    texts, _ = made(more_for_long_texts, 64)
    assert {more_for_long_texts(text) for text in texts} == {64}


def test_where_words_are_too_coarse_the_nearest_is_taken() -> None:
    texts, _ = made(three_tokens_a_word, 65)
    assert {three_tokens_a_word(text) for text in texts} == {64}


def test_prompts_differ_from_their_first_words_and_come_back_with_the_seed() -> None:
    texts, _ = made(a_token_a_word, 64, 50)
    assert len({tuple(text.split()[:4]) for text in texts}) == 50
    assert made(a_token_a_word, 64, 50)[0] == texts
    assert not set(made(a_token_a_word, 64, 50, seed=2)[0]) & set(texts)


def test_too_short_for_a_word() -> None:
    with pytest.raises(ArgumentError, match="input_len: expected at least 4"):
        made(a_token_a_word, 2)


def test_a_count_that_never_grows() -> None:
    with pytest.raises(ArgumentError, match="whose count of tokens grows"):
        made(lambda text: 7, 64)


def test_a_server_that_counts_nothing() -> None:
    def fails(text: str) -> int:
        raise ServerError("/v1/completions", got="no usage")

    with pytest.raises(ServerError, match="no usage"):
        made(fails, 64)


@pytest.mark.parametrize("count", [lambda n: n**3, lambda n: 10**9, lambda n: 1 + n // 50])
def test_a_server_that_counts_nonsense_makes_no_endless_prompt(count: Callable[[int], int]) -> None:
    with pytest.raises((ArgumentError, ServerError)):
        made(lambda text: count(len(text.split())), 64, 1)
