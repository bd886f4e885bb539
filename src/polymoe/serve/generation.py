"""Generation: what runs requests, together or one after the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from polymoe.errors import UnsupportedProblem
from polymoe.serve.choices import AnswerChoice
from polymoe.serve.continuous_batching import Batching, ContinuousBatching
from polymoe.serve.in_flight import InFlight
from polymoe.serve.metrics import ServerMetrics
from polymoe.serve.sequential import Sequential

__all__ = ["Generation"]

log = logging.getLogger("polymoe")


class Generation:
    """Runs the requests of one model.

    Args:
        model: as :func:`polymoe.engines.transformers.load` returns it.
        metrics: counts tokens and times.
        shared: whether requests share forward passes; None for wherever that is faster.
        graphs, cache_memory: of shared forward passes, as in
            :class:`~polymoe.serve.continuous_batching.Batching`.

    Attributes:
        stopping: once set, generations end at their next token, and those that wait are refused.
        sequential: runs requests one after the other.
        batches: lets them share forward passes, or None.
        batching: how, or why not.

    Raises:
        UnsupportedProblem: if requests are to share forward passes, or steps to be captured, and the model or the
            device does not allow it.
    """

    def __init__(
        self,
        model: Any,
        metrics: ServerMetrics,
        *,
        shared: bool | None = None,
        graphs: bool | None = None,
        cache_memory: float | None = None,
    ) -> None:
        self.stopping = threading.Event()
        self.sequential = Sequential(model, metrics, self.stopping)
        self.batches: ContinuousBatching | None = None
        self.batching: Batching | str = "not asked for"
        if shared is False:
            return
        # An option that only shared forward passes have asks for them.
        wanted = shared or graphs or cache_memory is not None
        try:
            self.batching = Batching.of(model, graphs=graphs, cache_memory=cache_memory)
            if not (wanted or self.batching.paged):
                self.batching = "the model needs 16 bit, a GPU since SM80 and attention without a cap"
                return
            self.batches = ContinuousBatching(model, metrics, self.stopping, self.batching)
        except UnsupportedProblem as error:
            if wanted:
                raise
            self.batching = f"{error.where} needs {error.expected}, got {error.got}"
            if model.device.type == "cuda":
                log.warning("requests run one after the other: %s", error)

    def start(self, choices: Sequence[AnswerChoice], request: InFlight) -> None:
        """Begin to generate the answers to a request. Their parts arrive in the current event loop.

        Raises:
            HTTPException: 503 if no request can be answered any more.
        """
        (self.batches or self.sequential).start(choices, request)

    def alive(self) -> bool:
        """Whether requests can be answered."""
        return (self.batches or self.sequential).alive()

    def close(self, timeout_s: float) -> bool:
        """Wait until no generation runs, at most ``timeout_s`` seconds; whether that is so then."""
        self.stopping.set()
        ended = self.batches is None or self.batches.close(timeout_s)
        return self.sequential.close(timeout_s) and ended
