"""``explain``: the problems and selections of a whole checkpoint, from its config alone."""

from __future__ import annotations

from polymoe.explanation.explanation import Explanation, ModelTime, Row, explain
from polymoe.explanation.fit import RESERVE, Fit, Ranks, fit_of

__all__ = ["RESERVE", "Explanation", "Fit", "ModelTime", "Ranks", "Row", "explain", "fit_of"]
