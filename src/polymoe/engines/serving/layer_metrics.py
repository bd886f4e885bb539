"""LayerMetrics: what runs which layers, as gauges of prometheus_client in the engine's process, beside its own metrics.

Both engines serve the default registry, or all processes' files in ``PROMETHEUS_MULTIPROC_DIR``; each process has
series of its own, with its ``pid`` in the second case.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

from polymoe.planning.selection import Selection
from polymoe.problem.verdict import Reason

_PACKED = ("engine", "backend", "format", "layout")
_LEFT = ("engine", "reason")


class LayerMetrics:
    """The gauges of one engine, its label; nothing happens where prometheus_client is not installed."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._packed: dict[str, tuple[str, ...]] = {}
        self._left: dict[str, tuple[str, ...]] = {}

    def packed(self, where: str, selection: Selection) -> None:
        """Count a layer that polymoe runs; again after a reload counts once."""
        plan = selection.require()
        backends = "+".join(dict.fromkeys(step.backend for step in plan.steps))
        self._packed[where] = (self._engine, backends, selection.problem.spec.format, plan.layout)
        _set("polymoe_layers", "Layers whose experts polymoe runs, in this process.", _PACKED, self._packed)

    def left(self, where: str, reasons: tuple[Reason, ...]) -> None:
        """Count a layer that the engine keeps, by what stands against polymoe."""
        self._left[where] = (self._engine, ", ".join(dict.fromkeys(reason.what for reason in reasons)))
        _set("polymoe_layers_left", "Layers of experts that the engine keeps, in this process.", _LEFT, self._left)


def _set(name: str, what: str, labels: tuple[str, ...], layers: dict[str, tuple[str, ...]]) -> None:
    gauge = _gauge(name, what, labels)
    if gauge is not None:
        for values, count in Counter(layers.values()).items():
            gauge.labels(*values).set(count)


@cache  # a name is registered once
def _gauge(name: str, what: str, labels: tuple[str, ...]) -> Any:
    try:
        # Not before the first layer: prometheus_client decides at import whether it writes files for other processes.
        from prometheus_client import Gauge
    except ImportError:
        return None
    try:
        return Gauge(name, what, labels, multiprocess_mode="liveall")
    except ValueError:  # the name is taken: what is not counted is no reason to stop an engine
        return None
