"""What passes between a generation and the stream of its answer: text up to a stop string, and counting.

Transformers' handlers read items from a queue: text, marked text of reasoning, tool calls, an error, None at the end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from polymoe.serve.in_flight import InFlight
from polymoe.serve.metrics import ServerMetrics

__all__ = ["Counted", "UpToStop", "until_stop"]


def until_stop(text: str, stop: tuple[str, ...]) -> str:
    """What comes before the first stop string.

    >>> until_stop("12+34=46", ("=", "+3"))
    '12'
    """
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


class _Items:
    """A stream's queue, whose items pass through :meth:`_take` to those that are ready."""

    def __init__(self, queue: asyncio.Queue) -> None:
        self._queue = queue
        self._ready: deque[Any] = deque()

    async def get(self) -> Any:
        """The next item, waiting for it."""
        while not self._ready:
            self._take(await self._queue.get())
        return self._ready.popleft()

    def get_nowait(self) -> Any:
        """The next item.

        Raises:
            asyncio.QueueEmpty: if there is none yet.
        """
        while not self._ready:
            self._take(self._queue.get_nowait())
        return self._ready.popleft()

    def _take(self, item: Any) -> None:
        raise NotImplementedError


class UpToStop(_Items):
    """Text up to a stop string, which may come in pieces: what may be the start of one is held back."""

    def __init__(self, queue: asyncio.Queue, stop: tuple[str, ...]) -> None:
        super().__init__(queue)
        self._stop, self._held, self._stopped = stop, "", False

    def _take(self, item: Any) -> None:
        if type(item) is not str:  # reasoning, a tool call, an error, the end
            self._pass(self._held)
            self._held = ""
            self._ready.append(item)
        elif not self._stopped:
            text = self._held + item
            before = until_stop(text, self._stop)
            self._stopped = len(before) < len(text)
            self._held = "" if self._stopped else self._beginning(text)
            self._pass(before[: len(before) - len(self._held)])

    def _beginning(self, text: str) -> str:
        """The longest end of the text with which a stop string begins."""
        ends = (text[-n:] for n in range(min(len(text), max(map(len, self._stop)) - 1), 0, -1))
        return next((end for end in ends if any(stop.startswith(end) for stop in self._stop)), "")

    def _pass(self, text: str) -> None:
        if text:
            self._ready.append(text)


class Counted(_Items):
    """All items; the tokens behind them are counted."""

    def __init__(self, queue: asyncio.Queue, streamer: Any, request: InFlight, metrics: ServerMetrics) -> None:
        super().__init__(queue)
        self._streamer, self._request, self._metrics = streamer, request, metrics

    def _take(self, item: Any) -> None:
        self._metrics.generated(self._request, self._streamer.total_tokens - self._request.new_tokens)
        if item is None:
            self._metrics.ended(self._request)
        self._ready.append(item)
