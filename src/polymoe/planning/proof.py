"""How far a backend's kernels are proven on a GPU model: from committed measurements and passed tests.

``proof.jsonl`` beside this file is made by ``benchmarks/write_proof.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from polymoe.common.json_input import parse_json, read_fields
from polymoe.machine import DEVICES, Device
from polymoe.problem import Problem

ProofStatus = Literal["measured", "run", "unrun"]
"""``measured``: there are times of it on this GPU model, taken of results that were checked. ``run``: tests proved its
results on this GPU model. ``unrun``: compiled for it, emulated, or run on other GPUs, and never run on this one. What
people read is :func:`said`: "measured" and "predicted" are words for times."""
_SAID: dict[ProofStatus, str] = {"measured": "timed", "run": "tested", "unrun": "never tested"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """One kernel family of a backend, for one format and one kind of activations, on one GPU model.

    Attributes:
        backend, family, format, activations: what ran; ``family`` as ``Config.kernel_family``.
        device: the GPU model, as :attr:`polymoe.machine.Device.name`.
    """

    backend: str
    family: str
    format: str
    activations: str
    device: str

    @property
    def cell(self) -> tuple[str, str, str, str, str]:
        """What the status belongs to."""
        return (self.backend, self.family, self.format, self.activations, self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof(_Cell):
    """What was proven.

    Attributes:
        status: "measured" or "run".
        commit, date: of the newest proof.
        source: the file in benchmarks/results/ that shows it.
    """

    status: Literal["measured", "run"]
    commit: str
    date: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine(_Cell):
    """A line of ``run-*.jsonl``: what ran on a GPU, and whether its results were right.

    Attributes:
        test: what ran it: a test's file, or ``polymoe verify`` and its checkpoint.
        passed: whether every result was within the tolerance.
        torch, triton, commit, date: versions, source, time (UTC).
    """

    test: str
    passed: bool
    torch: str
    triton: str | None
    commit: str
    date: str


class Proofs:
    """Proofs by what they belong to; of several for one cell the strongest counts."""

    def __init__(self, rows: Iterable[Proof] = ()) -> None:
        self._statuses: dict[tuple[str, str, str, str, str], ProofStatus] = {}
        for row in rows:
            if self._statuses.get(row.cell) != "measured":
                self._statuses[row.cell] = row.status

    def status(self, backend: str, family: str, problem: Problem, device: Device) -> ProofStatus:
        """How far ``family`` of ``backend`` is proven on ``device``.

        Projections in several formats run the kernels of each: they are as far proven as the least of these, at most
        ``run``. On a CPU everything counts as ``run``, because the test suite runs there what accepts a CPU.
        """
        if device.kind == "cpu":
            return "run"
        formats = set(re.split("[+/]", problem.spec.format))
        cells = [(backend, family, name, str(problem.activations), device.name) for name in formats]
        found: list[ProofStatus] = [self._statuses.get(cell, "unrun") for cell in cells]
        return weakest(found if len(formats) == 1 else [*found, "run"])

    def elsewhere(self, backend: str, family: str, problem: Problem) -> tuple[str, ...]:
        """GPU models on which ``family`` of ``backend`` was timed or tested on such a problem."""
        models = dict.fromkeys(device for *_, device in self._statuses)
        found = (DEVICES[model] for model in models if model in DEVICES)
        return tuple(d.name for d in found if self.status(backend, family, problem, d) != "unrun")


def said(status: ProofStatus, device: Device | None = None) -> str:
    """What people read: ``"timed"``, ``"tested"`` or ``"never tested"``, with a GPU model ``"timed on h200"``."""
    return _SAID[status] + (f" on {device.name}" if device else "")


def weakest(statuses: Iterable[ProofStatus]) -> ProofStatus:
    """The one that says least; "unrun" of none."""
    found = set(statuses)
    if "unrun" in found or not found:
        return "unrun"
    return "run" if "run" in found else "measured"


def parse(text: str) -> list[Proof]:
    """Rows of a file of proofs.

    Raises:
        ValueError: for a line that is not a proof.
    """
    return [read_fields(Proof, parse_json(line), "proof") for line in text.splitlines()]


@cache
def shipped() -> Proofs:
    """The proofs that come with the package."""
    return Proofs(parse((resources.files("polymoe.planning") / "proof.jsonl").read_text(encoding="utf-8")))
