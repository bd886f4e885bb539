"""Text up to a stop string, in pieces of any size."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from polymoe.serve.streams import StopQueue, until_stop


def passed(pieces: list[Any], *stop: str) -> list[Any]:
    """The items that pass; None is the end."""

    async def all_of_it() -> list[Any]:
        queue: asyncio.Queue = asyncio.Queue()
        for piece in [*pieces, None]:
            queue.put_nowait(piece)
        items, found = StopQueue(queue, stop), []
        while not found or found[-1] is not None:
            found.append(await items.get())
            while found[-1] is not None:
                try:
                    found.append(items.get_nowait())
                except asyncio.QueueEmpty:
                    break
        return found

    return asyncio.run(all_of_it())


@pytest.mark.parametrize(("text", "stop", "before"), [
    ("one two three", ("two",), "one "),
    ("one two three", ("three", "two"), "one "),
    ("aab", ("ab",), "a"),
    ("aaab", ("aab",), "a"),
    ("abcabd", ("abd",), "abc"),
    ("abcab", ("abd",), "abcab"),
    ("one", ("one",), ""),
    ("", ("one",), ""),
])  # fmt: skip
def test_in_pieces_of_any_size(text: str, stop: tuple[str, ...], before: str) -> None:
    assert until_stop(text, stop) == before
    for cuts in itertools.product([False, True], repeat=max(0, min(len(text) - 1, 9))):
        pieces, start = [], 0
        for at, cut in enumerate(cuts, 1):
            if cut:
                pieces.append(text[start:at])
                start = at
        pieces.append(text[start:])
        *found, end = passed([p for p in pieces if p], *stop)
        assert end is None
        assert "".join(found) == before
        assert all(found)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    assert passed(["abc", "x", "ab", "y"], "abd") == ["abc", "x", "aby", None]


def test_other_items_pass_in_their_place() -> None:
    class Reasoning(str):
        __slots__ = ()

    thought, call = Reasoning("ab"), object()
    assert passed(["a", thought, "b", call, "a"], "ab") == ["a", thought, "b", call, "a", None]
    assert passed(["xab", call, "y"], "ab") == ["x", call, None]
