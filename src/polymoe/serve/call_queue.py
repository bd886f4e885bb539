"""CallQueue: threads beside the event loop, and the calls that wait for them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from polymoe.serve.in_flight import InFlight, current

__all__ = ["CallQueue"]

log = logging.getLogger("polymoe")


class CallQueue:
    """Calls that wait for a thread, in order. The calls of a client that leaves are removed.

    The threads are daemons: what they run cannot be interrupted, and the process ends without them.

    Args:
        name: of the threads.
        threads: how many there are.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._calls: deque[tuple[InFlight, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._running = 0
        for _ in range(threads):
            threading.Thread(target=self._run, daemon=True, name=name).start()

    def __len__(self) -> int:
        """Number of calls that wait."""
        return len(self._calls)

    @property
    def busy(self) -> bool:
        """Whether a call runs."""
        return self._running > 0

    def submit(self, fn: Callable, *args: Any, **kwargs: Any) -> Future:
        """Call ``fn`` for the request that the current task works on; a future to wait for in another thread."""
        future: Future = Future()

        def call() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # the tokenizers package has errors that are no Exception
                future.set_exception(error)

        self._add(current(), call)
        return future

    def async_submit(self, fn: Callable, *args: Any, **kwargs: Any) -> asyncio.Future:
        """Call ``fn`` for the request that the current task works on; a future to await in the event loop.

        If the client leaves, the future raises the reason.
        """
        loop, request = asyncio.get_running_loop(), current()
        future = loop.create_future()

        def settle(set_: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                set_(value)

        def call() -> None:
            try:
                settled: Any = future.set_result, fn(*args, **kwargs)
            except Exception as error:
                settled = future.set_exception, error
            except BaseException as error:
                settled = future.set_exception, RuntimeError(f"{type(error).__name__}: {error}")
            loop.call_soon_threadsafe(settle, *settled)

        self._add(request, call)
        request.on_leave(lambda why: settle(future.set_exception, why))
        return future

    def _add(self, request: InFlight, call: Callable[[], None]) -> None:
        with self._changed:
            self._calls.append((request, call))
            self._changed.notify()
        request.on_leave(lambda _: self._remove(request))

    def _remove(self, request: InFlight) -> None:
        with self._changed:
            self._calls = deque(waiting for waiting in self._calls if waiting[0] is not request)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls)
                _, call = self._calls.popleft()
                self._running += 1
            try:
                call()
            except RuntimeError as error:  # the event loop is closed: the server stopped before this answer
                log.debug("an answer came after the server stopped: %s", error)
            finally:
                with self._changed:
                    self._running -= 1
            del _, call  # free the prompt and the answer
