"""What a table of measured times gains: its configurations and the heuristic's in turn, where the two differ.

    python benchmarks/table_gains.py TABLE.jsonl [CASE ...] [--write]

Routings are uniform and Zipf 1.0, one at a time; tuning mixes uniform and Zipf 1.1. Configurations are timed in
turn, round by round, because the clocks of a GPU at its power limit change meanwhile. --write puts the heuristic's
configuration into rows whose own is not at least 1 % faster over both routings. Exit status: 0.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from side_by_side import medians_in_turn
from tune_shipped import ROWS, Row

from polymoe.backends import BACKENDS
from polymoe.backends.config import Config
from polymoe.bench.cases import CASES, Workload
from polymoe.bench.measure import draw_calls
from polymoe.bench.routings import RoutingDistribution
from polymoe.bench.timing import TimedCalls
from polymoe.cli.output import measured_on
from polymoe.layouts import LAYOUTS, Packed
from polymoe.machine import Machine
from polymoe.planning.measured import Measured, Table
from polymoe.planning.select import select
from polymoe.planning.table_files import add, read
from polymoe.problem.call import CallArguments

ROUTINGS = (RoutingDistribution("uniform"), RoutingDistribution("zipf:1", 1.0))
ROUNDS, REPEATS = 7, 3
_GAIN = 1.01
"""Least ratio of times, as a geometric mean over routings, for which a measured configuration is kept."""


def times_us(
    workload: Workload,
    backend: str,
    packed: Packed,
    device: torch.device,
    routing: RoutingDistribution,
    tokens: int,
    configs: list[Config],
    rounds: int = ROUNDS,
    repeats: int = REPEATS,
) -> list[float]:
    """Return the median time of each configuration, of rounds in which all are timed in turn."""
    problem = workload.problem
    run = BACKENDS[backend].bind(problem, packed).run
    calls = draw_calls(problem, routing, device, tokens)
    outs = [torch.empty_like(x) for x, _ in calls]

    def timed(config: Config) -> TimedCalls:
        given = [CallArguments(x, *routing, out) for (x, routing), out in zip(calls, outs, strict=True)]
        each = [partial(run, call, config) for call in given]
        return TimedCalls(each, device, graph=device.type == "cuda")

    return medians_in_turn([timed(config) for config in configs], rounds, repeats)


def check(row: Row, table: Table, machine: Machine, device: torch.device) -> list[Measured]:
    """Print the times of each measured configuration that differs from the heuristic's, and return the rows that are
    no faster, with the heuristic's configuration."""
    case = CASES[row.case]
    problem, backend = case.problem(row.format, row.activations), BACKENDS[row.backend]
    points = table.points(machine.device.name, row.backend, problem, machine.packages.get("triton"))
    pairs = []
    for point in points:
        own = backend.configure(problem, machine, point.tokens)
        measured = type(own).from_dict(point.config, "table")
        if measured != own:
            pairs.append((point, measured, own))
    name = f"{row.case}, {problem.spec.format}, {problem.activations}, {row.backend}"
    print(f"{name}: {len(points)} rows, {len(pairs)} not the heuristic's", flush=True)
    if not pairs:
        return []
    workload = Workload.of_case(case, device, row.format, row.activations)
    plan = select(problem, machine, backend=row.backend).plan
    assert plan is not None
    packed = LAYOUTS[plan.layout].pack(workload.weights, device)
    worse = []
    for point, measured, own in pairs:
        told, ratios, own_us = [], [], []
        for routing in ROUTINGS:
            new, old = times_us(workload, row.backend, packed, device, routing, point.tokens, [measured, own])
            ratios.append(old / new)
            own_us.append(old)
            told.append(f"{routing.name} {new:.1f} for {old:.1f} us ({old / new:.3f})")
        gain = math.sqrt(math.prod(ratios))
        kept = "kept" if gain >= _GAIN else "replaced"
        print(f"  {point.tokens} tokens: {', '.join(told)}; {measured} for {own}: {kept}", flush=True)
        if gain < _GAIN:
            median = round(statistics.mean(own_us), 2)
            worse.append(replace(point, config=own.to_dict(), median_us=median))
    return worse


def main() -> int:
    """Check the rows of the table case by case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    if not options.table.is_file():
        parser.error(f"table: expected a file of benchmarks/tune_shipped.py, got {options.table}, which does not exist")
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"case: expected {', '.join(CASES)}, got {unknown[0]!r}")
    machine, device = measured_on(options.device)
    table = Table((tuple(read(options.table)),))
    worse = []
    for row in ROWS:
        if not options.cases or row.case in options.cases:
            worse += check(row, table, machine, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(f"{len(worse)} rows whose configuration is less than 1 % faster than the heuristic's")
    if options.write and worse:
        add(options.table, worse)
    return 0


if __name__ == "__main__":
    sys.exit(main())
