"""Experts in host memory: time of a call of one token by the number of experts that have to be copied for it, and of
calls of more tokens.

Calls are made so that each misses exactly so many experts, whatever was replayed before: the misses of all calls go
through more experts than there are slots, and the hits through experts that are needed again before they are evicted.
They are captured in one CUDA graph, and the counter on the GPU says how many experts were copied. Calls of up to 256
tokens are captured too, in waves where they have more ids than there are slots. Larger ones go through a stack of
layers, as a prompt does, and are timed together: each layer's experts are copied while the layer before runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from polymoe.backends import BACKENDS
from polymoe.bench.cases import Workload
from polymoe.bench.contenders import BenchRow, Call
from polymoe.bench.measure import Bench, draw_calls
from polymoe.bench.records import Record
from polymoe.bench.routings import floor_us
from polymoe.bench.timing import TimedCalls, Timing
from polymoe.errors import ArgumentError
from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import OffloadedExperts, require_slots
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine, host_memory
from polymoe.problem.routing import Routing

_CALLS = 32  # at least, of one graph
_MOST_CAPTURED = 256  # tokens of a step for which engines capture graphs
_STACK = 12  # layers, or as many as half of the free host memory holds


def missing_calls(experts: int, slots: int, top_k: int, misses: int) -> list[list[int]]:
    """Return the experts of each of a cycle of calls, of which every call misses exactly ``misses``.

    Raises:
        ArgumentError: if there are no such calls: more misses than experts of a token, or too few experts.
    """
    if not 0 <= misses <= top_k:
        raise ArgumentError("misses", expected=f"0 to {top_k}, the experts of a token", got=str(misses))
    hits = top_k - misses
    # In the time in which all hot experts are needed once, hot / hits calls miss that many times as many experts.
    hot = slots if not misses else min(slots - misses, slots * hits // top_k // max(hits, 1) * hits)
    cold = (experts - hot) // misses * misses if misses else 0
    if misses and (hot < hits or cold + hot <= slots):
        expected = f"more than {slots + top_k} experts, or other slots"
        raise ArgumentError(f"{misses} misses", expected=expected, got=f"{experts} experts, {slots} slots")
    calls, warm, copied = [], 0, 0
    while len(calls) < _CALLS or warm % max(hot, 1) or (cold and copied % cold):
        now = [(warm + i) % hot for i in range(hits)]
        now += [hot + (copied + i) % cold for i in range(misses)]
        calls.append(now)
        warm, copied = warm + hits, copied + misses
        if len(calls) >= 8 * experts:
            break
    return calls


def _link_bytes_per_s(experts: OffloadedExperts, device: torch.device) -> float:
    """The rate of the copy engine from host memory to the GPU, for floors: no call may have a higher one. It is that of
    one copy of a layer's largest tensor: a prompt copies experts in runs, and gets more of the link than copies of
    single experts do."""
    largest = max(experts.packed.tensors.values(), key=lambda t: t.nbytes)
    to = torch.empty_like(largest, device=device)

    def copied() -> None:
        to.copy_(largest, non_blocking=True)

    return largest.nbytes / TimedCalls([copied], device, graph=True).time(5).p25_us * 1e6


def slot_rows(
    bench: Bench,
    slots: int,
    misses: Sequence[int],
    tokens: Sequence[int],
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[BenchRow]:
    """Yield a row of the resident layer and one for each number of misses of a token; then the same, with the misses
    that the routing makes, for each larger number of tokens. The floor of a call with misses is that of the resident
    layer and the time in which the copy engine copies them; in a stack of layers, the longer of both.

    Raises:
        ArgumentError: for slots or misses that do not fit the layer.
        UnsupportedProblem, PlanError: as :class:`OffloadedExperts`.
    """
    problem, device, routing = bench.workload.problem, bench.device, bench.distribution
    count, top_k = problem.spec.local_experts, problem.top_k
    require_slots(problem, slots)
    cycles = {m: missing_calls(count, slots, top_k, m) for m in misses}
    progress("packing")
    resident = packed_layer(bench.workload, bench.machine, device)
    progress(f"page-locking {count} experts")
    offloaded = OffloadedExperts(copy.deepcopy(resident), slots)
    link = _link_bytes_per_s(offloaded, device)
    x_TH = torch.randn(1, problem.spec.hidden, device=device).bfloat16()
    weights_TA = torch.full((1, top_k), 1 / top_k, device=device)
    first = problem.spec.first_expert

    def calls(cycle: list[list[int]]) -> list[Call]:
        return [(x_TH, Routing(torch.tensor([e], device=device) + first, weights_TA)) for e in cycle]

    of = _Timed(bench, offloaded, link)
    rate = f"link {link / 1e9:.1f} GB/s"
    if misses:
        yield replace(of.row([resident], resident, calls(cycles[misses[0]]), "cycle", 0), note=rate)
    for m in misses:
        progress(f"{m} misses")
        yield of.row([offloaded], resident, calls(cycles[m]), "cycle", m)
    stack, memory = [offloaded], host_memory()
    layers = _STACK if memory is None else max(2, min(_STACK, memory[0] // 2 // offloaded.packed.nbytes))
    # One call that fills the slots of a layer of the stack, as those of the first one are by then.
    filled = torch.arange(slots // top_k * top_k, device=device).view(-1, top_k) + first
    filling = x_TH.repeat(len(filled), 1), Routing(filled, weights_TA.repeat(len(filled), 1))
    for t in tokens:
        if t > 1:
            while t > _MOST_CAPTURED and len(stack) < layers:
                progress(f"page-locking layer {len(stack) + 1}")
                stack.append(OffloadedExperts(copy.deepcopy(resident), slots))
                _call(stack[-1], *filling)
            progress(f"{t} tokens")
            drawn = draw_calls(problem, routing, device, t)
            yield replace(of.row([resident], resident, drawn, routing.name, 0), note=rate)
            yield of.row(stack if t > _MOST_CAPTURED else [offloaded], resident, drawn, routing.name, None)


@dataclass(frozen=True, slots=True)
class _Timed:
    """What the rows of a layer share."""

    bench: Bench
    offloaded: OffloadedExperts
    link_bytes_per_s: float

    def row(
        self,
        layers: Sequence[FusedExperts],
        resident: FusedExperts,
        calls: Sequence[Call],
        routing: str,
        misses: int | None,
    ) -> BenchRow:
        """Compare a cycle of calls with the resident layer's bits, and time it; ``misses`` of each call are expected,
        or with None counted. Of several layers, each has one of the calls in turn, and they are timed together."""
        bench, offloaded = self.bench, self.offloaded
        problem, device = bench.workload.problem, bench.machine.device
        tokens, stacked = len(calls[0][0]), len(layers) > 1
        calls = [calls[at % len(calls)] for at in range(max(len(calls), len(layers)))]
        layer = layers[0]
        name = "resident" if layer is resident else "offloaded" if misses is None else f"{misses} misses"
        expected = [resident(x, *routed) for x, routed in calls]
        outs = [torch.full_like(x, float("nan")) for x, _ in calls]
        made = [
            partial(_call, layers[at % len(layers)], x, routed, out)
            for at, ((x, routed), out) in enumerate(zip(calls, outs, strict=True))
        ]

        def in_turn() -> None:
            for call in made:
                call()

        timed = TimedCalls([in_turn] if stacked else made, offloaded.device, graph=not stacked)
        timed()
        before = _misses(layers)
        for out in outs:
            out.fill_(float("nan"))
        timed()
        copied = (_misses(layers) - before) / len(calls)
        if misses is not None and copied != (0 if layer is resident else misses):
            return BenchRow(name, tokens, note=f"copied {copied} experts", wrong=True)
        if not all(torch.equal(out, e) for out, e in zip(outs, expected, strict=True)):
            return BenchRow(name, tokens, note="not the bits of the resident layer", wrong=True)
        timing = timed.time(5 if copied else 15, rest_seconds=0.5)
        if stacked:
            each = (timing.median_us, timing.p25_us, timing.p75_us)
            timing = Timing(*(us / len(calls) for us in each), by=timing.by)
        floor = floor_us(problem, device, [routed for _, routed in calls])
        copies = copied * offloaded.expert_bytes / self.link_bytes_per_s * 1e6
        floor = max(floor, copies) if stacked else floor + copies
        step = resident.explain().require().step(tokens)
        case, slots = bench.workload.case, offloaded.slots
        if layer is not resident:
            case += f"[{slots} slots]" if misses is None else f"[{slots} slots, {misses} misses]"
        if stacked:
            case += f"[stack of {len(layers)}]"
        record = Record.of(
            timing,
            floor,
            bench.stamp,
            bench.machine,
            case=case,
            backend=step.backend,
            format=problem.spec.format,
            activations=str(problem.activations),
            tokens=tokens,
            routing=routing,
            error=0.0,
            error_exact=0.0,
            family=step.config.kernel_family,
            config=str(step.config),
        )
        return BenchRow(name, tokens, record, note=f"{copied:g} misses" if copied else timing.by)


def _call(layer: FusedExperts, x_TH: Tensor, routing: Routing, out_TH: Tensor | None = None) -> None:
    layer(x_TH, *routing, out=out_TH)


def _misses(layers: Sequence[FusedExperts]) -> int:
    return sum(layer.cache_stats()["misses"] for layer in layers if isinstance(layer, OffloadedExperts))


def packed_layer(workload: Workload, machine: Machine, device: torch.device) -> FusedExperts:
    """Return the layer with all of its experts on ``device``."""
    request = PlanRequest(machine, "decode", "auto", BACKENDS, LAYOUTS)
    problem = replace(workload.problem, dtype="bf16")
    return FusedExperts.pack(problem, workload.weights, request, device=device, check=False, where=workload.case)
