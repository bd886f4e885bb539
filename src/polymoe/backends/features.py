"""Features of a Problem: what a backend declares that it handles. What it does not declare is rejected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from polymoe.problem import Problem
from polymoe.problem.tensors import ExpertsSpec
from polymoe.problem.verdict import Reason


class _Any(tuple[object, ...]):
    """Every value."""

    def __contains__(self, value: object) -> bool:
        return True


ANY = _Any()
"""For a field of which every value is handled, or checked elsewhere."""

Handled = Mapping[str, tuple[object, ...]]
"""Values by field of a Problem, or of its spec as ``spec.bias``; a class stands for its instances. The default value of
a field that has one is always handled."""

SHARDS: Handled = {"tp": ANY, "ep": ANY, "spec.first_expert": ANY, "spec.local_experts": ANY}
"""Ranks of a tensor or expert parallel group: ids of other ranks' experts add nothing, sizes are those of this rank."""

_ALWAYS = {"top_k", "spec.hidden", "spec.intermediate", "spec.experts", "spec.up", "spec.down", "spec.gate"}
"""Fields that every problem has; ``check`` looks at their values."""

_WORDS = {
    "batch_invariant": "batch-invariant results",
    "spec.bias": "biases",
    "weight_on": "routing weight on",
    "scales": "",
}


def unhandled(handled: Handled, problem: Problem) -> tuple[Reason, ...]:
    """Return a reason for each field whose value is neither its default nor declared, including fields that were added
    after the backend was written."""
    reasons = []
    for name, value in _used(problem):
        choices = handled.get(name, ())
        if name in _ALWAYS or value in choices or any(isinstance(c, type) and isinstance(value, c) for c in choices):
            continue
        what = _WORDS.get(name, name)
        if choices:
            expected = " or ".join(c.__name__ if isinstance(c, type) else str(c) for c in choices)
            reasons.append(Reason(what, expected, str(value)))
        else:
            reasons.append(Reason(what if value is True else f"{what} {value}".strip()))
    return tuple(reasons)


def _used(problem: Problem) -> Iterator[tuple[str, Any]]:
    """Yield the fields, including those of the spec, that have no default or differ from it."""
    for prefix, values in (("", problem), ("spec.", problem.spec)):
        required = {f.name: getattr(values, f.name) for f in fields(values) if _required(f)}
        plain = type(values)(**required)  # a default may be made of the required fields
        for field in fields(values):
            value = getattr(values, field.name)
            if not isinstance(value, ExpertsSpec) and (_required(field) or value != getattr(plain, field.name)):
                yield prefix + field.name, value


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING
