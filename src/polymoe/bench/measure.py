"""Run each backend, and each peer, on a workload at each token count: compare with the reference, then time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymoe.backends.reference import run_experts
from polymoe.bench.cases import Workload
from polymoe.bench.contenders import (
    BenchRow,
    Call,
    LayerContender,
    Run,
    calls_for,
    own_contenders,
    peer_contenders,
    told,
    works,
)
from polymoe.bench.energy import EnergyMeter
from polymoe.bench.records import Record, Stamp
from polymoe.bench.routings import RoutingDistribution, floor_us
from polymoe.bench.timing import TimedCalls, distinct_calls
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import UNQUANTIZED, ActivationQuantization
from polymoe.problem.numerics import relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import Expert, ExpertWeights

_ENERGY_SECONDS = 1.0  # the counter moves every 20 to 100 ms
_COMPARED_TOKENS = 8
"""At least so many tokens are compared with the reference, if need be of several calls. Where h is rounded to E4M3, one
element near a tie can put a single token beyond the limit; in eight of them it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One benchmark run.

    Attributes:
        workload: what runs.
        distribution: how tokens are routed.
        machine, device: where it runs; a GPU is torch's current device.
        stamp: the fields that all records share.
        rest_seconds, repeats: how long a GPU rests before each measurement, and how many replays are measured.
        meter: measures tokens per joule as well.
        trace: path of profiler traces, one for each row, with backend and token count added before the suffix.
    """

    workload: Workload
    distribution: RoutingDistribution
    machine: Machine
    device: torch.device
    stamp: Stamp
    rest_seconds: float = 0.5
    repeats: int = 15
    meter: EnergyMeter | None = None
    trace: Path | None = None

    def rows(
        self,
        tokens: Sequence[int],
        backends: Sequence[str] | None = None,
        progress: Callable[[str], None] = lambda text: None,
        peers: Sequence[str] = (),
    ) -> Iterator[BenchRow]:
        """Yield rows as they are finished.

        Args:
            tokens: token counts.
            backends: names; by default all that ``auto`` may choose here, and the baseline.
            progress: called with a description of each step.
            peers: names of peers, which run after all backends. One that is not installed, does not take the problem,
                fails or is wrong gets a row that says so.

        Raises:
            ArgumentError: for an unknown backend or peer.
            UnsupportedProblem: if a named backend is rejected.
        """
        found = self.contenders(backends, peers)
        contenders = [c for c in found if isinstance(c, LayerContender)]
        yield from (c for c in found if isinstance(c, BenchRow))
        if not contenders:
            return
        progress("reference")
        calls = {t: draw_calls(self.workload.problem, self.distribution, self.device, t) for t in tokens}
        modes = {UNQUANTIZED, *(c.inputs(t).promoted for c in contenders for t in tokens)}
        first = [compared_call(calls[t]) for t in tokens]
        expected = {mode: reference_results(self.workload, mode, first, progress) for mode in modes}
        # Backends that share a layout run one after the other, and only one packed layer is in memory.
        packed: dict[str, Any] = {}
        broken = ""
        for c in sorted(contenders, key=lambda c: (c.peer is not None, c.reads)):
            if broken:
                yield BenchRow(c.name, None, note=broken, version=c.version)
                continue
            progress(f"{c.name}: packing")
            raised = torch.OutOfMemoryError if c.peer is None else Exception  # another library may raise anything
            run: Run | None = None
            packed = {c.reads: packed[c.reads]} if c.reads in packed else {}
            try:
                weights = _told_of(self.workload.weights, progress, f"{c.name}: packing")
                run = c.prepare(weights, self.device, packed)
            except raised as error:
                note = "out of GPU memory while packing" if c.peer is None else told(error)
                yield BenchRow(c.name, None, note=note, version=c.version)
            for i, t in enumerate(tokens):
                if run is None:
                    break
                progress(f"{c.name}: {t} tokens")
                try:
                    row = self.row(c, run, calls[t], expected[c.inputs(t).promoted][i], expected[UNQUANTIZED][i])
                except raised as error:
                    row = BenchRow(c.name, t, note="out of GPU memory" if c.peer is None else told(error))
                    run = run if works(self.device) else None
                yield replace(row, version=c.version)
            if not works(self.device):
                broken = f"not run: the GPU does not work since {c.name} failed"

    def contenders(self, backends: Sequence[str] | None, peers: Sequence[str]) -> list[LayerContender | BenchRow]:
        """Return what runs, and a row with the reason for each that does not; raises as :meth:`rows` does."""
        problem = self.workload.problem
        own = own_contenders(problem, self.machine, self.device, backends)
        return [*own, *peer_contenders(problem, peers)]

    def row(self, c: LayerContender, run: Run, calls: Sequence[Call], emulated: Tensor, exact: Tensor) -> BenchRow:
        """Compare the first calls with the reference's results of :func:`compared_call`, with emulated activation
        quantization and without; time all."""
        calls = calls_for(c, calls)
        tokens = len(calls[0][0])
        if not c.serves(tokens):
            return BenchRow(c.name, tokens, note=f"takes at most {c.verdict.max_tokens} tokens")
        outs = [torch.full_like(x, float("nan")) for x, _ in calls]  # missing writes become visible
        results = list(outs)

        def call(index: int) -> None:
            returned = run(*calls[index], outs[index])
            if returned is not None:
                results[index] = returned

        compared = range(len(emulated) // tokens)

        def difference(expected: Tensor) -> float:
            return relative_error(torch.cat([results[i] for i in compared]), expected)

        for index in compared:
            call(index)
        before = difference(emulated)
        most = c.tolerance(tokens)
        if not before <= most:  # NaN fails too
            return BenchRow(c.name, tokens, note=f"WRONG, not timed: error {before:.2g}, at most {most:g}", wrong=True)
        timed = [partial(call, index) for index in range(len(calls))]
        together = TimedCalls(timed, self.device, graph=c.verdict.capturable)
        for out in outs:
            out.fill_(float("nan"))
        timing = together.time(self.repeats, rest_seconds=self.rest_seconds)
        if timing.by == "calls":  # perhaps not all of them ran
            for index in compared:
                call(index)
        error = difference(emulated)
        whole = timing.by == "calls" or all(bool(result.isfinite().all()) for result in results)
        if not (error <= most and whole):
            return BenchRow(
                c.name, tokens, note=f"WRONG: error {before:.2g} before timing, {error:.2g} after, or NaN", wrong=True
            )
        tokens_per_joule = None
        if self.meter is not None:
            joules = self.meter.joules()
            count = together.sustain(_ENERGY_SECONDS)
            tokens_per_joule = round(tokens * count / (self.meter.joules() - joules), 2)
        if self.trace is not None:
            together.trace(self.trace.with_suffix(f".{c.name}-{tokens}{self.trace.suffix}"))
        config = c.plan.step(tokens).config if c.plan else None
        floor = floor_us(c.problem, self.machine.device, [r for _, r in calls])
        record = Record.of(
            timing,
            floor,
            self.stamp,
            self.machine,
            case=self.workload.case,
            backend=c.name,
            format=c.problem.spec.format,
            activations=str(c.inputs(tokens)),
            tokens=tokens,
            routing=self.distribution.name,
            error=float(f"{error:.3g}"),
            error_exact=float(f"{difference(exact):.3g}"),
            family=config.kernel_family if config else None,
            config=str(config) if config else None,
            peer=c.peer.name if c.peer else None,
            version=c.version,
        )
        return BenchRow(c.name, tokens, record, timing.by, tokens_per_joule=tokens_per_joule)


def draw_calls(problem: Problem, distribution: RoutingDistribution, device: torch.device, tokens: int) -> list[Call]:
    """Draw the calls that are timed together, reproducibly: normally distributed x [T, H] in bfloat16, and routings."""
    calls = []
    for index in range(distinct_calls(tokens)):
        g = torch.Generator(device).manual_seed(index)
        x_TH = torch.randn(tokens, problem.spec.hidden, generator=g, device=device).bfloat16()
        calls.append((x_TH, distribution.draw(tokens, problem, device, index=index)))
    return calls


def compared_call(calls: Sequence[Call]) -> Call:
    """Return the first calls that are compared with the reference, as one: as many as eight tokens need."""
    return _joined(calls[: -(-_COMPARED_TOKENS // len(calls[0][0]))])


def _joined(calls: Sequence[Call]) -> Call:
    """All calls as one."""
    return torch.cat([x for x, _ in calls]), Routing(*map(torch.cat, zip(*(r for _, r in calls), strict=True)))


def reference_results(
    workload: Workload,
    mode: ActivationQuantization,
    calls: Sequence[Call],
    progress: Callable[[str], None] = lambda text: None,
) -> Sequence[Tensor]:
    """Return the reference's float32 results of all calls with activations in ``mode``; each expert is read once, of
    which ``progress`` is told."""
    problem = replace(workload.problem, activations=mode)
    weights = _told_of(workload.weights, progress, "reference")
    return run_experts(problem, weights, *_joined(calls)).split([len(x) for x, _ in calls])


def _told_of(weights: ExpertWeights, progress: Callable[[str], None], what: str) -> ExpertWeights:
    """The same weights; ``progress`` is told of each expert that is read. A CPU needs minutes for a large layer."""

    def read(e: int) -> Expert:
        progress(f"{what}: expert {e + 1} of {weights.spec.local_experts}")
        return weights.read(e)

    return replace(weights, read=read)
