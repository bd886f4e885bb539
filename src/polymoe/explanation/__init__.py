"""``explain``: the problems and selections of a whole checkpoint, from its config alone."""

from __future__ import annotations

from polymoe.explanation.explanation import RESERVE, Explanation, ModelTime, Row, explain

__all__ = ["RESERVE", "Explanation", "ModelTime", "Row", "explain"]
