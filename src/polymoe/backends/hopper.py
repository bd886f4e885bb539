"""Hopper: experts of 4-bit weights on SM90 from the Hopper layout, by kernels compiled ahead of time.

No compiler, no package. Four launches for few tokens: dispatch, gate and up with the activation, down, combine; a fifth
brings x into tiles where an expert gets many rows. Each starts while the one before it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from polymoe.activations import Activation, GeGLU, SwiGLU
from polymoe.backends.base import Prediction
from polymoe.formats import Encoding, PerGroup
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.planning.cost import cost
from polymoe.planning.plan import Config
from polymoe.problem import Problem
from polymoe.routing import Routing
from polymoe.tensors import ExpertsSpec
from polymoe.verdict import Accepted, Reasons, Verdict

if TYPE_CHECKING:
    from polymoe.kernels.hopper import launch

__all__ = ["Hopper", "HopperConfig"]


@dataclass(frozen=True, slots=True)
class HopperConfig(Config):
    """Which kernels, and the most rows of x that one piece of work holds."""

    kernels: Literal["decode", "prefill"]
    rows: int
    """8, 12 or 16 (decode), 32, 64 or 128 (prefill)."""
    height: int
    """Rows of weights that a block makes at once (decode)."""

    def __str__(self) -> str:
        return f"{self.kernels}, {self.rows} rows" + (f", {self.height} high" if self.height else "")


# Kernels and rows of an item, by the mean number of rows of an expert that has any: measured on one H200 but for items
# of 12 rows, which nine of ten experts' rows fit into at a mean of 8.
_BY_ROWS: tuple[tuple[float, HopperConfig], ...] = (
    (2.3, HopperConfig("decode", 8, 64)),
    (4.0, HopperConfig("decode", 8, 128)),
    (8.0, HopperConfig("decode", 12, 128)),
    (9.0, HopperConfig("decode", 16, 128)),
    (26.0, HopperConfig("prefill", 32, 0)),
    (60.0, HopperConfig("prefill", 64, 0)),
    (float("inf"), HopperConfig("prefill", 128, 0)),
)
_TILES_A_BLOCK = 8
"""Tiles that each multiprocessor needs at least, for tiles of 128 rows to share the work as evenly as those of 64."""


@dataclass(frozen=True, slots=True)
class Hopper:
    """Grouped products of 4-bit weights and bfloat16 rows. Capturable."""

    name: str = "hopper"
    layouts: tuple[str, ...] = ("hopper",)

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        """Every reason against it: the GPU, the driver, formats and options that its kernels do not cover."""
        device, spec, reasons = machine.device, problem.spec, Reasons()
        reasons.need(device.capability == (9, 0), "GPU", "SM90", device.arch)
        driver = machine.driver
        version = ".".join(map(str, driver)) if driver else "none"
        reasons.need(driver is None or driver >= (13, 0), "driver", "CUDA 13.0 or newer", version)
        reasons.need(problem.activations == "16bit", "activations", "16bit", problem.activations)
        for projection, encoding in spec.encodings.items():
            wanted = "mxfp4, nvfp4, int4_g32 or int4_g128"
            reasons.need(_format(encoding) is not None, f"{projection} weights", wanted, f"{encoding!r}")
        reasons.need(not problem.wide_scales, "E8M0 scales", "at most 2**25", "larger ones")
        reasons.need(spec.local_experts <= 1024, "experts on this rank", "at most 1024", spec.local_experts)
        reasons.need(not problem.batch_invariant, "batch-invariant results", "not asked for", "asked for")
        return reasons.verdict(Accepted(capturable=True))

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> HopperConfig:
        """By the mean number of rows that an expert with any rows gets."""
        spec = problem.spec
        hit = cost(problem, machine.device, tokens).active_experts
        mean = tokens * problem.top_k * spec.local_experts / spec.experts / max(hit, 1e-9)
        config = next(config for bound, config in _BY_ROWS if mean <= bound)
        if config.kernels == "decode":
            if not _decode_fits(config.rows, spec):
                return HopperConfig("prefill", 32, 0)
            least = min(spec.hidden, spec.intermediate * (len(spec.encodings) - 1))
            if config.rows == 8 and hit * least / 128 < _TILES_A_BLOCK * machine.device.sms:
                return HopperConfig("decode", 8, 64)
        return config

    def candidates(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
    ) -> Sequence[Config]:
        """All that fit, :meth:`configure`'s first."""
        if timed:
            return ()
        every = [HopperConfig("decode", rows, height) for rows in (8, 12, 16) for height in (64, 128)]
        every = [config for config in every if _decode_fits(config.rows, problem.spec)]
        every += [HopperConfig("prefill", rows, 0) for rows in (32, 64, 128)]
        return tuple(dict.fromkeys((self.configure(problem, machine, tokens), *every)))

    def compile(
        self, problem: Problem, packed: Packed, x_TH: Tensor, routing: Routing, config: Config, out_TH: Tensor
    ) -> None:
        """Nothing to compile: the kernels are."""

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        """Fitted to one H200: reading and products one after the other, at 0.88 and 0.5 of the device's rates for
        decode and at 0.77 and 0.66 for prefill, and the launches."""
        c = cost(problem, machine.device, tokens)
        if self.configure(problem, machine, tokens).kernels == "decode":
            return Prediction(c.memory_us / 0.88 + c.compute_us / 0.5 + 12, "cost model")
        return Prediction(c.memory_us / 0.77 + c.compute_us / 0.66 + 15, "cost model")

    def run(
        self, problem: Problem, packed: Packed, x_TH: Tensor, routing: Routing, config: Config, out_TH: Tensor
    ) -> None:
        """See :meth:`polymoe.backends.Backend.run`."""
        from polymoe.kernels.hopper import launch

        assert isinstance(config, HopperConfig)
        if not len(x_TH):
            return
        spec, t = problem.spec, packed.tensors
        gated = spec.gated
        first = "gate" if gated else "up"
        up = launch.Matrix(
            _require_format(spec.up), t["up.codes"], t["up.scales"],
            (2 if gated else 1) * spec.intermediate, spec.hidden,
            t.get(f"{first}_bias"), t.get("up_bias"), t.get(f"{first}.global_scale"), t.get("up.global_scale"),
        )  # fmt: skip
        down = launch.Matrix(
            _require_format(spec.down), t["down.codes"], t["down.scales"], spec.hidden, spec.intermediate,
            t.get("down_bias"), scale=t.get("down.global_scale"),
        )  # fmt: skip
        rows = launch.Rows(
            routing.topk_ids_TA, routing.topk_weights_TA.contiguous(), spec.first_expert, spec.local_experts,
            problem.weight_on == "input",
        )  # fmt: skip
        function = _function(problem.activation)
        x_TH = x_TH.to(torch.bfloat16).contiguous()
        if x_TH.data_ptr() % 16:  # a view into the midst of something: copies move 16 bytes at least
            x_TH = x_TH.clone()
        with torch.cuda.device_of(x_TH):
            if config.kernels == "decode":
                launch.decode(up, down, gated, function, x_TH, rows, out_TH, config.rows, config.height)
            else:
                launch.prefill(up, down, gated, function, x_TH, rows, out_TH, config.rows)


def _format(encoding: Encoding) -> str | None:
    """Which of the kernels' formats it is, or None."""
    granularity = encoding.granularity
    if not isinstance(granularity, PerGroup) or granularity.n != 1 or encoding.zero_points:
        return None
    key = encoding.element, encoding.scale_dtype or "", granularity.k
    return {
        ("e2m1", "e8m0", 32): "mxfp4",
        ("e2m1", "e4m3", 16): "nvfp4",
        ("int4", "bfloat16", 32): "int4_g32",
        ("int4", "bfloat16", 128): "int4_g128",
    }.get(key)


def _require_format(encoding: Encoding) -> str:
    found = _format(encoding)
    assert found is not None
    return found


def _decode_fits(rows: int, spec: ExpertsSpec) -> bool:
    """Whether both matrices have kernels for few rows that take so many."""
    from polymoe.kernels.hopper.launch import decode_fits

    sides = ((spec.up, spec.hidden), (spec.down, spec.intermediate))
    return all(decode_fits(_format(encoding) or "mxfp4", rows, columns) for encoding, columns in sides)


def _function(activation: Activation) -> launch.Function:
    from polymoe.kernels.hopper.launch import Function

    if isinstance(activation, SwiGLU):
        return Function(0, activation.alpha, activation.beta, activation.limit or 0.0)
    if isinstance(activation, GeGLU):
        return Function(2 if activation.approximate == "tanh" else 1)
    return Function(0)
