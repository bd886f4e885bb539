"""The answer's way back: text up to a stop string, counted tokens, and server-sent events in OpenAI's form.

Transformers' handlers read items from a queue: text, text marked as reasoning, tool calls, an error, and None at the
end. The classes here are such queues around Transformers' own.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from polymoe.serve.errors import error_body
from polymoe.serve.in_flight import InFlight
from polymoe.serve.metrics import ServerMetrics

__all__ = ["CountedQueue", "StopQueue", "finish_stream", "until_stop"]


def until_stop(text: str, stop: tuple[str, ...]) -> str:
    """The text before the first stop string.

    >>> until_stop("12+34=46", ("=", "+3"))
    '12'
    """
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


class _Queue:
    """A queue whose items pass through :meth:`_take`, which appends to ``_ready`` what the reader gets."""

    def __init__(self, queue: asyncio.Queue) -> None:
        self._queue = queue
        self._ready: deque[Any] = deque()

    async def get(self) -> Any:
        """Wait for the next item and return it."""
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


class StopQueue(_Queue):
    """Ends text at a stop string, which may arrive in pieces: text that may be the start of one is held back."""

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
            self._held = "" if self._stopped else self._possible_start(text)
            self._pass(before[: len(before) - len(self._held)])

    def _possible_start(self, text: str) -> str:
        """The longest suffix of the text that is a prefix of a stop string."""
        suffixes = (text[-n:] for n in range(min(len(text), max(map(len, self._stop)) - 1), 0, -1))
        return next((suffix for suffix in suffixes if any(stop.startswith(suffix) for stop in self._stop)), "")

    def _pass(self, text: str) -> None:
        if text:
            self._ready.append(text)


class CountedQueue(_Queue):
    """Passes every item on and counts the tokens behind it."""

    def __init__(self, queue: asyncio.Queue, streamer: Any, request: InFlight, metrics: ServerMetrics) -> None:
        super().__init__(queue)
        self._streamer, self._request, self._metrics = streamer, request, metrics

    def _take(self, item: Any) -> None:
        self._metrics.generated(self._request, self._streamer.total_tokens - self._request.new_tokens)
        if item is None:
            self._metrics.ended(self._request)
        self._ready.append(item)


async def finish_stream(parts: Any) -> AsyncIterator[str]:
    """Server-sent events of Transformers, with errors in OpenAI's form and OpenAI's last line, ``data: [DONE]``."""
    async with aclosing(parts):
        async for part in parts:
            before, error, message = part.partition('data: {"error": ')
            if error:
                body = error_body(json.loads('{"error": ' + message)["error"], kind="server_error")
                yield f"{before}data: {json.dumps(body)}\n\n"
                break
            yield part
    yield "data: [DONE]\n\n"
