"""A backend's verdict on a problem, features that it does not declare included."""

from __future__ import annotations

from dataclasses import replace

from polymoe.backends.base import Backend
from polymoe.backends.features import unhandled
from polymoe.common.plugins import PluginError, from_plugin, guarded
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.verdict import Accepted, Reason, Rejected, Verdict


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
