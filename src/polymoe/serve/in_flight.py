"""InFlight: the state of a request that is in the server, shared by the gate and the generation; and threads for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from fastapi import HTTPException

__all__ = ["IN_FLIGHT", "InFlight", "Threads", "current"]


@dataclass(slots=True, eq=False)
class InFlight:
    """One request.

    Attributes:
        arrived_s, started_s, first_token_s: when the request arrived, when its generation started and when the first
            token was generated, by :func:`time.monotonic`; None if that has not happened yet.
        prompt_tokens, new_tokens: counts so far.
        running: whether the model is working on the request; otherwise it waits or is finished.
        left: why nobody waits for the answer any more.
        gone: set once nobody reads the answer any more; the generation then ends at its next token.
    """

    arrived_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None
    first_token_s: float | None = None
    prompt_tokens: int = 0
    new_tokens: int = 0
    running: bool = False
    gone: threading.Event = field(default_factory=threading.Event)
    left: HTTPException | None = None
    _callbacks: list[Callable[[HTTPException], object]] = field(default_factory=list)

    def leave(self, why: HTTPException) -> None:
        """Record that nobody waits for the answer, and run the callbacks of :meth:`on_leave` once."""
        if self.left is None:
            self.left = why
            self.gone.set()
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
    cannot be interrupted.

    Args:
        name: of the threads.
        number: of them.
    """

    def __init__(self, name: str, number: int = 1) -> None:
        self._calls: SimpleQueue[tuple[Future, Callable, tuple[Any, ...]]] = SimpleQueue()
        for _ in range(number):
            threading.Thread(target=self._run, daemon=True, name=name).start()

    def submit(self, fn: Callable, *args: Any) -> Future:
        """Call ``fn(*args)``, unless the client of the current request leaves before."""
        future: Future = Future()
        self._calls.put((future, fn, args))
        current().on_leave(lambda _: future.cancel())
        return future

    async def result(self, fn: Callable, *args: Any) -> Any:
        """The result of ``fn(*args)``.

        Raises:
            HTTPException: the reason, if the client of the current request leaves.
        """
        request, waiting = current(), asyncio.wrap_future(self.submit(fn, *args))
        request.on_leave(lambda _: waiting.cancel())
        try:
            return await waiting
        except asyncio.CancelledError:
            if request.left is None:
                raise
            raise request.left from None

    def _run(self) -> None:
        while True:
            future, fn, args = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args))
                except Exception as error:
                    future.set_exception(error)
                except BaseException as error:  # the tokenizers package has errors that are no Exception
                    future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
            del future, fn, args  # free the prompt and the answer
