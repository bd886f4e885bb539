"""FlashInfer's fused MoE kernels.

Each family of FlashInfer's kernels is a route, for weights of one format on some GPUs: CUTLASS for MXFP4 on SM90;
TensorRT-LLM's for INT4 in groups of 32, MXFP4 and NVFP4 on SM100 and SM103; CuTe DSL for NVFP4 on SM120 and SM121. The
latter keeps inputs in 16 bits for few tokens and, with ``nvfp4``, rounds them from 64 tokens on, from the same packed
weights. A route permutes the checkpoint's own bytes, and calls the kernels with fixed tactics. FlashInfer is imported
when a layer is bound, not before. The routes for Blackwell have never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polymoe.backends.base import BackendBase, Prediction, Runner
from polymoe.backends.config import Config
from polymoe.backends.features import SHARDS, Handled
from polymoe.backends.flashinfer.config import FlashInferConfig
from polymoe.backends.flashinfer.cutlass_sm90 import CutlassSM90
from polymoe.backends.flashinfer.nvfp4_sm12x import Sm12xNvfp4
from polymoe.backends.flashinfer.routes import PACKAGE, Route
from polymoe.backends.flashinfer.trtllm_sm100 import TrtllmMxfp4, TrtllmMxint4, TrtllmNvfp4
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.verdict import Accepted, Reasons, Rejected, Verdict

_ALL: tuple[Route, ...] = (CutlassSM90(), TrtllmMxint4(), TrtllmMxfp4(), TrtllmNvfp4(), Sm12xNvfp4())

ROUTES: dict[str, Route] = {route.name: route for route in _ALL}
"""Routes by name."""


def _all(attribute: str) -> tuple[Any, ...]:
    """What some route has."""
    return tuple(dict.fromkeys(each for route in ROUTES.values() for each in getattr(route, attribute)))


_HANDLES: Handled = {**SHARDS, "activation": _all("functions"), "activations": _all("activations"), "dtype": ("bf16",)}


@dataclass(frozen=True, slots=True)
class FlashInfer(BackendBase):
    """x and the result are bfloat16."""

    package: ClassVar[str | None] = PACKAGE
    name: str = "flashinfer"
    layouts: tuple[str, ...] = _all("layouts")
    handles = _HANDLES
    """:meth:`check` rejects what the problem's own route does not cover."""

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        """Accept the problem, or return every reason against it: GPU, weights, and those of the route for both."""
        reasons, device = Reasons(), machine.device
        here = [route for route in ROUTES.values() if device.capability in route.architectures]
        if not here:
            built = sorted({arch for route in ROUTES.values() for arch in route.architectures})
            reasons.need(False, "GPU", " or ".join(f"SM{major}{minor}" for major, minor in built), device.arch)
            return Rejected(tuple(reasons.found), layouts=())
        route = _route(problem, machine)
        if route is None:
            formats = " or ".join(dict.fromkeys(route.format for route in here))
            reasons.need(False, f"weights on {device.arch}", formats, problem.spec.format)
            return Rejected(tuple(reasons.found), layouts=())
        notes = route.check(problem, machine, reasons)
        layouts = (route.layout(machine),)
        if reasons.found:
            return Rejected(tuple(reasons.found), layouts)
        return Accepted(
            max_tokens=route.most_tokens,
            capturable=True,
            foreign=True,
            repeatable=route.repeatable,
            layouts=layouts,
            notes=tuple(notes),
        )

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> FlashInferConfig:
        return _required(problem, machine).configure(problem, machine, tokens)

    def token_bounds(self, problem: Problem, machine: Machine) -> Sequence[int]:
        return _required(problem, machine).token_bounds

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        return _required(problem, machine).predict(problem, machine, tokens)

    def tuning_configs(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
    ) -> Sequence[Config]:
        return _required(problem, machine).tuning_configs(problem, machine, tokens, timed)

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        route = next(route for route in ROUTES.values() if packed.layout in route.layouts)
        return route.bind(problem, packed)


def _route(problem: Problem, machine: Machine) -> Route | None:
    """The route for the weights on this GPU, if there is one."""
    fitting = (r for r in ROUTES.values() if machine.device.capability in r.architectures and r.reads(problem))
    return next(fitting, None)


def _required(problem: Problem, machine: Machine) -> Route:
    route = _route(problem, machine)
    assert route is not None, "only for problems that check accepts"
    return route
