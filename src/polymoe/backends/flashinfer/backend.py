"""FlashInfer: runs experts on the fused MoE kernels of FlashInfer, another library.

Each family of its kernels is a route, for weights of one format on some GPUs. A route permutes the checkpoint's own
bytes, and calls the kernels with fixed tactics. Nothing of the package is imported before a layer is bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from polymoe.backends.base import BackendBase, Prediction, Runner
from polymoe.backends.config import Config
from polymoe.backends.features import SHARDS, Handled
from polymoe.backends.flashinfer.config import FlashInferConfig
from polymoe.backends.flashinfer.cutlass_sm90 import CutlassSM90
from polymoe.backends.flashinfer.routes import PACKAGE, Route
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.verdict import Accepted, Reasons, Verdict

__all__ = ["ROUTES", "FlashInfer"]

_ALL: tuple[Route, ...] = (CutlassSM90(),)

ROUTES: dict[str, Route] = {route.name: route for route in _ALL}
"""Routes by name."""


@dataclass(frozen=True, slots=True)
class FlashInfer(BackendBase):
    """Runs experts on FlashInfer's kernels, with x and the result in bfloat16."""

    package: ClassVar[str | None] = PACKAGE
    name: str = "flashinfer"
    layouts: tuple[str, ...] = tuple(dict.fromkeys(name for route in ROUTES.values() for name in route.layouts))

    @property
    def handles(self) -> Handled:
        """Features that some route covers. :meth:`check` rejects what the problem's own route does not."""
        routes = ROUTES.values()
        modes = tuple(dict.fromkeys(mode for route in routes for mode in route.activations))
        functions = tuple(dict.fromkeys(function for route in routes for function in route.functions))
        return {**SHARDS, "activation": functions, "activations": modes, "dtype": ("bf16",)}

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        """Accept the problem, or return every reason against it: GPU, weights, and those of the route for both."""
        reasons, device = Reasons(), machine.device
        here = [route for route in ROUTES.values() if device.capability in route.architectures]
        if not here:
            built = sorted({arch for route in ROUTES.values() for arch in route.architectures})
            reasons.need(False, "GPU", " or ".join(f"SM{major}{minor}" for major, minor in built), device.arch)
            return reasons.verdict(Accepted())
        route = _route(problem, machine)
        if route is None:
            formats = " or ".join(dict.fromkeys(route.format for route in here))
            reasons.need(False, f"weights on {device.arch}", formats, problem.spec.format)
            route = here[0]
        notes = route.check(problem, machine, reasons)
        layouts = (route.layout(machine),)
        return reasons.verdict(
            Accepted(max_tokens=route.most_tokens, capturable=True, foreign=True, layouts=layouts, notes=tuple(notes))
        )

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> FlashInferConfig:
        """Return the route's choice."""
        return _required(problem, machine).configure(problem, machine, tokens)

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        """Return the time by the route's rates."""
        return _required(problem, machine).predict(problem, machine, tokens)

    def tuning_configs(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
    ) -> Sequence[Config]:
        """Return the route's tactics."""
        return _required(problem, machine).tuning_configs(problem, machine, tokens, timed)

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        """Return a runner for the packed layer."""
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
