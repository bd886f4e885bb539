"""What a benchmark runs on a workload: backends, the baseline and peers, each with its verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polymoe.backends import BACKENDS
from polymoe.backends.base import inputs_of
from polymoe.bench import baseline
from polymoe.bench.peers import PEERS, Peer, Stacks, version_of
from polymoe.bench.records import Record
from polymoe.bench.timing import synchronize
from polymoe.errors import ArgumentError, UnsupportedProblem, nearest
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine, host_memory
from polymoe.planning.plan import Plan
from polymoe.planning.select import select
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import FP8_TOKEN, UNQUANTIZED, ActivationQuantization
from polymoe.problem.call import CallArguments
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import ExpertWeights
from polymoe.problem.verdict import Accepted, Reason, Rejected

Call = tuple[Tensor, Routing]
"""x and routing of one call."""
Run = Callable[[Tensor, Routing, Tensor], Tensor | None]
"""Writes its third argument, or returns the result."""

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
class LayerContender:
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
        return self.inputs(tokens).tolerance if self.plan else baseline.BASELINE_TOLERANCE

    @property
    def reads(self) -> str:
        """Name of the layout that it reads, "" for the baseline, and one of its own for all peers."""
        return "peers" if self.peer else self.plan.layout if self.plan else ""

    def prepare(self, weights: ExpertWeights, device: torch.device, packed: dict[str, Any]) -> Run:
        """Return its calls. What it reads is packed, unless it is in ``packed`` already, and kept there; a peer may
        raise anything."""
        plan, peer = self.plan, self.peer
        if peer is not None:
            packed[self.reads] = packed.get(self.reads) or Stacks.of(weights, device)
            call = peer.prepare(self.problem, packed[self.reads])
            return lambda x_TH, routing, out_TH: call(x_TH, *routing, out_TH)
        if plan is None:
            return partial(baseline.run, self.problem, baseline.dequantize(weights))
        packed[self.reads] = packed.get(self.reads) or LAYOUTS[plan.layout].pack(weights, device)
        bound = BACKENDS[self.name].bind(self.problem, packed[self.reads])
        return lambda x_TH, routing, out_TH: bound.run(
            CallArguments(x_TH, *routing, out_TH), plan.step(len(x_TH)).config
        )


def own_contenders(
    workload_problem: Problem, machine: Machine, device: torch.device, names: Sequence[str] | None
) -> list[LayerContender | BenchRow]:
    """Return a contender for each backend that runs, and a row with the reason for each that does not."""
    known = [*BACKENDS, baseline.NAME]
    for name in names or ():
        if name not in known:
            raise ArgumentError("backends", got=repr(name), hint=nearest(name, known))
    found: list[LayerContender | BenchRow] = []
    for name in known if names is None else dict.fromkeys(names):
        plain, plan = name == baseline.NAME, None
        if plain:
            problem = replace(workload_problem, activations=UNQUANTIZED)
            verdict = baseline.check(problem, machine, free_bytes(device))
        else:
            problem = workload_problem
            selection = select(problem, machine, backend=name)
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
            version = machine.packages.get(package) if package else None
            found.append(LayerContender(name, problem, verdict, plan, version=version))
    return found


def peer_contenders(problem: Problem, names: Sequence[str]) -> list[LayerContender | BenchRow]:
    """Return a contender for each peer that is installed and takes the problem, and a row for each other one."""
    found: list[LayerContender | BenchRow] = []
    for name in dict.fromkeys(names):
        if name not in PEERS:
            raise ArgumentError("peers", got=repr(name), hint=nearest(name, PEERS))
        peer, shown = PEERS[name], f"peer:{name}"
        version = version_of(peer)
        taken, reasons = _as_taken(peer, problem)
        if version == "none":
            found.append(BenchRow(shown, None, note=f"not installed (package {peer.package} on PyPI)"))
        elif reasons:
            found.append(BenchRow(shown, None, note="; ".join(map(str, reasons)), version=version))
        else:
            capturable = Accepted(capturable=True)
            found.append(LayerContender(shown, taken, capturable, peer=peer, version=version))
    return found


def _as_taken(peer: Peer, problem: Problem) -> tuple[Problem, tuple[Reason, ...]]:
    """The problem as the peer runs it, and its reasons against that: where it does not scale E4M3 activations as the
    problem says, they have one scale per token."""
    reasons = peer.check(problem)
    if reasons and problem.activations.quantized:
        by_token = replace(problem, activations=FP8_TOKEN)
        if not peer.check(by_token):
            return by_token, ()
    return problem, reasons


def calls_for(c: LayerContender, calls: Sequence[Call]) -> Sequence[Call]:
    """The calls with ids of the dtype that the contender takes."""
    if c.peer is None:
        return calls
    return [(x, Routing(r.topk_ids_TA.int(), r.topk_weights_TA)) for x, r in calls]


def told(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def works(device: torch.device) -> bool:
    """Whether the GPU still runs anything: after some errors a process cannot use it."""
    try:
        synchronize(device)
    except RuntimeError:
        return False
    return True


def free_bytes(device: torch.device) -> int | None:
    """Free memory of the device, or None if the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    memory = host_memory()
    return memory[0] if memory else None
