"""Chooses what runs requests: forward passes that they share, or one generation after the other."""

from __future__ import annotations

import logging
import threading
from typing import Any

from polymoe.errors import UnsupportedProblem
from polymoe.serve.continuous_batching import Batching, ContinuousBatching
from polymoe.serve.metrics import ServerMetrics
from polymoe.serve.sequential import Sequential

log = logging.getLogger("polymoe")


def choose_generation(
    model: Any,
    metrics: ServerMetrics,
    stopping: threading.Event,
    *,
    shared: bool | None = None,
    graphs: bool | None = None,
    cache_memory: float | None = None,
) -> tuple[ContinuousBatching | Sequential, str]:
    """What runs the requests of one model, and why they do not share forward passes; "" if they do.

    Args:
        model: as :func:`polymoe.engines.transformers.load` returns it.
        metrics: counts tokens and times.
        stopping: once set, generations end at their next token, and those that wait are refused.
        shared: whether requests share forward passes; None for wherever that is faster.
        graphs, cache_memory: of shared forward passes, as in
            :class:`~polymoe.serve.continuous_batching.Batching`.

    Raises:
        UnsupportedProblem: if requests are to share forward passes, or steps to be captured, and the model or the
            device does not allow it.
    """
    # An option that only shared forward passes have asks for them.
    wanted, why = shared or graphs or cache_memory is not None, "not asked for"
    if shared is not False:
        try:
            batching = Batching.of(model, graphs=graphs, cache_memory=cache_memory)
            if wanted or batching.paged:
                return ContinuousBatching(model, metrics, stopping, batching), ""
            why = "the model needs 16 bit, a GPU since SM80 and attention without a cap"
        except UnsupportedProblem as error:
            if wanted:
                raise
            why = f"{error.where} needs {error.expected}, got {error.got}"
            if model.device.type == "cuda":
                log.warning("requests run one after the other: %s", error)
    return Sequential(model, metrics, stopping), why
