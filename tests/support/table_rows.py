"""Rows of measured times and of proofs for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polymoe.planning.measured import Measured
from polymoe.planning.proof import Proof


def row(tokens: int = 1, median_us: float = 10.0, **changes: Any) -> Measured:
    values: dict[str, Any] = {
        "device": "h200", "backend": "toy", "problem": "p", "tokens": tokens, "config": {"tile": 16},
        "median_us": median_us, "torch": "2.11.0", "triton": "3.6.0", "driver": "13.0", "polymoe": "0.1.0",
        "date": "2026-01-01T00:00:00Z", "command": "polymoe tune",
    }  # fmt: skip
    return Measured(**{**values, **changes})


def proof(backend: str, status: Any = "run", **changes: Any) -> Proof:
    found = Proof(
        backend=backend,
        family="",
        format="mxfp4",
        activations="16bit",
        device="h200",
        status=status,
        commit="abc",
        date="2026-01-01T00:00:00Z",
        source="run-h200.jsonl",
    )
    return replace(found, **changes)
