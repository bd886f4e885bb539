"""Recordings of routing."""

from __future__ import annotations

import torch

from polymoe.layer.routing_trace import RoutingTrace, TracedLayer


def trace_of(calls: list[tuple[int, list[list[int]]]], *layers: TracedLayer) -> RoutingTrace:
    """A trace of calls, each with its layer and the experts of each of its tokens."""
    return RoutingTrace(
        "model",
        layers,
        torch.tensor([layer for layer, _ in calls], dtype=torch.int16),
        torch.tensor([len(rows) for _, rows in calls], dtype=torch.int32),
        torch.tensor([e for _, rows in calls for row in rows for e in row], dtype=torch.int16),
    )
