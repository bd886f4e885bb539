"""``polymoe bench kernels``: time and share of the floor of each backend on the experts of one layer."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polymoe.cli.output import (
    Activations,
    BatchInvariant,
    Case,
    Format,
    Json,
    OnDevice,
    console,
    listed,
    measured_on,
    print_json,
    print_table,
    token_counts,
)
from polymoe.cli.progress import Progress

if TYPE_CHECKING:
    from rich.table import Table

    from polymoe.bench.measure import BenchRow

__all__ = ["command"]


def command(
    case: Case = None,
    tokens: Annotated[str, typer.Option(help="Token counts, separated by commas.")] = "1,4,16,64,256,1024,4096",
    backends: Annotated[
        str | None,
        typer.Option(
            "--backends",
            "--backend",
            help="Backends, separated by commas. Default: all that auto may choose, and a baseline.",
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Other libraries to time as well, in the same process and with the same routings, "
            "separated by commas: humming, vllm, deepgemm, triton_kernels, flashinfer, quack."
        ),
    ] = None,
    format: Format = None,
    activations: Activations = None,
    routing: Annotated[
        str, typer.Option(help="uniform, zipf, zipf:S, or a JSON file with the experts of each token.")
    ] = "uniform",
    batch_invariant: BatchInvariant = False,
    bias: Annotated[bool | None, typer.Option(help="With or without biases. Default: as in the model.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Number of experts, instead of the case's.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Experts of each token, instead of the case's.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size, instead of the case's.")] = None,
    intermediate: Annotated[int | None, typer.Option(min=1, help="Expert width, instead of the case's.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Real weights instead of a case: a directory or Hub id.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Layer of the checkpoint. Default: the first one with experts.")
    ] = None,
    device: OnDevice = "auto",
    out: Annotated[Path | None, typer.Option(help="Append each record to this file as one JSON line.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot the share of the floor over tokens as a PNG, with one line per backend.")
    ] = None,
    energy: Annotated[
        bool, typer.Option("--energy", help="Also measure tokens per joule with the GPU's counter.")
    ] = False,
    profile: Annotated[
        Path | None, typer.Option(help="Write profiler traces: trace.json becomes trace.BACKEND-TOKENS.json.")
    ] = None,
    submit: Annotated[
        Path | None,
        typer.Option(help="Do not measure; print the records in this file as a block for the issue form."),
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Commit for the records, if git does not know it.")] = None,
    json: Json = False,
) -> None:
    """Check and time each backend on the experts of one layer, and compare with the floor, a computed minimum.

    Give a case or a checkpoint. Wrong results are not timed; if a backend's is wrong, the exit code is 1.
    """
    of_case = {
        "--format": format,
        "--bias": bias,
        "--experts": experts,
        "--top-k": top_k,
        "--hidden": hidden,
        "--intermediate": intermediate,
    }
    if submit is not None:
        if case is not None or checkpoint is not None:
            raise typer.BadParameter("--submit does not measure: leave --case and --checkpoint out")
        _submit(submit, device)
        return
    if (case is None) == (checkpoint is None):
        raise typer.BadParameter("give either --case or --checkpoint")
    if checkpoint is None and layer is not None:
        raise typer.BadParameter("--layer needs --checkpoint")
    if checkpoint is not None and (given := [name for name, value in of_case.items() if value is not None]):
        raise typer.BadParameter(f"{given[0]} needs --case")
    counts = token_counts(tokens)
    names = None if backends is None else listed(backends, "--backends")
    others = () if peers is None else listed(peers, "--peers")

    from polymoe.bench.cases import Workload, case_named
    from polymoe.bench.energy import EnergyMeter
    from polymoe.bench.measure import Bench
    from polymoe.bench.plot import check_plot
    from polymoe.bench.plot import plot as draw
    from polymoe.bench.records import Stamp, append, check_writable, newest, read
    from polymoe.bench.routings import parse_routing
    from polymoe.checkpoint import Checkpoint
    from polymoe.errors import ArgumentError

    machine, where = measured_on(device)
    # Errors that would appear after minutes of timing are found here.
    meter = EnergyMeter(where) if energy else None
    if plot is not None:
        check_plot(plot)
    if profile is not None and not profile.parent.is_dir():
        raise ArgumentError("--profile", expected="an existing directory", got=repr(str(profile.parent)))
    mode: Any = activations  # Problem checks the name
    if case is not None:
        changed = case_named(case).changed(
            experts=experts, top_k=top_k, hidden=hidden, intermediate=intermediate, bias=bias
        )
        workload = Workload.of_case(changed, where, format, mode)
    else:
        workload = Workload.of_checkpoint(Checkpoint.open(checkpoint or ""), layer, where, mode)
    if batch_invariant:
        workload = workload.batch_invariant()
    distribution, problem = parse_routing(routing, workload.problem)
    workload = replace(workload, problem=problem)
    earlier = []
    if out is not None:
        check_writable(out)
        earlier = read(out) if plot is not None else []
    stamp = Stamp.now(machine, shlex.join(["polymoe", *sys.argv[1:]]), commit)
    bench = Bench(
        workload=workload,
        distribution=distribution,
        machine=machine,
        device=where,
        stamp=stamp,
        meter=meter,
        trace=profile,
    )
    print(f"{workload.case}: {problem}; {distribution.name} routing, on {machine.device}", file=sys.stderr)
    rows: list[BenchRow] = []
    try:
        with Progress("bench kernels") as progress:
            for row in bench.rows(counts, names, progress.update, others):
                rows.append(row)
                if out is not None and row.record is not None:
                    append(out, row.record)
    finally:  # after an interruption too, print finished rows
        if json and rows:
            print_json([_plain(row) for row in rows])
        elif rows:
            title = f"{workload.case}, {problem.spec.format}, {distribution.name} routing, {machine.device}"
            if any(row.record is not None for row in rows):
                print_table(_table(rows, title))
            else:
                console().print(title, highlight=False)
            for row in rows:
                if row.record is None:
                    console().print(_unmeasured(row), style="bold red" if row.wrong else None, highlight=False)
    measured = [row.record for row in rows if row.record is not None]
    if machine.device.rates == "nominal":
        print("floor and share use nominal rates of this device, not measured ones", file=sys.stderr)
    if plot is not None and measured:
        like = {(r.case, r.format, r.routing, r.device) for r in measured}
        draw(newest([r for r in earlier if (r.case, r.format, r.routing, r.device) in like] + measured), plot)
    if any(row.wrong and not row.backend.startswith("peer:") for row in rows):
        raise typer.Exit(1)


def _submit(path: Path, device: str) -> None:
    from polymoe.bench.records import newest, read
    from polymoe.cli.submission import of_records
    from polymoe.errors import ArgumentError

    try:
        records = newest(read(path))
    except OSError as error:
        raise ArgumentError("submit", expected="a file that --out wrote", got=str(error)) from error
    print(of_records(records, measured_on(device)[0]))


def _table(rows: list[BenchRow], title: str) -> Table:
    from rich.table import Table

    with_energy = any(row.tokens_per_joule is not None for row in rows)
    table = Table(
        "tokens", "backend", "median", "quartiles", "floor", "share", "error", "error, exact", "timed by",
        *(["tokens/J"] if with_energy else []), title=title,
    )  # fmt: skip
    measured = ((row.record, row) for row in rows if row.record is not None)
    for r, row in sorted(measured, key=lambda pair: pair[0].tokens):
        table.add_row(
            str(r.tokens), r.backend, f"{r.median_us:.1f} us", f"{r.p25_us:.1f} - {r.p75_us:.1f}",
            f"{r.floor_us:.1f} us", f"{r.share:.2f}", f"{r.error:.1e}", f"{r.error_exact:.1e}", row.note,
            *([f"{row.tokens_per_joule:.2f}"] if row.tokens_per_joule is not None else []),
        )  # fmt: skip
    return table


def _unmeasured(row: BenchRow) -> str:
    count = "any number of" if row.tokens is None else row.tokens
    version = f" {row.version}" if row.version else ""
    return f"not measured: {row.backend}{version}, {count} tokens: {row.note}"


def _plain(row: BenchRow) -> dict[str, Any]:
    if row.record is None:
        why = {"backend": row.backend, "tokens": row.tokens, "wrong": row.wrong, "note": row.note}
        return why if row.version is None else {**why, "version": row.version}
    extra = {} if row.tokens_per_joule is None else {"tokens_per_joule": row.tokens_per_joule}
    return {**row.record.to_dict(), "timed_by": row.note, **extra}
