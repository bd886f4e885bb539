"""Toy backends and layouts: what selection must cope with, on a machine without a GPU.

``small`` and ``large`` share the layout "flipped"; ``small`` is faster and takes at most 63 tokens. ``absent`` has a
layout of its own and needs a package that is not installed. ``wrong`` computes something else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polymoe.backends.base import BackendBase, Prediction, Runner, RunnerBase
from polymoe.backends.config import Config
from polymoe.backends.cost import cost
from polymoe.backends.features import ANY, SHARDS, Handled
from polymoe.backends.reference import Reference, run_experts
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import Natural, Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activations import SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.tensors import ExpertsSpec, ExpertWeights
from polymoe.problem.verdict import Accepted, Reason, Reasons, Verdict


@dataclass(frozen=True)
class Flipped:
    """Natural tensors with their last axis reversed."""

    name: str = "flipped"

    def check(self, spec: ExpertsSpec, scales: ScaleRange | None = None) -> tuple[Reason, ...]:
        return ()

    def nbytes(self, spec: ExpertsSpec) -> int:
        return Natural().nbytes(spec)

    def _flip(self, packed: Packed, name: str) -> Packed:
        def flip(t: Tensor) -> Tensor:
            return (
                t
                if t.dim() < 2
                else t.contiguous().view(torch.uint8 if t.element_size() == 1 else t.dtype).flip(-1).view(t.dtype)
            )

        return replace(packed, layout=name, tensors={n: flip(t) for n, t in packed.tensors.items()})

    def pack(self, weights: ExpertWeights, device: torch.device, out: Packed | None = None) -> Packed:
        fresh = self._flip(Natural().pack(weights, device), self.name)
        if out is None:
            return fresh
        for name, tensor in fresh.tensors.items():
            out.tensors[name].copy_(tensor)
        return out

    def unpack(self, packed: Packed) -> ExpertWeights:
        return Natural().unpack(self._flip(packed, "natural"))


@dataclass(frozen=True)
class TileConfig(Config):
    tile: int = 16


HANDLES: Handled = {**SHARDS, "activation": (SwiGLU,), "dtype": ("bf16", "fp16", "fp32"), "spec.bias": ANY}


@dataclass(frozen=True)
class Toy(BackendBase):
    name: str
    layouts: tuple[str, ...] = ("flipped",)
    times_floor: float = 2.0
    max_tokens: int | None = None
    needs_package: str = ""
    hidden_multiple: int = 1
    error: float = 0.0
    calls: list[int] = None  # type: ignore[assignment]
    handles: Handled = field(default_factory=lambda: HANDLES)

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", [])

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        reasons = Reasons()
        if self.needs_package:
            installed = machine.packages.get(self.needs_package, "not installed")
            reasons.need(installed != "not installed", f"package {self.needs_package}", "any version", installed)
        h = problem.spec.hidden
        reasons.need(h % self.hidden_multiple == 0, "H", f"a multiple of {self.hidden_multiple}", h)
        return reasons.verdict(Accepted(max_tokens=self.max_tokens))

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> Config:
        return TileConfig(16 if tokens < 1024 else 64)

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        return Prediction(self.times_floor * cost(problem, machine.device, tokens).floor_us, "cost model")

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        return ToyRunner(self, problem, packed)


@dataclass(frozen=True)
class ToyRunner(RunnerBase):
    toy: Toy
    problem: Problem
    packed: Packed

    def run(self, call: CallArguments, config: Config) -> None:
        self.toy.calls.append(call.x_TH.shape[0])
        weights = LAYOUTS[self.packed.layout].unpack(self.packed)
        call.out_TH.copy_(run_experts(self.problem, weights, call.x_TH, call.routing) * (1 + self.toy.error))


LAYOUTS = {layout.name: layout for layout in (Natural(), Flipped())}


def toys(*extra: Toy) -> dict[str, Toy]:
    table = (
        Toy("small", times_floor=1.5, max_tokens=63),
        Toy("large", times_floor=3.0),
        Toy("absent", layouts=("striped",), times_floor=1.1, needs_package="toykernels", hidden_multiple=4096),
        *extra,
    )
    return {toy.name: toy for toy in table}


def choice(backends: dict[str, Toy], backend: str = "auto", role: str = "mixed", device: str = "cpu") -> PlanRequest:
    return PlanRequest(Machine.of(device), role, backend, backends, LAYOUTS)


class Ours:
    """As an entry point may name it: what polymoe has already."""

    backends = (Reference(),)
    layouts = (Natural(),)


class Flipping:
    """The same with a layout that polymoe does not have, under a name that is taken."""

    layouts = (Flipped("natural"),)
