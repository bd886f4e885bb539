"""``polymoe verify``: run real experts of a checkpoint on every backend and compare with the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from polymoe.cli.options import Checkpoint, OnDevice, OneBackend, Output, option, require_checkpoint, token_counts
from polymoe.cli.output import cells, console, print_json, print_table, status
from polymoe.cli.progress import Progress
from polymoe.common.units import format_ranges

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from polymoe.verify import Report

__all__ = ["command"]

_COMPARED = {"oracle": "float64 oracle", "reference": "reference, inputs quantized"}


@dataclass(frozen=True)
class _Checks:
    """What is verified."""

    layer: int | None = option(None, "Check only this layer. Default: every layer whose experts are in the files.")
    tokens: tuple[int, ...] = option(
        "1,16,256", "Token counts to run and time, separated by commas.", "--tokens", parse=token_counts
    )


@dataclass(frozen=True)
class _Computing(OnDevice, OneBackend):
    """Device and backend."""

    all_backends: bool = option(
        False, "Run every backend, and print a block for the issue form that records a GPU.", "--all-backends"
    )


def command(checkpoint: Checkpoint, checks: _Checks, computing: _Computing, output: Output) -> None:
    """Check a checkpoint's experts: read each one with independent code, pack and unpack it byte for byte, and measure
    every backend's error and time. Backends are compared with a float64 oracle of the independent reading, or with
    the reference if inputs are quantized.

    The config and the experts of one layer are enough.
    """
    require_checkpoint(checkpoint)
    from polymoe.verify import verify

    if computing.all_backends and computing.backend != "auto":
        raise typer.BadParameter("--all-backends runs every backend: leave --backend out")
    device = None if computing.device == "auto" else computing.device
    with Progress("verify") as progress:
        report = verify(checkpoint, **vars(checks), backend=computing.backend, device=device, progress=progress.update)
    if report.absent:
        status().print(
            f"note: not verified, because not in the files: layers {format_ranges(report.absent)}", highlight=False
        )
    if computing.all_backends:
        from polymoe.cli.submission import of_report, run_lines
        from polymoe.machine import Machine

        machine = Machine.of(device)
        if output.json:
            print_json({**report.to_dict(), "lines": run_lines(report, machine)})
        else:
            print(of_report(report, machine))
    elif output.json:
        print_json(report.to_dict())
    else:
        print_table(_bytes(report))
        print_table(_backends(report))
        console().print("all good" if report.ok else "FAILED", style="bold green" if report.ok else "bold red")
    if not report.ok:
        raise typer.Exit(1)


def _bytes(report: Report) -> Table:
    columns = (
        "layer",
        "format",
        "experts",
        "repacked byte for byte",
        "read independently",
        "reference, float64 oracle",
    )
    return cells(
        columns,
        [
            (
                row.layer, row.format, row.experts, _mark(row.repacked == row.experts, f"{row.repacked}"),
                _mark(row.second_reading == row.experts, f"{row.second_reading}"), f"error {row.oracle_error:.1e}",
            )
            for row in report.layers
        ],
    )  # fmt: skip


def _backends(report: Report) -> Table:
    columns = ("layer", "backend", "tokens", "experts packed", "compared with", "error", "at most", "time")
    return cells(
        columns,
        [
            (row.layer, row.backend, "-", "-", "-", row.rejected, "", "")
            if row.rejected
            else (
                row.layer, row.backend, row.tokens,
                _mark(not row.differing, f"{row.differing} differ" if row.differing else "as read"),
                _COMPARED[row.against], _mark(row.error <= row.tolerance, f"{row.error:.1e}"), f"{row.tolerance:.0e}",
                f"{row.time_us / 1000:.2f} ms",
            )
            for row in report.backends
        ],
        f"on {report.device}",
    )  # fmt: skip


def _mark(good: bool, text: str) -> Text:
    from rich.text import Text

    return Text(text, "" if good else "bold red")
