"""``polymoe bench kernels``: time and share of the floor of each backend on the experts of one layer."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from polymoe.cli.options import (
    MeasuredLayer,
    OnDevice,
    Options,
    RecordOutput,
    backend_names,
    file_to_write,
    listed,
    numbers,
    option,
    token_counts,
)
from polymoe.cli.output import command_line, console, measured_on, print_json, print_table, say
from polymoe.cli.progress import Progress

if TYPE_CHECKING:
    from polymoe.bench.contenders import BenchRow


class _Changes(Options, heading="What is measured"):
    bias: bool | None = option(None, "With or without biases. Default: as in the model.")
    experts: int | None = option(None, "Number of experts, instead of the case's.", min=1)
    top_k: int | None = option(None, "Experts of each token, instead of the case's.", min=1)
    hidden: int | None = option(None, "Hidden size, instead of the case's.", min=1)
    intermediate: int | None = option(None, "Expert width, instead of the case's.", min=1)


class _Calls(Options, heading="What is measured"):
    tokens: tuple[int, ...] = option(
        "1,4,16,64,256,1024,4096", "Token counts, separated by commas.", parse=token_counts
    )
    routing: str = option("uniform", "uniform, zipf, zipf:S, or a JSON file with the experts of each token.")
    slots: int | None = option(
        None, "Time calls with all experts in host memory and so many slots on the GPU; one token by --misses.", min=1
    )
    misses: tuple[int, ...] | None = option(
        None, "With --slots: experts that a call has to copy, separated by commas. Default: 0,1,2,4, up to the experts "
        "of a token.", parse=numbers(0, 999),
    )  # fmt: skip


class _Contenders(OnDevice):
    backends: tuple[str, ...] | None = option(
        None, "Backends, separated by commas. Default: all that auto may choose, and a baseline.",
        "--backends", "--backend", parse=listed, complete=backend_names,
    )  # fmt: skip
    peers: tuple[str, ...] | None = option(
        None, "Other libraries to time as well, in the same process and with the same routings, separated by commas: "
        "humming, vllm, deepgemm, triton_kernels, flashinfer, monomoe, quack, finegrained.", parse=listed,
    )  # fmt: skip


class _Output(RecordOutput):
    energy: bool = option(False, "Also measure tokens per joule with the GPU's counter.")
    profile: Path | None = option(
        None, "Write profiler traces: trace.json becomes trace.BACKEND-TOKENS.json.", parse=file_to_write
    )


def command(layer: MeasuredLayer, changes: _Changes, calls: _Calls, contenders: _Contenders, output: _Output) -> None:
    """Check and time each backend on the experts of one layer, and compare with the floor, a computed minimum.

    Give a case or a checkpoint. Wrong results are not timed; if a backend's is wrong, the exit code is 1.
    """
    layer.check(of_case=vars(changes), of_files={})
    if calls.misses is not None and calls.slots is None:
        raise typer.BadParameter("--misses needs --slots: without slots all experts lie on the GPU")
    of_backends = {"backends": contenders.backends, "peers": contenders.peers, "energy": output.energy or None,
                   "profile": output.profile}  # fmt: skip
    if calls.slots is not None and (given := [name for name, value in of_backends.items() if value is not None]):
        raise typer.BadParameter(f"--{given[0]} needs all experts on the GPU: leave it out, or --slots")
    from polymoe.bench.energy import EnergyMeter
    from polymoe.bench.measure import Bench
    from polymoe.bench.records import Stamp
    from polymoe.bench.routings import parse_routing
    from polymoe.bench.slots import slot_rows

    # Errors that would appear after minutes of timing are found here.
    machine, where = measured_on(contenders.device)
    meter = EnergyMeter(where) if output.energy else None
    workload = layer.workload(where, of_case=vars(changes), of_files={})
    distribution, problem = parse_routing(calls.routing, workload.problem)
    bench = Bench(
        workload=replace(workload, problem=problem), distribution=distribution, machine=machine, device=where,
        stamp=Stamp.now(machine, command_line(), output.commit), meter=meter, trace=output.profile,
    )  # fmt: skip
    append = output.appender()
    workload, device, routed = bench.workload, machine.device, f"{distribution.name} routing"
    say(f"{workload.case}: {workload.problem}; {routed}, on {device}")
    rows: list[BenchRow] = []
    try:
        with Progress("bench kernels") as progress:
            if calls.slots is None:
                found = bench.rows(calls.tokens, contenders.backends, progress.update, contenders.peers or ())
            else:
                misses = calls.misses or tuple(m for m in (0, 1, 2, 4) if m <= problem.top_k)
                found = slot_rows(bench, calls.slots, misses, calls.tokens, progress.update)
            for row in found:
                rows.append(row)
                if row.record is not None:
                    append(row.record)
    finally:  # after an interruption too, print finished rows
        if output.json and rows:
            print_json([_plain(row) for row in rows])
        elif rows:
            _print(rows, f"{workload.case}, {workload.problem.spec.format}, {routed}, {device}")
    if device.rates == "nominal":
        say("floor and share use nominal rates of this device, not measured ones")
    if any(row.wrong and not row.backend.startswith("peer:") for row in rows):
        raise typer.Exit(1)


def _print(rows: list[BenchRow], title: str) -> None:
    measured = sorted(((r.record, r) for r in rows if r.record is not None), key=lambda pair: pair[0].tokens)
    if measured:
        columns = ("tokens", "backend", "median", "quartiles", "floor", "share", "error", "error, exact", "timed by")
        lines = [
            (
                r.tokens, row.backend, f"{r.median_us:.1f} us", f"{r.p25_us:.1f} - {r.p75_us:.1f}",
                f"{r.floor_us:.1f} us", f"{r.share:.2f}", f"{r.error:.1e}", f"{r.error_exact:.1e}", row.note,
                None if row.tokens_per_joule is None else f"{row.tokens_per_joule:.2f}",
            )
            for r, row in measured
        ]  # fmt: skip
        print_table((*columns, "tokens/J"), lines, title)
    else:
        console().print(title)
    for row in rows:
        if row.record is None:
            named = f"{row.backend} {row.version}" if row.version else row.backend
            count = "any number of" if row.tokens is None else row.tokens
            text = f"not measured: {named}, {count} tokens: {row.note}"
            console().print(text, style="bold red" if row.wrong else None)


def _plain(row: BenchRow) -> dict[str, Any]:
    if row.record is None:
        why = {"backend": row.backend, "tokens": row.tokens, "wrong": row.wrong, "note": row.note}
        return why if row.version is None else {**why, "version": row.version}
    extra = {} if row.tokens_per_joule is None else {"tokens_per_joule": row.tokens_per_joule}
    return {**asdict(row.record), "timed_by": row.note, **extra}
