"""Contenders side by side: everything is packed and compiled first, then they are timed by token count."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from polymoe.bench.contenders import (
    BenchRow,
    Call,
    LayerContender,
    Run,
    calls_for,
    told,
    works,
)
from polymoe.bench.measure import Bench, compared_call, draw_calls, reference_results
from polymoe.bench.timing import TimedCalls
from polymoe.problem.activation_quantization import UNQUANTIZED

__all__ = ["medians_in_turn", "side_by_side"]


def side_by_side(
    bench: Bench,
    tokens: Sequence[int],
    backends: Sequence[str],
    peers: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
    ready: Callable[[], None] = lambda: None,
) -> Iterator[BenchRow]:
    """Yield rows as :meth:`~polymoe.bench.measure.Bench.rows` does, by token count: all contenders are packed first and
    stay in memory, each runs once at every token count, which compiles what it needs, and then those of one count are
    timed one after another.

    Args:
        bench: workload, routing and machine.
        tokens, backends, peers, progress: as for its rows.
        ready: called when nothing is left to do but timing; several processes on one GPU wait in it for their turn.

    Raises:
        ArgumentError: for an unknown backend or peer.
        UnsupportedProblem: if a backend is rejected.
    """
    found = bench.contenders(backends, peers)
    yield from (c for c in found if isinstance(c, BenchRow))
    progress("reference")
    calls = {t: draw_calls(bench.workload.problem, bench.distribution, bench.device, t) for t in tokens}
    modes = {UNQUANTIZED, *(c.inputs(t) for c in found if isinstance(c, LayerContender) for t in tokens)}
    first = [compared_call(calls[t]) for t in tokens]
    expected = {mode: reference_results(bench.workload, mode, first, progress) for mode in modes}
    packed: dict[str, Any] = {}
    runs: list[tuple[LayerContender, Run]] = []
    for c in found:
        if isinstance(c, BenchRow):
            continue
        progress(f"{c.name}: packing")
        try:
            runs.append((c, c.prepare(bench.workload.weights, bench.device, packed)))
        except Exception as error:  # anything that another library may raise
            yield BenchRow(c.name, None, note=told(error), version=c.version)
    del packed
    for c, run in runs:
        progress(f"{c.name}: first calls")
        at_once = c.peer is not None and c.peer.compiles_at_once
        _first_calls(run, [calls_for(c, calls[t])[0] for t in sorted(tokens, reverse=True)], at_once=at_once)
    if bench.device.type == "cuda":
        torch.cuda.synchronize(bench.device)
        torch.cuda.empty_cache()
    ready()
    for i, t in enumerate(tokens):
        for c, run in runs:
            progress(f"{c.name}: {t} tokens")
            try:
                row = bench.row(c, run, calls[t], expected[c.inputs(t)][i], expected[UNQUANTIZED][i])
            except Exception as error:
                row = BenchRow(c.name, t, note=told(error))
            yield replace(row, version=c.version)
            if not works(bench.device):
                yield BenchRow(c.name, None, note="the GPU does not work any more: all others were not run")
                return


def _first_calls(run: Run, calls: Sequence[Call], *, at_once: bool) -> None:
    """Make one call of each size, with results that nobody reads, so that kernels are compiled.

    Those behind the first at once, where a library compiles in processes of its own and waits for them. What fails is
    left for later calls, which say so.
    """

    def one(call: Call) -> None:
        with suppress(Exception):
            run(*call, torch.empty_like(call[0]))

    for call in calls[:1] if at_once else calls:
        one(call)
    if at_once and len(calls) > 1:
        with ThreadPoolExecutor(len(calls) - 1) as pool:
            list(pool.map(one, calls[1:]))


def medians_in_turn(
    timed: Sequence[TimedCalls], rounds: int, repeats: int = 15, *, rest_seconds: float = 0.0
) -> list[float]:
    """Return the median time of each, in microseconds, of rounds in which all are timed in turn, as clocks change
    meanwhile. Other arguments are those of :meth:`TimedCalls.time`."""
    found = [[t.time(repeats, rest_seconds=rest_seconds).median_us for t in timed] for _ in range(rounds)]
    return [statistics.median(times) for times in zip(*found, strict=True)]
