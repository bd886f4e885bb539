"""InFlight: the state of a request that is in the server, shared by the gate and the generation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from fastapi import HTTPException

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class InFlight:
    """One request.

    Attributes:
        arrived_s, started_s, first_token_s: when the request arrived, when its generation started and when the first
            token was generated, by :func:`time.monotonic`; None if that has not happened yet.
        prompt_tokens, new_tokens: counts so far.
        running: whether the model is working on the request; otherwise it waits or is finished.
        left: why nobody waits for the answer any more, or None; the generation then ends at its next token.
    """

    arrived_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None
    first_token_s: float | None = None
    prompt_tokens: int = 0
    new_tokens: int = 0
    running: bool = False
    left: HTTPException | None = None
    _callbacks: list[Callable[[HTTPException], object]] = field(default_factory=list)

    def leave(self, why: HTTPException) -> None:
        """Record that nobody waits for the answer, and run the callbacks of :meth:`on_leave` once."""
        if self.left is None:
            self.left = why
            for callback in self._callbacks:
                callback(why)
        self._callbacks.clear()

    def on_leave(self, callback: Callable[[HTTPException], object]) -> None:
        """Run ``callback`` in the event loop's thread with the reason of :meth:`leave`, at once if there is one."""
        if self.left is not None:
            callback(self.left)
        else:
            self._callbacks.append(callback)


IN_FLIGHT: ContextVar[InFlight | None] = ContextVar("IN_FLIGHT", default=None)
"""The request that the current task works on."""


def current() -> InFlight:
    """The request that the current task works on; a new one if the task was not started by the gate."""
    request = IN_FLIGHT.get()
    if request is None:
        request = InFlight()
        IN_FLIGHT.set(request)
    return request


class Threads:
    """Threads that run calls in order. Unlike those of an executor, they do not outlive the program: what they compute
    cannot be interrupted."""

    def __init__(self, name: str, number: int = 1) -> None:
        self._calls: SimpleQueue[tuple[Future, Callable, tuple[Any, ...]]] = SimpleQueue()
        for _ in range(number):
            threading.Thread(target=self._run, daemon=True, name=name).start()

    def submit(self, fn: Callable, *args: Any) -> Future:
        """Call ``fn(*args)``, unless the result is cancelled before."""
        future: Future = Future()
        self._calls.put((future, fn, args))
        return future

    def _run(self) -> None:
        while True:
            future, fn, args = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args))
                except BaseException as error:
                    future.set_exception(error)
            del future, fn, args  # free the prompt and the answer


async def in_thread(threads: Threads, fn: Callable[..., _T], *args: Any) -> _T:
    """The result of ``fn(*args)``, called in a thread unless the client of the current request leaves before.

    Raises:
        HTTPException: the reason, if the client leaves.
        RuntimeError: for an error that is no Exception, as those of the tokenizers package.
    """
    request, waiting = current(), asyncio.wrap_future(threads.submit(fn, *args))
    request.on_leave(lambda _: waiting.cancel())
    try:
        return await waiting
    except asyncio.CancelledError:
        if request.left is None:
            raise
        raise request.left from None
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
