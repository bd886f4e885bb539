"""``polymoe tune``: measure the fastest configurations on this GPU once, for every later load."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polymoe.cli.options import MeasuredLayer, OnDevice, Options, Output, backend_names, listed, option, token_counts
from polymoe.cli.output import command_line, measured_on, print_json, print_table, say
from polymoe.cli.progress import Progress
from polymoe.errors import ArgumentError, UnsupportedProblem, nearest

if TYPE_CHECKING:
    from polymoe.backends import Backend
    from polymoe.bench.tune import Outcome
    from polymoe.machine import Machine
    from polymoe.problem import Problem

TOKENS = tuple(2**n for n in range(15))
"""Token counts that are tuned unless others are asked for."""


class _Ranks(Options, heading="What is measured"):
    tp: int | None = option(None, "Tensor parallel size.", min=1)
    ep: int | None = option(None, "Expert parallel size.", min=1)
    tokens: tuple[int, ...] = option(
        ",".join(map(str, TOKENS)), "Token counts, separated by commas.", parse=token_counts
    )


class _Computing(OnDevice):
    backends: tuple[str, ...] | None = option(
        None, "Backends, separated by commas. Default: all that auto may choose.", "--backends", "--backend",
        parse=listed, complete=backend_names,
    )  # fmt: skip


class _Limits(Options, heading="Limits"):
    seconds: float = option(300, "Time limit in seconds; run again to continue.", min=1)
    memory: float | None = option(None, "Memory limit in GiB. Default: the free memory.", min=0.01)
    configs: int | None = option(None, "Maximum number of configurations per token count. Default: all.", min=1)
    jobs: int | None = option(
        None, "Processes that compile ahead of time. Default: all cores but one, at most 16.", min=0
    )
    again: bool = option(False, "Also measure what the table already has for the installed versions.")


class _Table(Output):
    out: Path | None = option(None, "Table to write. Default: your own, which is read at load.")


def command(layer: MeasuredLayer, ranks: _Ranks, computing: _Computing, limits: _Limits, output: _Table) -> None:
    """Find the fastest configuration for each token count, check it against the reference, and store it.

    Give a case or a checkpoint. Loading reads the table and never tunes. Ctrl-C keeps finished rows.
    """
    began = time.monotonic()
    of_files = {"tp": ranks.tp, "ep": ranks.ep}
    layer.check(of_case={}, of_files=of_files)

    import torch

    from polymoe.bench.compile_ahead import CompileAhead
    from polymoe.bench.records import Stamp, check_writable
    from polymoe.bench.tune import Tune
    from polymoe.planning.table_files import check_addable, user_file

    machine, where = measured_on(computing.device)
    workload = layer.workload(where, of_case={}, of_files=of_files)
    problem = workload.problem
    chosen = _backends(computing.backends, problem, machine)
    if output.out is not None:
        check_writable(output.out)
    choice = any(len(b.tuning_configs(problem, machine, t)) > 1 for b in chosen for t in ranks.tokens)
    _require_choice(choice, where.type)
    file = output.out or user_file(machine.device.name)
    if file is None:
        raise ArgumentError("--out", expected="a table to write", got="none, and no home directory for a cache")
    check_addable(file)
    say(f"{workload.case}: {problem}; on {machine.device}; into {file}")
    jobs = limits.jobs
    if jobs is None:
        jobs = min(16, (os.cpu_count() or 1) - 1) if choice and where.type == "cuda" else 0
    memory = None if limits.memory is None else int(limits.memory * 2**30)
    if memory is not None and where.type == "cuda":  # PyTorch stays below it too
        share = min(1.0, memory / torch.cuda.get_device_properties(where).total_memory)
        torch.cuda.set_per_process_memory_fraction(share)
    found: list[Outcome] = []
    try:
        with (
            CompileAhead(jobs, where.index or 0) as compiler,
            Progress("tune", len(chosen) * len(set(ranks.tokens))) as progress,
        ):
            tune = Tune(
                workload=workload, machine=machine, device=where, backends=chosen, file=file,
                stamp=Stamp.now(machine, command_line()), seconds=limits.seconds, began=began, again=limits.again,
                configs=limits.configs, memory_bytes=memory, compiler=compiler, say=progress.say,
            )  # fmt: skip
            for outcome in tune.outcomes(ranks.tokens, progress.update):
                found.append(outcome)
                progress.advance()
    finally:  # after an interruption too, print finished rows
        if output.json and found:
            print_json([_plain(outcome) for outcome in found])
        elif found:
            _print(found, f"{workload.case}, {problem.spec.format}, {machine.device}")


def _require_choice(choice: bool, kind: str) -> None:
    """Refuse a CPU on which no backend has anything to tune."""
    if kind == "cpu" and not choice:
        expected, got = "a GPU", "cpu, where no backend has configurations to choose from"
        hint = "bench kernels measures the reference on a CPU"
        raise ArgumentError("--device", expected=expected, got=got, hint=hint)


def _backends(names: Sequence[str] | None, problem: Problem, machine: Machine) -> list[Backend]:
    """Return the named backends, or all that ``auto`` may choose."""
    from polymoe.backends import BACKENDS
    from polymoe.planning.select import select
    from polymoe.problem.verdict import Accepted

    if names is not None:
        for name in names:
            if name not in BACKENDS:
                raise ArgumentError("--backends", got=repr(name), hint=nearest(name, BACKENDS))
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


def _print(found: list[Outcome], title: str) -> None:
    columns = ("tokens", "backend", "time", "heuristic's", "tried", "failed", "configuration", "note")
    rows = [
        (
            o.tokens, o.backend, f"{o.row.median_us:.1f} us" if o.row else "-",
            f"{o.own_us:.1f} us" if o.own_us else "-", o.tried, o.failed, _short(o.row.config) if o.row else "-",
            o.note,
        )
        for o in found
    ]  # fmt: skip
    print_table(columns, rows, title)


def _short(config: Any) -> str:
    if isinstance(config, dict):
        return "(" + ", ".join(f"{name} {_short(value)}" for name, value in config.items()) + ")"
    return str(config)


def _plain(o: Outcome) -> dict[str, Any]:
    extra = {"heuristic_us": o.own_us, "tried": o.tried, "failed": o.failed, "note": o.note}
    return {**(o.row.to_dict() if o.row else {"backend": o.backend, "tokens": o.tokens}), **extra}
