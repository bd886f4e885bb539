"""A package outside polymoe that brings a backend and a layout, as its installed distribution would look.

``toy_plugin-1.0.dist-info`` is what an installer makes of this in its pyproject.toml::

    [project.entry-points."polymoe.backends"]
    toys = "toy_plugin:plugin"
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from polymoe.backends.base import BackendBase, Prediction, Runner, RunnerBase
from polymoe.backends.config import Config
from polymoe.backends.cost import cost
from polymoe.backends.features import ANY, Handled
from polymoe.backends.reference import run_experts
from polymoe.layouts import Natural, Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activations import SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.tensors import ExpertsSpec, ExpertWeights
from polymoe.problem.verdict import Accepted, Reason, Verdict


@dataclass(frozen=True, slots=True)
class Inverted:
    """The natural layout with every bit inverted."""

    name: str = "inverted"

    def check(self, spec: ExpertsSpec, scales: ScaleRange | None = None) -> tuple[Reason, ...]:
        return ()

    def nbytes(self, spec: ExpertsSpec) -> int:
        return Natural().nbytes(spec)

    def pack(self, weights: ExpertWeights, device: torch.device, out: Packed | None = None) -> Packed:
        packed = self._invert(Natural().pack(weights, device), self.name)
        if out is None:
            return packed
        for name, tensor in packed.tensors.items():
            out.tensors[name].copy_(tensor)
        return out

    def unpack(self, packed: Packed) -> ExpertWeights:
        return Natural().unpack(self._invert(packed, "natural"))

    def _invert(self, packed: Packed, name: str) -> Packed:
        tensors = {n: (~t.contiguous().view(torch.uint8)).view(t.dtype) for n, t in packed.tensors.items()}
        return replace(packed, layout=name, tensors=tensors)


@dataclass(frozen=True, slots=True)
class Inverter(BackendBase):
    """Runs the inverted layout."""

    name: str = "inverter"
    layouts: tuple[str, ...] = ("inverted",)

    @property
    def handles(self) -> Handled:
        return {"activation": (SwiGLU,), "dtype": ("bf16", "fp16", "fp32"), "spec.bias": ANY}

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        return Accepted()

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> Config:
        return Config()

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        return Prediction(1.1 * cost(problem, machine.device, tokens).floor_us)

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        return InverterRunner(problem, Inverted().unpack(packed))


@dataclass(frozen=True, slots=True)
class InverterRunner(RunnerBase):
    problem: Problem
    weights: ExpertWeights

    def run(self, call: CallArguments, config: Config) -> None:
        call.out_TH.copy_(run_experts(self.problem, self.weights, call.x_TH, call.routing))


def plugin() -> SimpleNamespace:
    return SimpleNamespace(backends=[Inverter()], layouts=[Inverted()])


nothing = SimpleNamespace()
taken = SimpleNamespace(backends=[Inverter(name="triton")], layouts=[Inverted(name="natural")])
