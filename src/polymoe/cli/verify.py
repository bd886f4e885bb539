"""``polymoe verify``: run real experts of a checkpoint on every backend and compare with the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from polymoe.cli.output import (
    Backend,
    Checkpoint,
    Json,
    OnDevice,
    console,
    print_json,
    print_table,
    status,
    token_counts,
)
from polymoe.cli.progress import Progress
from polymoe.common.units import format_ranges

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from polymoe.verify import Report

__all__ = ["command"]

_COMPARED = {"oracle": "float64 oracle", "reference": "reference, inputs quantized"}


def command(
    checkpoint: Checkpoint,
    layer: Annotated[
        int | None, typer.Option(help="Check only this layer. Default: every layer whose experts are in the files.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Token counts to run and time, separated by commas.")] = "1,16,256",
    backend: Backend = "auto",
    device: OnDevice = "auto",
    all_backends: Annotated[
        bool,
        typer.Option(
            "--all-backends", help="Run every backend, and print a block for the issue form that records a GPU."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Check a checkpoint's experts: read each one with independent code, pack and unpack it byte for byte, and measure
    every backend's error and time. Backends are compared with a float64 oracle of the independent reading, or with
    the reference if inputs are quantized.

    The config and the experts of one layer are enough.
    """
    from polymoe.verify import verify

    if all_backends and backend != "auto":
        raise typer.BadParameter("--all-backends runs every backend: leave --backend out")
    counts = token_counts(tokens)
    with Progress("verify") as progress:
        report = verify(
            checkpoint,
            layer=layer,
            tokens=counts,
            backend=backend,
            device=None if device == "auto" else device,
            progress=progress.update,
        )
    if report.absent:
        status().print(
            f"note: not verified, because not in the files: layers {format_ranges(report.absent)}", highlight=False
        )
    if all_backends:
        from polymoe.cli.submission import of_report, run_lines
        from polymoe.machine import Machine

        machine = Machine.of(None if device == "auto" else device)
        if json:
            print_json({**report.to_dict(), "lines": run_lines(report, machine)})
        else:
            print(of_report(report, machine))
    elif json:
        print_json(report.to_dict())
    else:
        print_table(_bytes(report))
        print_table(_backends(report))
        console().print("all good" if report.ok else "FAILED", style="bold green" if report.ok else "bold red")
    if not report.ok:
        raise typer.Exit(1)


def _bytes(report: Report) -> Table:
    from rich.table import Table

    table = Table(
        "layer", "format", "experts", "repacked byte for byte", "read independently", "reference, float64 oracle"
    )
    for row in report.layers:
        table.add_row(
            str(row.layer),
            row.format,
            str(row.experts),
            _mark(row.repacked == row.experts, f"{row.repacked}"),
            _mark(row.second_reading == row.experts, f"{row.second_reading}"),
            f"error {row.oracle_error:.1e}",
        )
    return table


def _backends(report: Report) -> Table:
    from rich.table import Table

    columns = ("layer", "backend", "tokens", "experts packed", "compared with", "error", "at most", "time")
    table = Table(*columns, title=f"on {report.device}")
    for row in report.backends:
        if row.rejected:
            table.add_row(str(row.layer), row.backend, "-", "-", "-", row.rejected, "", "")
        else:
            table.add_row(
                str(row.layer),
                row.backend,
                str(row.tokens),
                _mark(not row.differing, f"{row.differing} differ" if row.differing else "as read"),
                _COMPARED[row.against],
                _mark(row.error <= row.tolerance, f"{row.error:.1e}"),
                f"{row.tolerance:.0e}",
                f"{row.time_us / 1000:.2f} ms",
            )
    return table


def _mark(good: bool, text: str) -> Text:
    from rich.text import Text

    return Text(text, "" if good else "bold red")
