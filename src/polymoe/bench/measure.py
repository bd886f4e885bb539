"""Run each backend, and each peer, on a workload at each token count: compare with the reference, then time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from polymoe.activation_quantization import FP8_TOKEN, UNQUANTIZED, ActivationQuantization
from polymoe.backend_names import backend_hint
from polymoe.backends import BACKENDS
from polymoe.backends.base import inputs_of
from polymoe.backends.reference import run_experts
from polymoe.bench import baseline
from polymoe.bench.cases import Workload
from polymoe.bench.energy import EnergyMeter
from polymoe.bench.peers import PEERS, Peer, Stacks, version_of
from polymoe.bench.records import Record, Stamp
from polymoe.bench.routings import RoutingDistribution, floor_us
from polymoe.bench.timing import TimedCalls, distinct_calls
from polymoe.errors import ArgumentError, UnsupportedProblem, nearest
from polymoe.layouts import LAYOUTS, Packed
from polymoe.machine import Machine
from polymoe.numerics import relative_error
from polymoe.planning.plan import Plan
from polymoe.planning.select import select
from polymoe.problem import Problem
from polymoe.routing import Routing
from polymoe.verdict import Accepted, Reason, Rejected

__all__ = ["Bench", "BenchRow", "Call", "draw_calls", "free_bytes", "reference_results"]

Call = tuple[Tensor, Routing]
"""x and routing of one call."""
Run = Callable[[Tensor, Routing, Tensor], Tensor | None]
"""Writes its third argument, or returns the result."""

_ENERGY_SECONDS = 1.0  # the counter moves every 20 to 100 ms

PEER_TOLERANCE, PEER_TOLERANCE_QUANTIZED = 1.2e-2, 5e-2
"""Largest relative error of a peer: it may round intermediate results to bfloat16, and quantize in its own way."""


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One backend or peer at one token count (None: at all of them).

    Attributes:
        backend: its name; ``peer:NAME`` for a peer.
        record: the measurement, or None.
        note: how it was timed ("graph" or "calls"), or why it was not timed.
        wrong: whether the result differed from the reference by more than the tolerance.
        tokens_per_joule: if energy was measured.
        version: of the peer's package.
    """

    backend: str
    tokens: int | None
    record: Record | None = None
    note: str = ""
    wrong: bool = False
    tokens_per_joule: float | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class _Contender:
    """A backend that accepts the problem: its verdict, and its plan (the baseline has none); or a peer."""

    name: str
    problem: Problem
    verdict: Accepted
    plan: Plan | None = None
    peer: Peer | None = None
    version: str | None = None

    def inputs(self, tokens: int) -> ActivationQuantization:
        """How a call of so many tokens rounds its inputs."""
        return inputs_of(self.problem, self.plan.step(tokens).config if self.plan and self.serves(tokens) else None)

    def serves(self, tokens: int) -> bool:
        """Whether it runs calls of so many tokens."""
        return self.verdict.max_tokens is None or tokens <= self.verdict.max_tokens

    def tolerance(self, tokens: int) -> float:
        """Largest accepted relative error against the reference."""
        if self.peer is not None:
            return PEER_TOLERANCE_QUANTIZED if self.problem.activations.quantized else PEER_TOLERANCE
        return self.inputs(tokens).tolerance if self.plan else baseline.TOLERANCE


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
        found = [*self._contenders(backends), *self._peers(peers)]
        contenders = [c for c in found if isinstance(c, _Contender)]
        yield from (c for c in found if isinstance(c, BenchRow))
        if not contenders:
            return
        progress("reference")
        calls = {t: draw_calls(self.workload.problem, self.distribution, self.device, t) for t in tokens}
        modes = {UNQUANTIZED, *(c.problem.activations for c in contenders)}
        expected = {mode: reference_results(self.workload, mode, [calls[t][0] for t in tokens]) for mode in modes}
        # Backends that share a layout run one after the other, and only one packed layer is in memory.
        packed: Packed | None = None
        for c in sorted(contenders, key=lambda c: c.plan.layout if c.plan else ""):
            if c.peer is not None:
                continue
            progress(f"{c.name}: packing")
            try:
                if c.plan is None:
                    run = _run_baseline(c, baseline.dequantize(self.workload.weights))
                else:
                    if packed is None or packed.layout != c.plan.layout:
                        packed = None
                        packed = LAYOUTS[c.plan.layout].pack(self.workload.weights, self.device)
                    run = _run_backend(c, packed)
            except torch.OutOfMemoryError:
                yield BenchRow(c.name, None, note="out of GPU memory while packing")
                continue
            for i, t in enumerate(tokens):
                progress(f"{c.name}: {t} tokens")
                try:
                    row = self._row(c, run, calls[t], expected[c.inputs(t)][i], expected[UNQUANTIZED][i])
                except torch.OutOfMemoryError:
                    row = BenchRow(c.name, t, note="out of GPU memory")
                yield row
            del run
        packed = None
        yield from self._peer_rows([c for c in contenders if c.peer is not None], tokens, calls, expected, progress)

    def side_by_side(
        self,
        tokens: Sequence[int],
        backends: Sequence[str],
        peers: Sequence[str] = (),
        progress: Callable[[str], None] = lambda text: None,
        ready: Callable[[], None] = lambda: None,
    ) -> Iterator[BenchRow]:
        """Yield rows as :meth:`rows` does, by token count: all contenders are packed first and stay in memory, each
        runs once at every token count, which compiles what it needs, and then those of one count are timed one after
        another.

        Args:
            tokens, backends, peers, progress: as for :meth:`rows`.
            ready: called when nothing is left to do but timing; several processes on one GPU wait in it for their turn.

        Raises:
            ArgumentError: for an unknown backend or peer.
            UnsupportedProblem: if a backend is rejected.
        """
        found = [*self._contenders(backends), *self._peers(peers)]
        yield from (c for c in found if isinstance(c, BenchRow))
        progress("reference")
        calls = {t: draw_calls(self.workload.problem, self.distribution, self.device, t) for t in tokens}
        modes = {UNQUANTIZED, *(c.inputs(t) for c in found if isinstance(c, _Contender) for t in tokens)}
        expected = {mode: reference_results(self.workload, mode, [calls[t][0] for t in tokens]) for mode in modes}
        packed: dict[str, Packed] = {}
        stacks: Stacks | None = None
        runs: list[tuple[_Contender, Run]] = []
        for c in found:
            if isinstance(c, BenchRow):
                continue
            progress(f"{c.name}: packing")
            try:
                if c.peer is not None:
                    stacks = stacks or Stacks.of(self.workload.weights, self.device)
                    runs.append((c, _run_peer(c.peer, c.problem, stacks)))
                elif c.plan is None:
                    runs.append((c, _run_baseline(c, baseline.dequantize(self.workload.weights))))
                else:
                    layout = c.plan.layout
                    packed[layout] = packed.get(layout) or LAYOUTS[layout].pack(self.workload.weights, self.device)
                    runs.append((c, _run_backend(c, packed[layout])))
            except Exception as error:  # anything that another library may raise
                yield BenchRow(c.name, None, note=_told(error), version=c.version)
        del stacks
        for c, run in runs:
            progress(f"{c.name}: first calls")
            at_once = c.peer is not None and c.peer.compiles_at_once
            first_calls(run, [_for(c, calls[t])[0] for t in sorted(tokens, reverse=True)], at_once=at_once)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        ready()
        for i, t in enumerate(tokens):
            for c, run in runs:
                progress(f"{c.name}: {t} tokens")
                try:
                    row = self._row(c, run, _for(c, calls[t]), expected[c.inputs(t)][i], expected[UNQUANTIZED][i])
                except Exception as error:
                    row = BenchRow(c.name, t, note=_told(error))
                yield replace(row, version=c.version)
                if not _works(self.device):
                    yield BenchRow(c.name, None, note="the GPU does not work any more: all others were not run")
                    return

    def _peer_rows(
        self,
        contenders: Sequence[_Contender],
        tokens: Sequence[int],
        calls: Mapping[int, Sequence[Call]],
        expected: Mapping[ActivationQuantization, Sequence[Tensor]],
        progress: Callable[[str], None],
    ) -> Iterator[BenchRow]:
        """Yield the rows of peers. Whatever one raises becomes a row; a GPU that it broke ends them all."""
        stacks: Stacks | None = None
        broken = ""
        for c in contenders:
            assert c.peer is not None
            if broken:
                yield BenchRow(c.name, None, note=broken, version=c.version)
                continue
            progress(f"{c.name}: packing")
            run: Run | None = None
            try:
                stacks = stacks or Stacks.of(self.workload.weights, self.device)
                run = _run_peer(c.peer, c.problem, stacks)
            except Exception as error:  # anything that another library may raise
                yield BenchRow(c.name, None, note=_told(error), version=c.version)
            for t, emulated, exact in zip(tokens, expected[c.problem.activations], expected[UNQUANTIZED], strict=True):
                if run is None:
                    break
                progress(f"{c.name}: {t} tokens")
                try:
                    row = self._row(c, run, _for(c, calls[t]), emulated, exact)
                except Exception as error:
                    row = BenchRow(c.name, t, note=_told(error))
                    run = run if _works(self.device) else None
                yield replace(row, version=c.version)
            if not _works(self.device):
                broken = f"not run: the GPU does not work since {c.name} failed"
            run = None

    def _peers(self, names: Sequence[str]) -> list[_Contender | BenchRow]:
        """Return a contender for each peer that is installed and takes the problem, and a row for each other one."""
        found: list[_Contender | BenchRow] = []
        for name in dict.fromkeys(names):
            if name not in PEERS:
                raise ArgumentError("peers", got=repr(name), hint=nearest(name, PEERS))
        for peer in (PEERS[name] for name in dict.fromkeys(names)):
            version, shown = version_of(peer), f"peer:{peer.name}"
            problem, reasons = _as_taken(peer, self.workload.problem)
            if version == "none":
                found.append(BenchRow(shown, None, note=f"{peer.package} is not installed"))
            elif reasons:
                found.append(BenchRow(shown, None, note="; ".join(map(str, reasons)), version=version))
            else:
                capturable = Accepted(capturable=True)
                found.append(_Contender(shown, problem, capturable, peer=peer, version=version))
        return found

    def _contenders(self, names: Sequence[str] | None) -> list[_Contender | BenchRow]:
        """Return a contender for each backend that runs, and a row with the reason for each that does not."""
        problem, known = self.workload.problem, [*BACKENDS, baseline.NAME]
        for name in names or ():
            if name not in known:
                raise ArgumentError("backends", got=repr(name), hint=backend_hint(name, known))
        found: list[_Contender | BenchRow] = []
        for name in known if names is None else dict.fromkeys(names):
            plain, plan = name == baseline.NAME, None
            if plain:
                problem = replace(self.workload.problem, activations=UNQUANTIZED)
                verdict = baseline.check(problem, self.machine, free_bytes(self.device))
            else:
                problem = self.workload.problem
                selection = select(problem, self.machine, backend=name)
                verdict = next(c.verdict for c in selection.candidates if c.backend == name)
                plan = selection.plan
            if isinstance(verdict, Rejected):
                reasons = "; ".join(map(str, verdict.reasons))
                if names is not None:
                    raise UnsupportedProblem(f"bench ({problem})", expected=f"{name} to run it", got=reasons)
                found.append(BenchRow(name, None, note=reasons))
            elif verdict.opt_in_reason and names is None:
                found.append(BenchRow(name, None, note=verdict.opt_in_reason))
            else:
                package = None if plain else getattr(BACKENDS[name], "package", None)
                version = self.machine.packages.get(package) if package else None
                found.append(_Contender(name, problem, verdict, plan, version=version))
        return found

    def _row(self, c: _Contender, run: Run, calls: Sequence[Call], emulated: Tensor, exact: Tensor) -> BenchRow:
        tokens = len(calls[0][0])
        if not c.serves(tokens):
            return BenchRow(c.name, tokens, note=f"takes at most {c.verdict.max_tokens} tokens")
        outs = [torch.full_like(x, float("nan")) for x, _ in calls]  # missing writes become visible
        results = list(outs)

        def call(index: int) -> None:
            returned = run(*calls[index], outs[index])
            if returned is not None:
                results[index] = returned

        call(0)
        before = relative_error(results[0], emulated)
        most = c.tolerance(tokens)
        if not before <= most:  # NaN fails too
            return BenchRow(c.name, tokens, note=f"WRONG, not timed: error {before:.2g}, at most {most:g}", wrong=True)
        timed = [partial(call, index) for index in range(len(calls))]
        together = TimedCalls(timed, self.device, graph=c.verdict.capturable)
        for out in outs:
            out.fill_(float("nan"))
        timing = together.time(self.repeats, rest_seconds=self.rest_seconds)
        error = relative_error(results[0], emulated)
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
        record = Record(
            case=self.workload.case,
            backend=c.name,
            format=c.problem.spec.format,
            activations=str(c.inputs(tokens)),
            tokens=tokens,
            routing=self.distribution.name,
            median_us=round(timing.median_us, 2),
            p25_us=round(timing.p25_us, 2),
            p75_us=round(timing.p75_us, 2),
            floor_us=round(floor, 2),
            share=round(floor / timing.median_us, 4),
            error=float(f"{error:.3g}"),
            error_exact=float(f"{relative_error(results[0], exact):.3g}"),
            device=self.stamp.device,
            torch=self.stamp.torch,
            triton=self.stamp.triton,
            commit=self.stamp.commit,
            date=self.stamp.date(),
            command=self.stamp.command,
            family=config.kernel_family if config else None,
            config=str(config) if config else None,
            peer=c.peer.name if c.peer else None,
            version=c.version,
            bandwidth_tb_s=self.machine.device.bandwidth / 1e12,
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


def reference_results(workload: Workload, mode: ActivationQuantization, calls: Sequence[Call]) -> Sequence[Tensor]:
    """Return the reference's float32 results of all calls with activations in ``mode``; each expert is read once."""
    problem = replace(workload.problem, activations=mode)
    x_TH = torch.cat([x for x, _ in calls])
    routing = Routing(*map(torch.cat, zip(*(r for _, r in calls), strict=True)))
    return run_experts(problem, workload.weights, x_TH, routing).split([len(x) for x, _ in calls])


def first_calls(run: Run, calls: Sequence[Call], *, at_once: bool) -> None:
    """Make one call of each size, with results that nobody reads, so that kernels are compiled.

    Those behind the first at once, where a library compiles in processes of its own and waits for them. What fails is
    left for later calls, which say so.
    """

    def one(call: Call) -> None:
        with suppress(Exception):
            run(*call, torch.empty_like(call[0]))

    one(calls[0])
    with ThreadPoolExecutor(max(1, len(calls) - 1) if at_once else 1) as pool:
        list(pool.map(one, calls[1:]))


def _for(c: _Contender, calls: Sequence[Call]) -> Sequence[Call]:
    """The calls with ids of the dtype that the contender takes."""
    if c.peer is None:
        return calls
    return [(x, Routing(r.topk_ids_TA.int(), r.topk_weights_TA)) for x, r in calls]


def _as_taken(peer: Peer, problem: Problem) -> tuple[Problem, tuple[Reason, ...]]:
    """The problem as the peer runs it, and its reasons against that: where it does not scale E4M3 activations as the
    problem says, they have one scale a token."""
    reasons = peer.check(problem)
    if reasons and problem.activations.quantized:
        by_token = replace(problem, activations=FP8_TOKEN)
        if not peer.check(by_token):
            return by_token, ()
    return problem, reasons


def _run_baseline(c: _Contender, weights: baseline.Dequantized) -> Run:
    return partial(baseline.run, c.problem, weights)


def _run_backend(c: _Contender, packed: Packed) -> Run:
    plan, runner = c.plan, BACKENDS[c.name].bind(c.problem, packed)
    assert plan is not None

    def run(x_TH: Tensor, routing: Routing, out_TH: Tensor) -> None:
        runner.run(x_TH, routing, plan.step(len(x_TH)).config, out_TH)

    return run


def _run_peer(peer: Peer, problem: Problem, stacks: Stacks) -> Run:
    call = peer.prepare(problem, stacks)

    def run(x_TH: Tensor, routing: Routing, out_TH: Tensor) -> Tensor | None:
        return call(x_TH, routing.topk_ids_TA, routing.topk_weights_TA, out_TH)

    return run


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _works(device: torch.device) -> bool:
    """Whether the GPU still runs anything: after some errors a process cannot use it."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def free_bytes(device: torch.device) -> int | None:
    """Free memory of the device, or None if the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if sys.platform != "linux":
        return None
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
