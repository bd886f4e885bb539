"""Submission: one block to paste into the issue form for a GPU: the machine, results as a table, and lines to commit.

``python benchmarks/write_proof.py --add FILE`` reads the lines of such a block.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polymoe.common.units import format_us
from polymoe.errors import ArgumentError

if TYPE_CHECKING:
    from polymoe.bench.records import Record
    from polymoe.machine import Machine
    from polymoe.verify import Report

__all__ = ["of_records", "of_report", "run_lines"]

_TITLE = 'For the issue form "Record for a GPU": everything from this line to the last.'


def run_lines(report: Report, machine: Machine) -> list[dict[str, Any]]:
    """Return one line for each kernel family that verify ran, as :class:`~polymoe.planning.proof.RunLine`."""
    from dataclasses import asdict

    from polymoe.bench.records import Stamp
    from polymoe.planning.proof import RunLine

    path = Path(report.checkpoint)
    stamp = Stamp.now(machine, f"polymoe verify {path.resolve().name if path.exists() else report.checkpoint}")
    passed: dict[tuple[str, str, str, str], bool] = {}
    for row in report.backends:
        if not row.rejected:
            cell = (row.backend, row.family, row.format, row.activations)
            passed[cell] = passed.get(cell, True) and row.ok
    return [
        asdict(
            RunLine(
                backend=backend,
                family=family,
                format=format,
                activations=activations,
                device=stamp.device,
                test=stamp.command,
                passed=ok,
                torch=stamp.torch,
                triton=stamp.triton,
                commit=stamp.commit,
                date=stamp.date(),
            )
        )
        for (backend, family, format, activations), ok in passed.items()
    ]


def of_report(report: Report, machine: Machine) -> str:
    """Return the block of ``polymoe verify --all-backends``."""
    header = ("layer", "backend", "kernels", "format", "activations", "tokens", "error", "at most", "time")
    rows = [
        (row.layer, row.backend, "rejected:", row.rejected)
        if row.rejected
        else (
            row.layer, row.backend, row.family or "-", row.format, row.activations, row.tokens,
            f"{row.error:.1e}" + ("" if row.ok else " WRONG"), f"{row.tolerance:.0e}", format_us(row.time_us),
        )
        for row in report.backends
    ]  # fmt: skip
    return _block(header, rows, run_lines(report, machine))


def of_records(records: Sequence[Record], machine: Machine) -> str:
    """Return the block of ``polymoe bench --submit``.

    Raises:
        ArgumentError: without records, or for those of another GPU than this machine's.
    """
    others = sorted({record.device for record in records} - {machine.device.name})
    if others or not records:
        raise ArgumentError(
            "submit",
            expected=f"records of this machine's {machine.device.name}, as the block says what this machine is",
            got=", ".join(others) or "none",
            hint="run it on the machine that was measured",
        )
    header = ("case", "backend", "kernels", "format", "activations", "tokens", "median", "floor", "share", "error")
    rows = [
        (
            r.case, r.backend, r.family or "-", r.format, r.activations, r.tokens, format_us(r.median_us),
            format_us(r.floor_us), f"{r.share:.2f}", f"{r.error:.1e}",
        )
        for r in records
    ]  # fmt: skip
    return _block(header, rows, [record.to_dict() for record in records])


def _block(header: Sequence[str], rows: Iterable[Sequence[object]], lines: Iterable[dict[str, Any]]) -> str:
    from polymoe.doctor.diagnosis import hardware

    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    whole = [row for row in cells if len(row) == len(header)]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    table = ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)).rstrip() for row in cells]
    return "\n".join([_TITLE, str(hardware()), "results:", *table, "lines:", *map(json.dumps, lines)])
