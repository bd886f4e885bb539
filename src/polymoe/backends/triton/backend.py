"""Triton kernels for every format on every GPU since Ampere, from the natural layout, compiled at first use.

There are four launches: permute (which also converts x to operand order), gate and up with the activation, down, and
finalize. With split-K or quantized activations, a fifth launch after gate and up adds partial sums and rounds to E4M3.
Weights are decoded in registers. MMAs have 16-bit operands: 16 bits represent every E4M3 number exactly, and Hopper's
FP8 tensor cores accumulate too coarsely. No 16-bit operand represents an INT4 weight exactly: with
E4M3 activations each weight is the sum of two operands. On SM120, activations with power-of-two scales use block-scaled
E4M3 MMAs where experts have many rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from polymoe.backends.base import BackendBase, Prediction, Runner
from polymoe.backends.config import Config
from polymoe.backends.cost import cost
from polymoe.backends.features import ANY, SHARDS, Handled
from polymoe.backends.packages import at_least
from polymoe.backends.triton.config import TritonConfig
from polymoe.backends.triton.tiles import PLANES, heuristic, in_two_operands, tuning_configs
from polymoe.formats import PerGroup
from polymoe.layouts import Packed
from polymoe.layouts.base import need_one_encoding
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import ACTIVATIONS
from polymoe.problem.activations import GeGLU, ReLU2, SwiGLU
from polymoe.problem.verdict import Accepted, Reasons, Verdict

if TYPE_CHECKING:
    from polymoe.problem.call import CallArguments

log = logging.getLogger("polymoe")


_HANDLES: Handled = {
    **SHARDS,
    "activation": (SwiGLU, GeGLU, ReLU2),
    "weight_on": ("output", "input"),
    "dtype": ("bf16", "fp16", "fp32"),
    "activations": tuple(m for m in ACTIVATIONS.values() if m.element != "e2m1" and not m.fast_accumulation),
    "scales": ANY,
    "spec.bias": ANY,
}


@dataclass(frozen=True, slots=True)
class Triton(BackendBase):
    """Grouped GEMMs with A and B swapped: weights are the left operand. Calls can be captured in CUDA graphs."""

    name: str = "triton"
    layouts: tuple[str, ...] = ("natural",)
    handles = _HANDLES
    """:meth:`check` rejects some combinations."""
    compiler: ClassVar[str | None] = "triton"
    fitting: dict[tuple[Problem, Config], TritonConfig] = field(default_factory=dict, compare=False, repr=False)
    """By configuration that the GPU refused at its first launch: the one that runs in its place."""

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        """Collect every reason against it: the GPU, the triton package, and what the kernels do not cover."""
        device, spec, reasons = machine.device, problem.spec, Reasons()
        reasons.need(device.kind == "cuda" and device.sm >= 80, "GPU", "SM80 or newer", device.arch)
        version = machine.packages.get("triton", "")
        reasons.need(at_least(version, "3.6"), "triton", "3.6 or newer", version or "none")
        static_input = problem.activations.static and problem.weight_on == "input"
        reasons.need(not static_input, "routing weight on the input", "dynamic scales of activations", "fp8_static")
        if problem.activations.scale_dtype == "e8m0":  # x times the weight may round to another power of two
            expected = "scales of activations that are no powers of two"
            on_input = problem.weight_on == "input"
            reasons.need(not on_input, "routing weight on the input", expected, problem.activations)
            for projection, encoding in spec.encodings.items():
                what, exact = f"{projection} weights with {problem.activations}", encoding.element != "fp16"
                reasons.need(exact, what, "an element that bfloat16 holds exactly", encoding.element)
        need_one_encoding(reasons, spec)
        for projection, encoding in spec.encodings.items():
            columns, planes = spec.matrix_shape(projection)[1], PLANES[encoding.element]
            reasons.need(columns % planes == 0, f"{projection} columns", f"a multiple of {planes}", columns)
            granularity, group = encoding.granularity, encoding.group_columns
            if isinstance(granularity, PerGroup):
                fits = group % 16 == 0 and group & (group - 1) == 0
                reasons.need(fits, f"{projection} scale groups", "a power of two of at least 16 columns", group)
            elif encoding.zero_points:
                reasons.need(False, f"{projection} zero points", "scales by group", str(granularity))
        return reasons.verdict(Accepted(capturable=True))

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> TritonConfig:
        return heuristic(problem, machine, tokens)

    def tuning_configs(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
    ) -> Sequence[Config]:
        return tuning_configs(problem, machine, tokens, timed)

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        """Return the sum of four times.

        Weights are read at 0.64 of the bandwidth if they are 4-bit, else at 0.92. MMAs run at 0.7 of the 16-bit rate;
        for block-scaled ones 0.7 of the FP8 rate is assumed. Rows between the GEMMs are written and read. Launches take
        14 us. The root mean square error is 9 % over the records of six cases on one H200
        (``benchmarks/results/triton-h200.jsonl``). INT4 with E4M3 activations has twice as many MMAs and takes 1.7
        times the sum, which is within 45 % of its records.
        """
        c, spec, device = cost(problem, machine.device, tokens), problem.spec, machine.device
        weights_us = c.memory_us / (0.64 if spec.up.bits == 4 else 0.92)
        block_scaled = self.configure(problem, machine, tokens).block_scaled
        flops_us = 1e6 * c.flops / ((block_scaled and device.flops_fp8) or device.flops_16bit) / 0.7
        two_operands = problem.activations.quantized and in_two_operands(spec.up)
        rows = tokens * problem.top_k * spec.local_experts / spec.experts
        rows_us = 1e6 * rows * 4 * (spec.hidden + spec.intermediate) / device.bandwidth
        if two_operands:
            return Prediction(1.7 * (weights_us + 2 * flops_us + rows_us + 14), "cost model")
        return Prediction(weights_us + flops_us + rows_us + 14, "cost model")

    def compile(self, problem: Problem, packed: Packed, call: CallArguments, config: Config) -> None:
        from polymoe.kernels.triton.compile_only import compile_only

        with compile_only():
            self.bind(problem, packed).run(call, config)

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        from polymoe.backends.triton.runner import TritonRunner

        return TritonRunner(problem, packed, self.fitting)
