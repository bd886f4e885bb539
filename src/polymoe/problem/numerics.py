"""Error of a result, and the tolerance of a correct backend (leaf: imports no other module of polymoe)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 6e-3
"""Largest relative error (norm of the difference over norm of the reference) of a correct backend, against the
reference that emulates the same activations: about two roundings to bfloat16."""


TOLERANCE_E2M1 = 5e-2
"""The same where x and h are rounded to E2M1. Its numbers are far apart, so that h rounded to bfloat16 first becomes
another number here and there: about 3 % of the norm. Results without rounding to E2M1 differ by 13 to 15 %."""

TOLERANCE_FAST_ACCUMULATION = 1.3e-2
"""The same where tensor cores add up all of K. They keep 14 bits, so that h is rounded to another E4M3 number here and
there: 1.0e-2 to 1.2e-2 with 4096 columns."""


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of ``expected``, in float64; 0 where both are zero."""
    difference = (got.double() - expected.double()).norm()
    norm = expected.double().norm()
    return float(difference / norm) if norm else float(difference)
