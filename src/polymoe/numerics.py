"""Error of a result, and the tolerance of a correct backend (leaf: imports no other module of polymoe)."""

from __future__ import annotations

from torch import Tensor

__all__ = ["TOLERANCE", "relative_error"]

TOLERANCE = 6e-3
"""Largest relative error (norm of the difference over norm of the reference) of a correct backend, against the
reference that emulates the same activations: about two roundings to bfloat16."""


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of ``expected``, in float64; 0 where both are zero."""
    difference = (got.double() - expected.double()).norm()
    norm = expected.double().norm()
    return float(difference / norm) if norm else float(difference)
