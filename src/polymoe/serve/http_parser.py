"""HttpParser: h11's parser of HTTP/1.1, which refuses what is ambiguous or takes longer than its size suggests.

One thread serves all connections, and h11 needs 1 to 10 microseconds for each header and each chunk. Without limits,
the quarter of a megabyte that one read may return could keep the thread busy for half a second.
"""

from __future__ import annotations

import re
from typing import Any

import h11

__all__ = ["MAX_HEADERS", "MAX_HEAD_BYTES", "SMALL_CHUNKS", "HttpParser"]

MAX_HEAD_BYTES = 32 * 1024
"""Maximum size of the request line and all headers."""
MAX_HEADERS = 128
"""Maximum number of headers, and of lines after the last chunk of a body."""
SMALL_CHUNKS = 256
"""Chunks of a body beyond this number must have 1 KiB on average."""

_BLANK_LINE = re.compile(rb"\n\r?\n")
_LAST_CHUNK = re.compile(rb"(?:\r\n)?0+(?:[ \t;][^\n]*)?\r?\n")


class HttpParser(h11.Connection):
    """The parser of one connection's requests.

    Attributes:
        refusal: status and message for the client if one of the limits above is exceeded.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.refusal: tuple[int, str] | None = None
        self._chunked = False
        self._chunks = self._bytes = 0

    def next_event(self) -> Any:
        """As h11's.

        Raises:
            h11.RemoteProtocolError: for what is not HTTP, or exceeds a limit.
        """
        if self.their_state is h11.IDLE:
            self._check_lines(self.trailing_data[0])
        elif self._chunked and self.their_state is h11.SEND_BODY:
            received = self.trailing_data[0]
            last = _LAST_CHUNK.match(received)
            if last:
                self._check_lines(received[last.end() :])
        event = super().next_event()
        if isinstance(event, h11.Request):
            if event.http_version not in (b"1.0", b"1.1"):
                self._refuse(505, "this server speaks HTTP/1.1")
            names = {name for name, _ in event.headers}
            if names >= {b"content-length", b"transfer-encoding"}:  # a proxy may see another end of the request
                self._refuse(400, "content-length and transfer-encoding exclude each other")
            self._chunked = b"transfer-encoding" in names
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > SMALL_CHUNKS + self._bytes // 1024:
                self._refuse(400, "the chunks of the request's body are too small")
        return event

    def _check_lines(self, received: bytes) -> None:
        """Check the lines up to the first blank one: headers, or what may follow the last chunk."""
        blank = _BLANK_LINE.search(received, 0, MAX_HEAD_BYTES + 4)
        lines = received[: blank.start() if blank else MAX_HEAD_BYTES + 4]
        if len(lines) > MAX_HEAD_BYTES or lines.count(b"\n") > MAX_HEADERS:
            self._refuse(431, f"a request may have at most {MAX_HEADERS} headers in {MAX_HEAD_BYTES} bytes")

    def _refuse(self, status: int, message: str) -> None:
        self.refusal = status, message
        raise h11.RemoteProtocolError(message, error_status_hint=status)
