"""ServerMetrics: counters and histograms of one server, in Prometheus' text format.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import time
from collections import Counter as Count
from collections.abc import Iterator
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import cache_stats_of
from polymoe.serve.in_flight import InFlight

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_SECONDS_A_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class ServerMetrics:
    """Metrics of one server, with the model's name in labels, and the requests that it is working on: ``in_flight`` are
    generations that were admitted and have not been answered, running or waiting."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, *, name: str, model: Any) -> None:
        self.in_flight: set[InFlight] = set()
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter("polymoe_requests", "Requests by status.", ("path", "status"), registry=registry)
        what = "Prompt tokens of generations that have started."
        self._prompt_tokens = Counter("polymoe_prompt_tokens", what, registry=registry)
        self._new_tokens = Counter("polymoe_generation_tokens", "Tokens generated.", registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, what, buckets=buckets, registry=registry)

        self._queue = histogram("polymoe_queue_seconds", "Time that a request waits for the model.")
        what = "Time from a request's arrival to its first token."
        self._first = histogram("polymoe_time_to_first_token_seconds", what)
        what = "Mean time between the tokens of an answer."
        self._per_token = histogram("polymoe_time_per_output_token_seconds", what, _SECONDS_A_TOKEN)
        what = "Time from a request's arrival to the end of its answer."
        self._whole = histogram("polymoe_request_seconds", what)
        running = Gauge("polymoe_requests_running", "Generations that the model is working on.", registry=registry)
        running.set_function(lambda: sum(request.running for request in list(self.in_flight)))
        waiting = Gauge("polymoe_requests_waiting", "Generations that wait for the model.", registry=registry)
        waiting.set_function(lambda: sum(request.started_s is None for request in list(self.in_flight)))
        layers_of = Gauge(
            "polymoe_backend_info",
            "Layers whose experts this backend runs at these token counts.",
            ("model", "backend", "layout", "tokens"),
            registry=registry,
        )
        for labels, layers in backends(model).items():
            layers_of.labels(name, *labels).set(layers)
        if cache_stats_of(model):
            registry.register(_Slots(model))

    def text(self) -> bytes:
        """The answer of ``/metrics``."""
        return generate_latest(self._registry)

    def started(self, request: InFlight) -> None:
        """Record that the model starts to work on a request, the first time."""
        if request.started_s is not None:
            return
        request.started_s = time.monotonic()
        request.running = True
        self._queue.observe(request.started_s - request.arrived_s)
        self._prompt_tokens.inc(request.prompt_tokens)

    def generated(self, request: InFlight) -> None:
        """Record a token of an answer."""
        if request.first_token_s is None:
            request.first_token_s = time.monotonic()
            self._first.observe(request.first_token_s - request.arrived_s)
        request.new_tokens += 1
        self._new_tokens.inc()

    def ended(self, request: InFlight) -> None:
        """Record that the model has finished with a request."""
        request.running = False
        if request.first_token_s is not None and request.new_tokens > 1:
            between = (time.monotonic() - request.first_token_s) / (request.new_tokens - 1)
            self._per_token.observe(between)

    def answered(self, request: InFlight, path: str, status: int) -> None:
        """Record that a request has left the server; status 499 means that its client closed the connection."""
        self._requests.labels(path, str(status)).inc()
        if request in self.in_flight:
            self.in_flight.discard(request)
            if status == 200:
                self._whole.observe(time.monotonic() - request.arrived_s)


class _Slots(Collector):
    """Counters of experts in host memory, which each layer keeps where its slots are."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Read them; waits for the GPU."""
        found = cache_stats_of(self._model)
        for key, name, what in (
            ("hits", "polymoe_expert_hits", "Experts that a call needed and that were in a slot on the GPU."),
            ("misses", "polymoe_expert_misses", "Experts that a call needed and that were in no slot."),
            ("copied_bytes", "polymoe_expert_copied_bytes", "Bytes of experts copied from host memory."),
        ):
            family = CounterMetricFamily(name, what, labels=("layer",))
            for layer, stats in found.items():
                family.add_metric((layer,), stats[key])
            yield family


def backends(model: Any) -> Count[tuple[str, str, str]]:
    """Return the number of layers by backend, layout and range of token counts.

    It is empty if Transformers runs the experts.
    """
    found: Count[tuple[str, str, str]] = Count()
    for module in model.modules():
        if isinstance(module, FusedExperts):
            plan = module.explain().require()
            for tokens, step in plan.ranges():
                found[step.backend, plan.layout, tokens] += 1
    return found
