"""Packages of other libraries whose kernels a backend runs: whether one is there, in a version that is right."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from polymoe.machine import Machine
from polymoe.problem.verdict import Reasons

_PARTS = 4  # numbers of a version, so that 0.7 and 0.7.0 are the same


def release(version: str) -> tuple[int, ...]:
    """Return a version's numbers, to compare with those of another: the same for "0.7.2", "0.7.2.post1" and
    "0.7.2+cu130".

    A version before the release, such as "0.7.2rc1", is less than it: its last number is -1 and not 0.
    """
    numbers = re.match(r"[\d.]*\d", version)
    if numbers is None:
        return ()
    found = [int(part) for part in numbers[0].split(".") if part]
    before = re.match(r"[\d.]*[._-]?(a|b|c|rc|dev|alpha|beta|pre)", version)
    return (*found, *[0] * (_PARTS - len(found)), -1 if before else 0)


def at_least(version: str, least: str) -> bool:
    """Return whether a version is ``least`` or newer; "" is that of a package that is not installed."""
    return release(version) >= release(least)


def need_package(
    reasons: Reasons, machine: Machine, name: str, least: str, *, wrong: Mapping[str, str] | None = None
) -> Sequence[str]:
    """Add a reason unless a distribution is installed, in version ``least`` or newer.

    Args:
        reasons: where reasons are added.
        machine: what is installed. What is installed beside a GPU that is not here is not known: then no reason is
            added, and the requirement is a note instead.
        name: the distribution.
        least: the oldest version.
        wrong: what known-bad versions do, by version; "0.6.16" stands for all of its post-releases too. Those below
            ``least`` explain it.

    Returns:
        Notes for :attr:`polymoe.problem.verdict.Accepted.notes`.
    """
    version = machine.packages.get(name)
    if version is None:
        if machine.elsewhere:
            return (f"needs {name} {least} or newer there",)
        reasons.need(False, f"package {name}", f"{least} or newer", "not installed")
        return ()
    does = next((what for bad, what in (wrong or {}).items() if release(version) == release(bad)), "")
    got = f"{version}, which {does}" if does else version
    if reasons.need(at_least(version, least), f"package {name}", f"{least} or newer", got):
        reasons.need(not does, f"package {name}", "another version", got)
    return ()
