"""What a server logs while it runs: each request, and the throughput of every ten seconds in which there was one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import MutableMapping
from typing import Any

from polymoe.serve.in_flight import InFlight
from polymoe.serve.metrics import ServerMetrics

__all__ = ["access_log", "log_throughput"]

access = logging.getLogger("polymoe.serve.access")
other = logging.getLogger("polymoe.serve.other")
throughput = logging.getLogger("polymoe.serve.throughput")

PERIOD_S = 10.0


def access_log(request: InFlight, scope: MutableMapping[str, Any], status: int) -> None:
    """Log one request; but not what only asks how the server is. Those that generate nothing, such as refused ones,
    have a logger of their own, with a limit, since clients can cause any number of them.

    Args:
        request: as it has left the server.
        scope: of the request in ASGI.
        status: of the response; 499 if the client closed the connection.
    """
    if scope["path"] in ("/health", "/metrics"):
        return
    client = (scope.get("client") or ("-",))[0]
    # A path may be anything, and a log has lines.
    line = f"{client} {scope['method']} {scope['path'][:80]!a} {status} {time.monotonic() - request.arrived_s:.2f} s"
    if request.prompt_tokens:
        line += f", {request.prompt_tokens} + {request.new_tokens} tokens"
    (access if status == 200 and request.prompt_tokens else other).info(line)


async def log_throughput(metrics: ServerMetrics, period_s: float = PERIOD_S) -> None:
    """Log the throughput of each period in which a request ran, until the task is cancelled."""
    before, start = _totals(metrics), time.monotonic()
    while True:
        await asyncio.sleep(period_s)
        now, end = _totals(metrics), time.monotonic()
        answered, prompt, new = (b - a for a, b in zip(before, now, strict=True))
        waiting = sum(request.started_s is None for request in metrics.in_flight)
        if answered or prompt or new or metrics.in_flight:
            throughput.info(
                "%.0f s: %d requests answered, %.0f prompt and %.1f answer tokens/s; %d running, %d waiting",
                end - start, answered, prompt / (end - start), new / (end - start),
                len(metrics.in_flight) - waiting, waiting,
            )  # fmt: skip
        before, start = now, end


def _totals(metrics: ServerMetrics) -> tuple[int, int, int]:
    return metrics.answered_requests, metrics.prompt_tokens, metrics.new_tokens
