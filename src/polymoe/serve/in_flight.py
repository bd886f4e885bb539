"""A request on its way through the server, seen by the gate that watches its client and by the generation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

__all__ = ["IN_FLIGHT", "InFlight", "current"]


@dataclass(slots=True, eq=False)
class InFlight:
    """One request.

    Attributes:
        arrived_s, started_s, first_token_s: when it came, when its generation began, and when that gave its first
            token, by :func:`time.monotonic`; None if not yet.
        prompt_tokens, new_tokens: so far.
        running: whether the model works for it; else it waits, or is done.
        gone: set once nobody reads the answer; generation ends at its next token.
        stop: strings that end the answer.
        seed: of its sampling; None for any.
    """

    arrived_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None
    first_token_s: float | None = None
    prompt_tokens: int = 0
    new_tokens: int = 0
    running: bool = False
    gone: threading.Event = field(default_factory=threading.Event)
    stop: tuple[str, ...] = ()
    seed: int | None = None
    _callbacks: list[Callable[[], None]] = field(default_factory=list)

    def leave(self) -> None:
        """The client has gone: say so, once, to whoever asked to know."""
        if not self.gone.is_set():
            self.gone.set()
            for callback in self._callbacks:
                callback()
        self._callbacks.clear()

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the client goes, in the thread of the event loop; now, if it has gone."""
        if self.gone.is_set():
            callback()
        else:
            self._callbacks.append(callback)


IN_FLIGHT: ContextVar[InFlight | None] = ContextVar("IN_FLIGHT", default=None)
"""The request that this task works for."""


def current() -> InFlight:
    """The request that this task works for; a new one where no gate has set any."""
    request = IN_FLIGHT.get()
    if request is None:
        request = InFlight()
        IN_FLIGHT.set(request)
    return request
