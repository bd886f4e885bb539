"""Names of backends: those that changed, and what to say of one that is not known."""

from __future__ import annotations

from collections.abc import Iterable

from polymoe.errors import nearest

RENAMED = {"hopper": "cuda"}
"""Backends that had another name before, by that name. Records and tables of measured times keep the old one."""


def current_name(name: str) -> str:
    """Today's name of a backend that a record or a table may name as it was called then. Several may be joined by
    ``+``."""
    return "+".join(RENAMED.get(part, part) for part in name.split("+"))


def backend_hint(name: str, known: Iterable[str]) -> str:
    """Hint for a name that is not ``known``: what a renamed backend is called now, else the nearest name."""
    if name in RENAMED:
        return f"{name!r} is called {RENAMED[name]!r} now"
    return nearest(name, known)
