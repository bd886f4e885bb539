"""Server-sent events: the same ones however the stream is cut, and no more bytes than an event may have."""

from __future__ import annotations

import itertools
import time

import pytest

from polymoe.bench.serving.events import MAX_EVENT_BYTES, EventReader

STREAM = 'data: {"ü": "😀"}\n\n: a comment\nevent: message\ndata: two\ndata:lines\ndata\n\n\n\ndata:  space \n\nid: 7\n\ndata: last\n'  # noqa: E501
EVENTS = ['{"ü": "😀"}', "two\nlines\n", " space ", "last"]


def read(parts: list[bytes]) -> list[str]:
    reader = EventReader()
    found = [event for part in parts for event in reader.feed(part)]
    return [event.decode() for event in (*found, *reader.end())]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_events_are_the_same_however_the_stream_is_cut(end: str, mark: str) -> None:
    stream = (mark + STREAM.replace("\n", end)).encode()
    for size in (1, 2, 3, 7, len(stream)):
        assert read([stream[i : i + size] for i in range(0, len(stream), size)]) == EVENTS, size
    for cut in range(len(stream)):  # in the middle of a character, and of a line's end
        assert read([stream[:cut], stream[cut:]]) == EVENTS, cut


def test_an_event_is_complete_at_its_blank_line() -> None:
    reader = EventReader()
    assert reader.feed(b"data: 1\n") == []
    assert reader.feed(b"\n") == [b"1"]
    assert reader.feed(b"data: 2\r\n\r") == []  # a line feed may follow
    assert reader.feed(b"\n") == [b"2"]
    assert reader.feed(b"data: half") == []
    assert reader.end() == []


@pytest.mark.parametrize("part", [b"x", b"data: 1\n", b": comment\n", b"\xff" * 1000])
def test_an_event_that_never_ends_is_refused_in_linear_time(part: bytes) -> None:
    reader = EventReader()
    started = time.process_time()
    with pytest.raises(ValueError, match="an event of more than"):
        all(reader.feed(part) == [] for part in itertools.repeat(part))
    assert time.process_time() - started < 10


def test_many_events_are_no_large_event() -> None:
    reader = EventReader()
    event = b"data: " + b"x" * (MAX_EVENT_BYTES // 2) + b"\n\n"
    assert sum(len(reader.feed(event)) for _ in range(8)) == 8
