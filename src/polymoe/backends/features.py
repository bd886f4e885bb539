"""Features of a Problem that a backend declares, and its verdict: what it does not declare is rejected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, replace
from typing import TYPE_CHECKING, Any

from polymoe.common.plugins import PluginError, from_plugin, guarded
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.tensors import ExpertsSpec
from polymoe.problem.verdict import Accepted, Reason, Rejected, Verdict

if TYPE_CHECKING:
    from polymoe.backends.base import Backend


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


def judge(backend: Backend, problem: Problem, machine: Machine) -> Verdict:
    """Return the backend's verdict, or a rejection if the problem has features that the backend does not declare.

    Backends that other packages register count as foreign; an exception of theirs is a rejection too.
    """
    try:
        with guarded(backend):
            verdict = backend.check(problem, machine)
            if not isinstance(verdict, (Accepted, Rejected)):
                raise TypeError(f"check returned {verdict!r}, not a verdict")
            undeclared = unhandled(backend.handles, problem)
    except PluginError as error:
        return Rejected((failed(error),))
    if isinstance(verdict, Accepted) and from_plugin(backend):
        verdict = replace(verdict, foreign=True)
    reasons = verdict.reasons if isinstance(verdict, Rejected) else ()
    said = {reason.what for reason in reasons}
    more = tuple(reason for reason in undeclared if reason.what not in said)
    return Rejected(more + reasons, verdict.layouts) if more else verdict


def failed(error: PluginError) -> Reason:
    """The reason against a backend or layout of another package that raised an exception."""
    return Reason("plug-in", "an answer", str(error))


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
