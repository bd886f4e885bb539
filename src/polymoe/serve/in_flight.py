"""InFlight: one request's state while it is in the server, shared by the gate and the generation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from fastapi import HTTPException

__all__ = ["IN_FLIGHT", "InFlight", "current"]


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
    _callbacks: list[Callable[[HTTPException], None]] = field(default_factory=list)

    def leave(self, why: HTTPException) -> None:
        """Record that nobody waits for the answer, and run the callbacks of :meth:`on_leave` once."""
        if self.left is None:
            self.left = why
            self.gone.set()
            for callback in self._callbacks:
                callback(why)
        self._callbacks.clear()

    def on_leave(self, callback: Callable[[HTTPException], None]) -> None:
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
