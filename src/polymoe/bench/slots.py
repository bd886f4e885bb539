"""Experts in host memory: time of a call of one token by the number of experts that have to be copied for it.

Calls are made so that each misses exactly so many experts, whatever was replayed before: the misses of all calls go
through more experts than there are slots, and the hits through experts that are needed again before they are evicted.
They are captured in one CUDA graph, and the counter on the GPU says how many experts were copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from polymoe.bench.cases import Workload
from polymoe.bench.contenders import BenchRow
from polymoe.bench.records import Record, Stamp
from polymoe.bench.routings import floor_us
from polymoe.bench.timing import TimedCalls
from polymoe.errors import ArgumentError
from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import OffloadedExperts
from polymoe.machine import Machine
from polymoe.problem.routing import Routing

__all__ = ["Link", "missing_calls", "slot_rows"]

_CALLS = 32  # at least, of one graph


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


class Link:
    """The rate of the copy engine from host memory to the GPU, measured with a layer's own records.

    Attributes:
        bytes_per_s: of copies of whole experts in a CUDA graph, one after the other.
    """

    def __init__(self, experts: OffloadedExperts, device: torch.device) -> None:
        host, count = experts.packed.tensors, min(16, experts.slots)
        rows = {name: torch.empty_like(t[:count], device=device) for name, t in host.items()}
        total = len(next(iter(host.values())))

        def copy(slot: int) -> None:
            for name, row in rows.items():
                row[slot].copy_(host[name][slot * 7 % total], non_blocking=True)

        timed = TimedCalls([partial(copy, slot) for slot in range(count)], device, graph=True)
        self.bytes_per_s = experts.expert_bytes / timed.time(5).median_us * 1e6


def slot_rows(
    workload: Workload,
    machine: Machine,
    device: torch.device,
    stamp: Stamp,
    slots: int,
    misses: Sequence[int],
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[BenchRow]:
    """Yield a row of the resident layer and one for each number of misses. The floor of a call with misses is that of
    the resident layer and the time in which the copy engine copies them.

    Raises:
        ArgumentError: for slots or misses that do not fit the layer.
        UnsupportedProblem, PlanError: as :class:`OffloadedExperts`.
    """
    problem = workload.problem
    count, top_k = problem.spec.local_experts, problem.top_k
    cycles = {m: missing_calls(count, slots, top_k, m) for m in misses}
    progress("packing")
    resident, copied = (_packed(workload, machine, device) for _ in range(2))
    progress(f"page-locking {count} experts")
    offloaded = OffloadedExperts(copied, slots)
    del copied
    link = Link(offloaded, device)
    x_TH = torch.randn(1, problem.spec.hidden, device=device).bfloat16()
    weights_TA = torch.full((1, top_k), 1 / top_k, device=device)
    for m in [None, *misses]:
        progress("resident" if m is None else f"{m} misses")
        cycle = cycles[misses[0] if m is None else m]
        ids = [torch.tensor([experts], device=device) + problem.spec.first_expert for experts in cycle]
        expected = [resident(x_TH, i, weights_TA) for i in ids]
        layer: FusedExperts = resident if m is None else offloaded
        outs = [torch.full_like(x_TH, float("nan")) for _ in ids]
        timed = TimedCalls(
            [partial(_call, layer, x_TH, i, weights_TA, out) for i, out in zip(ids, outs, strict=True)],
            device,
            graph=True,
        )
        timed()
        before = offloaded.cache_stats()["misses"]
        for out in outs:
            out.fill_(float("nan"))
        timed()
        name = "resident" if m is None else f"{m} misses"
        if m is not None and offloaded.cache_stats()["misses"] - before != m * len(ids):
            yield BenchRow(name, 1, note=f"copied {offloaded.cache_stats()['misses'] - before} experts", wrong=True)
            continue
        if not all(torch.equal(out, e) for out, e in zip(outs, expected, strict=True)):
            yield BenchRow(name, 1, note="not the bits of the resident layer", wrong=True)
            continue
        timing = timed.time(5 if m else 15, rest_seconds=0.5)
        routings = [Routing(i, weights_TA) for i in ids]
        floor = floor_us(problem, machine.device, routings)
        floor += (m or 0) * offloaded.expert_bytes / link.bytes_per_s * 1e6
        step = resident.explain().require().step(1)
        record = Record(
            case=workload.case if m is None else f"{workload.case}[{slots} slots, {m} misses]",
            backend=step.backend,
            format=problem.spec.format,
            activations=str(problem.activations),
            tokens=1,
            routing="cycle",
            median_us=round(timing.median_us, 2),
            p25_us=round(timing.p25_us, 2),
            p75_us=round(timing.p75_us, 2),
            floor_us=round(floor, 2),
            share=round(floor / timing.median_us, 4),
            error=0.0,
            error_exact=0.0,
            device=stamp.device,
            torch=stamp.torch,
            triton=stamp.triton,
            commit=stamp.commit,
            date=stamp.date(),
            command=stamp.command,
            family=step.config.kernel_family,
            config=str(step.config),
            bandwidth_tb_s=machine.device.bandwidth / 1e12,
        )
        yield BenchRow(name, 1, record, note=f"link {link.bytes_per_s / 1e9:.1f} GB/s" if m is None else "")


def _call(layer: FusedExperts, x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor) -> None:
    layer(x_TH, ids_TA, weights_TA, out=out_TH)


def _packed(workload: Workload, machine: Machine, device: torch.device) -> FusedExperts:
    from polymoe.backends import BACKENDS
    from polymoe.layer.runtime import PlanRequest
    from polymoe.layouts import LAYOUTS

    request = PlanRequest(machine, "decode", "auto", BACKENDS, LAYOUTS)
    problem = replace(workload.problem, dtype="bf16")
    return FusedExperts.pack(problem, workload.weights, request, device=device, check=False, where=workload.case)
