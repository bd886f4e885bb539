"""Humming (package ``humming-kernels``): grouped GEMMs that are compiled at run time for each layer's sizes.

There are six launches: permute, work tiles, gate and up, the activation, down, and finalize. The GEMMs are Humming's
and the others are polymoe's Triton kernels. Humming's own heuristics choose the tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from polymoe.backends.base import BackendBase, Prediction, Runner
from polymoe.backends.config import Config
from polymoe.backends.cost import cost
from polymoe.backends.features import SHARDS, Handled
from polymoe.backends.humming.config import HummingConfig
from polymoe.backends.packages import at_least, need_package
from polymoe.layouts import Packed
from polymoe.layouts.humming import NATIVE_ELEMENTS
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activations import GeGLU, ReLU2, SwiGLU
from polymoe.problem.verdict import Accepted, Reasons, Verdict

__all__ = ["Humming"]

PACKAGE = "humming-kernels"
_OLDEST = "0.1.19"
"""The version whose order of weights, names and arguments were read."""
_WRONG: dict[str, str] = {}
"""What later versions do that give wrong results, by version."""

_HANDLES: Handled = {
    **SHARDS,
    "activation": (SwiGLU, GeGLU, ReLU2),
    "dtype": ("bf16", "fp32"),
}


@dataclass(frozen=True, slots=True)
class Humming(BackendBase):
    """Weights of 4 and 8 bits with bfloat16 activations. Calls can be captured in CUDA graphs.

    From SM100 on, E2M1 and E4M3 codes are stored in the order that conversion instructions read. Humming uses these
    instructions only if it compiles with CUDA 13.2 or newer; otherwise loading such a layer raises an error.

    E4M3 activations are refused: Humming rounds gate and up to bfloat16 before h could be quantized, and after this
    double rounding so many E4M3 numbers differ from the reference that the error exceeds the tolerance.
    """

    name: str = "humming"
    layouts: tuple[str, ...] = ("humming_a16", "humming_a16_native")
    package: ClassVar[str | None] = PACKAGE

    @property
    def handles(self) -> Handled:
        """Features that the launches cover. :meth:`check` rejects some combinations."""
        return _HANDLES

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        """Collect every reason against it: packages and GPU. What the layout cannot hold, it says itself."""
        device, reasons = machine.device, Reasons()
        notes = tuple(need_package(reasons, machine, PACKAGE, _OLDEST, wrong=_WRONG))
        triton = machine.packages.get("triton", "")
        reasons.need(at_least(triton, "3.6"), "triton", "3.6 or newer", triton or "none")
        known = device.kind == "cuda" and 80 <= device.sm <= 121
        reasons.need(known, "GPU", "SM80 to SM121, for which Humming's order of weights is known", device.arch)
        layout = "humming_a16"
        if device.sm >= 100:
            layout = "humming_a16_native"
            if any(e.element in NATIVE_ELEMENTS for e in problem.spec.encodings.values()):
                notes = (*notes, "needs Humming to compile with CUDA 13.2 or newer")
        return reasons.verdict(Accepted(capturable=True, foreign=True, notes=notes, layouts=(layout,)))

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> HummingConfig:
        """Return what Humming chooses for the call."""
        return HummingConfig()

    def tuning_configs(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
    ) -> Sequence[Config]:
        """Return Humming's choice for the call, and for half and twice as many rows."""
        rows = tokens * problem.top_k
        return () if timed else (HummingConfig(), HummingConfig(max(rows // 2, 1)), HummingConfig(2 * rows))

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        """Return the sum of the times for memory, math and launches.

        Rates are those of version 0.1.19 on one H200: 4-bit weights are read at 0.62 of the bandwidth.
        """
        c = cost(problem, machine.device, tokens)
        memory_us = c.memory_us / (0.62 if problem.spec.up.bits == 4 else 0.8)
        return Prediction(memory_us + c.compute_us / 0.55 + 25, "cost model")

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        """Return a runner for one packed layer. This imports Humming; kernels are compiled at the first call."""
        from polymoe.backends.humming.runner import HummingRunner

        return HummingRunner(problem, packed)
