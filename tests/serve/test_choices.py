"""One answer from tokens to parts: stop strings in pieces of any size, and what ends an answer."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from polymoe.engines.transformers.replies import ReplyPart
from polymoe.serve.choices import AnswerChoice, ChoicePart, StopStrings
from polymoe.serve.errors import unavailable
from polymoe.serve.sampling import TokenSampler
from polymoe.serve.settings import GenerationSettings


def passed(pieces: list[str], *stop: str) -> list[str]:
    strings = StopStrings(stop)
    found = [strings.feed(piece) for piece in pieces]
    return [*found, "" if strings.found else strings.rest()]


@pytest.mark.parametrize(("text", "stop", "before"), [
    ("one two three", ("two",), "one "),
    ("one two three", ("three", "two"), "one "),
    ("aab", ("ab",), "a"),
    ("aaab", ("aab",), "a"),
    ("abcabd", ("abd",), "abc"),
    ("abcab", ("abd",), "abcab"),
    ("one", ("one",), ""),
    ("", ("one",), ""),
    ("one", (), "one"),
])  # fmt: skip
def test_in_pieces_of_any_size(text: str, stop: tuple[str, ...], before: str) -> None:
    for cuts in itertools.product([False, True], repeat=max(0, min(len(text) - 1, 9))):
        pieces, start = [], 0
        for at, cut in enumerate(cuts, 1):
            if cut:
                pieces.append(text[start:at])
                start = at
        assert "".join(passed([*pieces, text[start:]], *stop)) == before


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    assert passed(["abc", "x", "ab", "y"], "abd") == ["abc", "x", "", "aby", ""]


def choice(pieces: list[ReplyPart], **settings: Any) -> AnswerChoice:
    """An answer whose token n has the n-th part; 99 ends it."""
    reader: Any = SimpleNamespace(feed=lambda ids: [pieces[i] for i in ids if i < len(pieces)], finish=list)
    sampler = TokenSampler(replace(GenerationSettings(), **settings), [1, 2])
    ends = (99, *settings.get("stop_token_ids", ()))
    return AnswerChoice(0, [1, 2], ends, settings.get("max_tokens", 99), sampler, reader, asyncio.Queue())


def parts_of(answer: AnswerChoice) -> list[ChoicePart]:
    return [answer.out.get_nowait() for _ in range(answer.out.qsize())]


THOUGHT, CALL = ReplyPart("reasoning", "ab"), ReplyPart("tool_call", "f({})", "f", "{}")


def words(*texts: str) -> list[ReplyPart]:
    return [ReplyPart("content", text) for text in texts]


def test_other_parts_pass_in_their_place() -> None:
    answer = choice([*words("a"), THOUGHT, *words("b"), CALL, *words("a")], stop=("ab",))
    for token in (0, 1, 2, 3, 4, 99, 0):
        answer.feed(token)
    found = parts_of(answer)
    assert [part for each in found for part in each.parts] == [*words("a"), THOUGHT, *words("b"), CALL, *words("a")]
    assert (answer.tokens, found[-1].finish) == (6, "tool_calls")


@pytest.mark.parametrize(
    ("settings", "tokens", "text", "count", "finish"),
    [
        ({}, [0, 1, 99], "xy", 3, "stop"),
        ({"stop": ("y",)}, [0, 1, 2], "x", 2, "stop"),
        ({"stop": ("y", "z"), "min_tokens": 3}, [0, 1, 2, 0], "xy", 3, "stop"),
        ({"stop_token_ids": (1,)}, [0, 1, 2], "x", 2, "stop"),
        ({"max_tokens": 2}, [0, 1, 2], "xy", 2, "length"),
        ({"max_tokens": 3}, [0, 1, 99], "xy", 3, "stop"),
        ({"max_tokens": 1, "stop": ("xz",)}, [0], "x", 1, "length"),
    ],
    ids=str,
)
def test_what_ends_an_answer(settings: Any, tokens: list[int], text: str, count: int, finish: str) -> None:
    answer = choice(words("x", "y", "z"), **settings)
    ended: list[bool] = []
    answer.on_end = lambda: ended.append(answer.ended)
    for token in tokens:
        answer.feed(token)
    found = parts_of(answer)
    assert "".join(part.text for each in found for part in each.parts) == text
    assert (answer.tokens, found[-1].finish, ended) == (count, finish, [True])
    answer.fail(unavailable("late"))
    assert answer.out.empty()


def test_an_error_comes_once() -> None:
    failing = choice(words("x"))
    failing.fail(unavailable("gone"))
    failing.fail(unavailable("again"))
    failing.feed(0)
    [part] = parts_of(failing)
    assert part.error is not None
