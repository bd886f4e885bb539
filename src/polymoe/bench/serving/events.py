"""Server-sent events: the data of each event of a stream, whatever parts the stream arrives in.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import re

__all__ = ["MAX_EVENT_BYTES", "EventReader"]

MAX_EVENT_BYTES = 2**20
"""Largest event that is read. One with a token and the probabilities of twenty others has a few thousand bytes."""

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class EventReader:
    """Collects the bytes of one stream until events are complete. Takes linear time."""

    def __init__(self) -> None:
        self._line: list[bytes] = []  # parts of a line that has not ended
        self._data: list[bytes] = []  # data lines of an event that has not ended
        self._size = 0
        self._begins = True
        self._return = False  # whether the last part ended in \r, which a \n may follow

    def feed(self, part: bytes) -> list[bytes]:
        """Return the data of each event that ends in this part of the stream; several data lines are joined by line
        feeds.

        Raises:
            ValueError: if an event is too large.
        """
        part = b"\r" + part if self._return else part
        self._return = part.endswith(b"\r")
        *lines, rest = _LINE_END.split(part[:-1] if self._return else part)
        found = []
        for line in lines:
            self._grow(len(line))
            whole = b"".join((*self._line, line))
            self._line.clear()
            if self._begins:
                whole, self._begins = whole.removeprefix(_BOM), False
            if not whole:
                found += self._event()
                continue
            name, _, value = whole.partition(b":")
            if name == b"data":  # other fields and comments carry nothing that is measured
                self._data.append(value.removeprefix(b" "))
        if rest:
            self._line.append(rest)
            self._grow(len(rest))
        return found

    def end(self) -> list[bytes]:
        """Return the data of the event that the stream's end completes: some servers omit the last blank line."""
        found = self.feed(b"\n") if self._return else []
        return found + self._event()

    def _event(self) -> list[bytes]:
        data, self._data, self._size = self._data, [], 0
        return [b"\n".join(data)] if data else []

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
