"""``polymoe tune``: measure the fastest configurations on this GPU once, for every later load."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polymoe.cli.output import (
    Activations,
    Backends,
    BatchInvariant,
    Case,
    Format,
    Json,
    OnDevice,
    listed,
    measured_on,
    print_json,
    print_table,
    say,
    token_counts,
)
from polymoe.cli.progress import Progress
from polymoe.errors import ArgumentError

if TYPE_CHECKING:
    from rich.table import Table

    from polymoe.backends import Backend
    from polymoe.bench.tune import Outcome
    from polymoe.machine import Machine
    from polymoe.problem import Problem

__all__ = ["command"]


def command(
    case: Case = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Directory or Hub id of a checkpoint, instead of a case.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Layer of the checkpoint. Default: the first one with experts.")
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallel size.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert parallel size.")] = None,
    tokens: Annotated[
        str, typer.Option(help="Token counts, separated by commas.")
    ] = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192",
    format: Format = None,
    activations: Activations = None,
    backends: Backends = None,
    batch_invariant: BatchInvariant = False,
    seconds: Annotated[float, typer.Option(min=1, help="Time limit in seconds; run again to continue.")] = 300,
    memory: Annotated[
        float | None, typer.Option(min=0.01, help="Memory limit in GiB. Default: the free memory.")
    ] = None,
    configs: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of configurations per token count. Default: all.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that compile ahead of time. Default: all cores but one, at most 16."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also measure what the table already has for the installed versions.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Table to write. Default: your own, which is read at load.")] = None,
    device: OnDevice = "auto",
    json: Json = False,
) -> None:
    """Find the fastest configuration for each token count, check it against the reference, and store it.

    Give a case or a checkpoint. Loading reads the table and never tunes. Ctrl-C keeps finished rows.
    """
    began = time.monotonic()
    if (case is None) == (checkpoint is None):
        raise typer.BadParameter("give either --case or --checkpoint")
    for name, value in (("--layer", layer), ("--tp", tp), ("--ep", ep)):
        if checkpoint is None and value is not None:
            raise typer.BadParameter(f"{name} needs --checkpoint")
    if checkpoint is not None and format is not None:
        raise typer.BadParameter("--format needs --case")
    counts = token_counts(tokens)

    import torch

    from polymoe.bench.cases import Workload, case_named
    from polymoe.bench.compile_ahead import CompileAhead
    from polymoe.bench.records import Stamp, check_writable
    from polymoe.bench.tune import Tune
    from polymoe.checkpoint import Checkpoint
    from polymoe.planning.table_files import check_addable, user_file

    machine, where = measured_on(device)
    mode: Any = activations  # Problem checks the name
    if case is not None:
        workload = Workload.of_case(case_named(case), where, format, mode)
    else:
        opened = Checkpoint.open(checkpoint or "")
        workload = Workload.of_checkpoint(opened, layer, where, mode, tp=tp or 1, ep=ep or 1)
    if batch_invariant:
        workload = workload.batch_invariant()
    problem = workload.problem
    chosen = _backends(None if backends is None else listed(backends, "--backends"), problem, machine)
    if out is not None:
        check_writable(out)
    choice = any(len(b.tuning_configs(problem, machine, t)) > 1 for b in chosen for t in counts)
    _require_choice(choice, where.type)
    file = out or user_file(machine.device.name)
    check_addable(file)
    say(f"{workload.case}: {problem}; on {machine.device}; into {file}")
    if jobs is None:
        jobs = min(16, (os.cpu_count() or 1) - 1) if choice and where.type == "cuda" else 0
    if memory is not None and where.type == "cuda":
        fraction = min(1.0, memory * 2**30 / torch.cuda.get_device_properties(where).total_memory)
        torch.cuda.set_per_process_memory_fraction(fraction)
    found: list[Outcome] = []
    try:
        with (
            CompileAhead(jobs, where.index or 0) as compiler,
            Progress("tune", len(chosen) * len(set(counts))) as progress,
        ):
            tune = Tune(
                workload=workload,
                machine=machine,
                device=where,
                backends=chosen,
                file=file,
                stamp=Stamp.now(machine, shlex.join(["polymoe", *sys.argv[1:]])),
                seconds=seconds,
                began=began,
                again=again,
                configs=configs,
                memory_bytes=None if memory is None else int(memory * 2**30),
                compiler=compiler,
                say=progress.say,
            )
            for outcome in tune.outcomes(counts, progress.update):
                found.append(outcome)
                progress.advance()
    finally:  # after an interruption too, print finished rows
        if json and found:
            print_json([_plain(outcome) for outcome in found])
        elif found:
            print_table(_table(found, f"{workload.case}, {problem.spec.format}, {machine.device}"))


def _require_choice(choice: bool, kind: str) -> None:
    """Refuse a CPU on which no backend has anything to tune."""
    if kind == "cpu" and not choice:
        raise ArgumentError(
            "--device",
            expected="a GPU",
            got="cpu, where no backend has configurations to choose from",
            hint="bench kernels measures the reference on a CPU",
        )


def _backends(names: list[str] | None, problem: Problem, machine: Machine) -> list[Backend]:
    """Return the named backends, or all that ``auto`` may choose."""
    from polymoe.backends import BACKENDS
    from polymoe.common.backend_names import backend_hint
    from polymoe.errors import UnsupportedProblem
    from polymoe.planning.select import select
    from polymoe.problem.verdict import Accepted

    if names is not None:
        for name in names:
            if name not in BACKENDS:
                raise ArgumentError("--backends", got=repr(name), hint=backend_hint(name, BACKENDS))
        return [BACKENDS[name] for name in dict.fromkeys(names)]
    verdicts = {c.backend: c.verdict for c in select(problem, machine).candidates}
    fitting = [BACKENDS[n] for n, v in verdicts.items() if isinstance(v, Accepted) and not v.opt_in_reason]
    if not fitting:
        got = [
            f"{n}: {v.opt_in_reason if isinstance(v, Accepted) else '; '.join(map(str, v.reasons))}"
            for n, v in verdicts.items()
        ]
        raise UnsupportedProblem(
            f"tune ({problem}) on {machine.device}", expected="a backend that auto may choose", got="\n  ".join(got)
        )
    return fitting


def _table(found: list[Outcome], title: str) -> Table:
    from rich.table import Table

    table = Table("tokens", "backend", "time", "heuristic's", "tried", "failed", "configuration", "note", title=title)
    for o in found:
        time_us = f"{o.row.median_us:.1f} us" if o.row else "-"
        table.add_row(
            str(o.tokens),
            o.backend,
            time_us,
            f"{o.own_us:.1f} us" if o.own_us else "-",
            str(o.tried),
            str(o.failed),
            _short(o.row.config) if o.row else "-",
            o.note,
        )
    return table


def _short(config: Any) -> str:
    if isinstance(config, dict):
        return "(" + ", ".join(f"{name} {_short(value)}" for name, value in config.items()) + ")"
    return str(config)


def _plain(o: Outcome) -> dict[str, Any]:
    extra = {"heuristic_us": o.own_us, "tried": o.tried, "failed": o.failed, "note": o.note}
    return {**(o.row.to_dict() if o.row else {"backend": o.backend, "tokens": o.tokens}), **extra}
