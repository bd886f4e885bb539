"""``polymoe verify``: run real experts of a checkpoint on every backend and compare with the reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polymoe.checkpoint.hub import require_name
from polymoe.cli.options import CheckpointName, OnDevice, OneBackend, Options, Output, option, token_counts
from polymoe.cli.output import console, print_json, print_table, say
from polymoe.cli.progress import Progress
from polymoe.common.units import format_ranges

if TYPE_CHECKING:
    from rich.text import Text

    from polymoe.planning.proof import RunLine
    from polymoe.verify import Report

_COMPARED = {"oracle": "float64 oracle", "reference": "reference, inputs quantized"}


class _Checks(Options, heading="What is verified"):
    layer: int | None = option(None, "Check only this layer. Default: every layer whose experts are in the files.")
    tokens: tuple[int, ...] = option(
        "1,16,256", "Token counts to run and time, separated by commas.", parse=token_counts
    )


class _Computing(OnDevice, OneBackend):
    pass


class _Output(Output):
    out: Path | None = option(
        None, "Append what ran to this file, one JSON line a kernel family: the record of a GPU that was never tested."
    )


def command(checkpoint: CheckpointName, checks: _Checks, computing: _Computing, output: _Output) -> None:
    """Check a checkpoint's experts: read each one with independent code, pack and unpack it byte for byte, and measure
    every backend's error and time. Backends are compared with a float64 oracle of the independent reading, or with
    the reference if inputs are quantized.

    The config and the experts of one layer are enough.
    """
    require_name(checkpoint)
    from polymoe.bench.records import append, check_writable
    from polymoe.verify import verify

    if output.out is not None:
        check_writable(output.out)
    device = None if computing.device == "auto" else computing.device
    with Progress("verify") as progress:
        report = verify(checkpoint, **vars(checks), backend=computing.backend, device=device, progress=progress.update)
    if report.absent:
        say(f"note: not verified, because not in the files: layers {format_ranges(report.absent)}")
    if output.out is not None:
        for line in _ran(report, device):
            append(output.out, line)
    if output.json:
        print_json(report.to_dict())
    else:
        _print_bytes(report)
        _print_backends(report)
        console().print("all good" if report.ok else "FAILED", style="bold green" if report.ok else "bold red")
    if not report.ok:
        raise typer.Exit(1)


def _ran(report: Report, device: str | None) -> list[RunLine]:
    """One line for each kernel family that ran."""
    from polymoe.bench.records import Stamp
    from polymoe.machine import Machine
    from polymoe.planning.proof import RunLine

    path = Path(report.checkpoint)
    name = path.resolve().name if path.exists() else report.checkpoint
    stamp = Stamp.now(Machine.of(device), f"polymoe verify {name}")
    passed: dict[tuple[str, str, str, str], bool] = {}
    for row in report.backends:
        if not row.rejected:
            cell = (row.backend, row.family, row.format, row.activations)
            passed[cell] = passed.get(cell, True) and row.ok
    stamped = stamp.fields()
    test = stamped.pop("command")
    return [
        RunLine(backend=backend, family=family, format=format, activations=activations, test=test, passed=ok, **stamped)
        for (backend, family, format, activations), ok in passed.items()
    ]


def _print_bytes(report: Report) -> None:
    columns = ("layer", "format", "experts", "repacked byte for byte", "read independently")
    rows = [
        (
            row.layer, row.format, row.experts, _mark(row.repacked == row.experts, f"{row.repacked}"),
            _mark(row.second_reading == row.experts, f"{row.second_reading}"), f"error {row.oracle_error:.1e}",
        )
        for row in report.layers
    ]  # fmt: skip
    print_table((*columns, "reference, float64 oracle"), rows)


def _print_backends(report: Report) -> None:
    columns = ("layer", "backend", "tokens", "experts packed", "compared with", "error", "at most", "time")
    rows = [
        (row.layer, row.backend, "-", "-", "-", row.rejected, "", "")
        if row.rejected
        else (
            row.layer, row.backend, row.tokens,
            _mark(not row.differing, f"{row.differing} differ" if row.differing else "as read"),
            _COMPARED[row.against], _mark(row.error <= row.tolerance, f"{row.error:.1e}"), f"{row.tolerance:.0e}",
            f"{row.time_us / 1000:.2f} ms",
        )
        for row in report.backends
    ]  # fmt: skip
    print_table(columns, rows, f"on {report.device}")


def _mark(good: bool, text: str) -> Text:
    from rich.text import Text

    return Text(text, "" if good else "bold red")
