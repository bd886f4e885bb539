"""Triton: every format on every GPU since Ampere, from the natural layout, without a compiler or a binary wheel.

Four launches: dispatch with x into operand order, gate and up with the activation, down, combine. A fifth after gate
and up sums splits of K and rounds activations to E4M3, where these are asked for. Weights are decoded in registers, and
all products are made of 16-bit operands: they hold every E4M3 number, and Hopper's FP8 units add up too coarsely.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polymoe.activation_quantization import ACTIVATIONS, ActivationQuantization
from polymoe.activations import Activation, GeGLU, ReLU2, SwiGLU
from polymoe.backends.base import BackendBase, Prediction, Runner, RunnerBase
from polymoe.backends.config import Config
from polymoe.backends.features import ANY, SHARDS, Handled
from polymoe.backends.triton.tiles import (
    PLANES,
    Tile,
    TritonConfig,
    decodes_in_float32,
    heuristic,
    smaller,
    tuning_configs,
)
from polymoe.cost import cost
from polymoe.formats import Encoding, PerGroup, PerTensor
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.routing import Routing
from polymoe.shapes import ceil_div
from polymoe.verdict import Accepted, Reasons, Verdict

if TYPE_CHECKING:
    from polymoe.kernels.triton.dispatch import Dispatch
    from polymoe.kernels.triton.rows import Quantization

__all__ = ["Tile", "Triton", "TritonConfig"]

log = logging.getLogger("polymoe")


_HANDLES: Handled = {
    **SHARDS, "activation": (SwiGLU, GeGLU, ReLU2), "weight_on": ("output", "input"), "dtype": ("bf16", "fp16", "fp32"),
    "activations": tuple(ACTIVATIONS.values()), "scales": ANY, "spec.bias": ANY,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Triton(BackendBase):
    """Grouped GEMM with weights as the left operand. Capturable."""

    name: str = "triton"
    layouts: tuple[str, ...] = ("natural",)
    fitting: dict[tuple[Problem, Config], TritonConfig] = field(default_factory=dict, compare=False, repr=False)
    """What runs in place of configurations that a GPU refused, found at their first launch."""

    @property
    def handles(self) -> Handled:
        """What its kernels cover; some of it not together, see :meth:`check`."""
        return _HANDLES

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        """Every reason against it: the GPU, the package, and what its kernels do not cover."""
        device, spec, reasons = machine.device, problem.spec, Reasons()
        reasons.need(device.kind == "cuda" and device.sm >= 80, "GPU", "SM80 or newer", device.arch)
        version = machine.packages.get("triton", "")
        recent = bool(version) and tuple(int(v) for v in version.split(".")[:2]) >= (3, 6)
        reasons.need(recent, "triton", "3.6 or newer", version or "none")
        static_input = problem.activations.static and problem.weight_on == "input"
        reasons.need(not static_input, "routing weight on the input", "dynamic scales of activations", "fp8_static")
        if problem.activations.quantized:
            # Where a weight is rounded to the operand's 16 bits, E4M3 roundings of h no longer agree.
            for projection, encoding in spec.encodings.items():
                exact, expected = encoding.element != "int4", "an element that 16 bits hold exactly"
                reasons.need(exact, f"{projection} weights with FP8 activations", expected, encoding.element)
        if spec.gate is not None:
            both = ", ".join(f"{e.name} with scales {e.scale_dtype}" for e in (spec.gate, spec.up))
            reasons.need(spec.gate == spec.up, "gate and up", "one encoding", both)
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
        """The heuristic's tiles."""
        return heuristic(problem, machine, tokens)

    def tuning_configs(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
    ) -> Sequence[Config]:
        """See :func:`polymoe.backends.triton.tiles.tuning_configs`."""
        return tuning_configs(problem, machine, tokens, timed)

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        """Bytes of weights at 0.68 of the bandwidth where they are 4-bit, else 0.98; products at 0.7 of the 16-bit
        rate; rows between the products; 14 us of launches. All one after the other: within 9 % (root mean square) of
        the records of six cases on one H200 (``benchmarks/results/triton-h200.jsonl``)."""
        c, spec, device = cost(problem, machine.device, tokens), problem.spec, machine.device
        weights_us = c.memory_us / (0.68 if spec.up.bits == 4 else 0.98)
        products_us = 1e6 * c.flops / device.flops_16bit / 0.7
        rows = tokens * problem.top_k * spec.local_experts / spec.experts
        rows_us = 1e6 * rows * 4 * (spec.hidden + spec.intermediate) / device.bandwidth
        return Prediction(weights_us + products_us + rows_us + 14, "cost model")

    def compile(
        self, problem: Problem, packed: Packed, x_TH: Tensor, routing: Routing, config: Config, out_TH: Tensor
    ) -> None:
        """See :meth:`polymoe.backends.base.Backend.compile`."""
        from polymoe.kernels.triton.warm_up import compile_only

        with compile_only():
            self.bind(problem, packed).run(x_TH, routing, config, out_TH)

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        """Holds the arguments of every call."""
        return _TritonRunner(problem, packed, self.fitting)


@dataclass(frozen=True, slots=True)
class _TritonRunner(RunnerBase):
    problem: Problem
    packed: Packed
    fitting: dict[tuple[Problem, Config], TritonConfig]

    def run(self, x_TH: Tensor, routing: Routing, config: Config, out_TH: Tensor, **_: object) -> None:
        """See :meth:`polymoe.backends.base.Runner.run`. On a CPU (Triton's interpreter) operands are float32.

        Tiles are chosen by an estimate of what Triton needs; where a GPU has less, the next smaller ones run.
        """
        assert isinstance(config, TritonConfig)
        problem = self.problem
        if self.fitting:
            config = self.fitting.get((problem, config), config)
        wanted, refusal = config, None
        while True:
            try:
                self._run(x_TH, routing, config, out_TH)
                break
            except _DoesNotFit as error:
                refusal = error.cause
                less = smaller(config, error.projection, problem.spec.encodings[error.projection])
                if less is None:
                    raise refusal from None
                config = less
        if refusal is not None:
            log.warning("triton: %s do not fit this GPU (%s): from now on %s", wanted, refusal, config)
            self.fitting[problem, wanted] = config

    def _run(self, x_TH: Tensor, routing: Routing, config: TritonConfig, out_TH: Tensor) -> None:
        from polymoe.kernels.triton.dispatch import dispatch
        from polymoe.kernels.triton.rows import Operand, combine, hidden

        problem, packed = self.problem, self.packed
        spec, chained = problem.spec, config.chained
        tokens, slots = routing.topk_ids_TA.shape
        rows, device = tokens * slots, x_TH.device
        operand_up, operand_down = (_operand(e, x_TH, problem.activations) for e in (spec.up, spec.down))
        planes_up, planes_down = PLANES[spec.up.element], PLANES[spec.down.element]
        quantization = _quantization(problem, packed, "gate_up")
        quantized = quantization.mode != "none"
        static = quantization.mode == "static"

        x: Operand | None = None
        if quantized or planes_up > 1 or x_TH.dtype != operand_up or not x_TH.is_contiguous():
            x = Operand.empty(rows if static else tokens, spec.hidden, planes_up, operand_up, quantization, device)
        plan = dispatch(
            routing.topk_ids_TA, spec.first_expert, spec.local_experts, config.tokens, x_TH, x, quantization,
            chained=chained,
        )  # fmt: skip
        values, scales = (x_TH, x_TH) if x is None else (x.values, x.scales)

        launch = _Launch(problem, packed, plan, routing, config, quantization.mode)
        if quantized or config.up.splits > 1:
            # A launch of its own sums splits and quantizes. Rounded twice, E4M3 would differ from the reference more
            # often than once in a hundred: float32 until then.
            raw = config.up.splits > 1
            matrices = 2 if raw and spec.gated else 1
            parts = torch.empty(config.up.splits, matrices, rows, spec.intermediate, dtype=torch.float32, device=device)
            launch.product("up", values, scales, parts, config.up, slots=1 if static else slots, raw=raw)
            down_quantization = _quantization(problem, packed, "down")
            h = Operand.empty(rows, spec.intermediate, planes_down, operand_down, down_quantization, device)
            hidden(
                parts, h, down_quantization, _activation(problem.activation if raw else None), plan.order_R,
                routing.topk_ids_TA.contiguous(), spec.first_expert, spec.local_experts, chained=chained,
            )  # fmt: skip
            values, scales = h.values, h.scales
        else:
            h_RF = torch.empty(rows, spec.intermediate, dtype=operand_down, device=device)
            launch.product("up", values, scales, h_RF, config.up, slots=slots, out_planes=planes_down)
            values = scales = h_RF
        # Rows are summed over slots and splits: kept in float32 while they are few.
        exact = rows <= 4096 or operand_down == torch.float32
        y_type = torch.float32 if exact or config.down.splits > 1 else operand_down
        y_SRH = torch.empty(config.down.splits, rows, spec.hidden, dtype=y_type, device=device)
        launch.product("down", values, scales, y_SRH, config.down, slots=slots)
        combine(
            y_SRH, routing.topk_ids_TA, routing.topk_weights_TA, out_TH, spec.first_expert, spec.local_experts,
            weighted=problem.weight_on == "output", chained=chained,
        )  # fmt: skip


class _DoesNotFit(Exception):
    """The GPU refused a product's kernel."""

    def __init__(self, projection: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.projection, self.cause = projection, cause


_X_GROUP = 128


def _quantization(problem: Problem, packed: Packed, inputs: str) -> Quantization:
    """How the input of ``inputs`` ("gate_up" or "down") is rounded."""
    from polymoe.kernels.triton.rows import Quantization

    a = problem.activations
    mode = "none" if not a.quantized else "static" if a.static else "row" if a.group_columns is None else "block"
    return Quantization(mode, packed.tensors[f"{inputs}_input_scale"] if mode == "static" else None)


def _operand(encoding: Encoding, x: Tensor, activations: ActivationQuantization) -> torch.dtype:
    """Dtype of both MMA operands: float16 if weights and x are, or if weights fit it with E4M3 inputs."""
    if x.device.type == "cpu":
        return torch.float32
    if not activations.quantized:
        return torch.float16 if encoding.element == "fp16" and x.dtype == torch.float16 else torch.bfloat16
    return torch.float16 if encoding.element in ("fp16", "e4m3") else torch.bfloat16


@dataclass(frozen=True, slots=True)
class _Launch:
    """One call's products."""

    problem: Problem
    packed: Packed
    plan: Dispatch
    routing: Routing
    config: TritonConfig
    quantization: str

    def product(
        self, projection: str, x: Tensor, x_scales: Tensor, out: Tensor, tile: Tile, *, slots: int,
        out_planes: int = 1, raw: bool = False,
    ) -> None:  # fmt: skip
        """Gate and up with the activation (``projection`` "up"; without it if ``raw``), or down.

        Raises:
            _DoesNotFit: if the GPU has less shared memory (or whatever else a kernel takes) than the tile needs.
        """
        from triton.runtime.errors import OutOfResources

        try:
            self._launch(projection, x, x_scales, out, tile, slots, out_planes, raw)
        except OutOfResources as error:
            raise _DoesNotFit(projection, error) from error

    def _launch(
        self, projection: str, x: Tensor, x_scales: Tensor, out: Tensor, tile: Tile, slots: int, out_planes: int,
        raw: bool,
    ) -> None:  # fmt: skip
        import triton.language as tl

        from polymoe.kernels.triton.grouped_gemm import grouped_gemm
        from polymoe.kernels.triton.grouped_gemm_short_k import MOST_STEPS, sweep_gemm
        from polymoe.kernels.triton.rows import pdl

        problem, plan, config = self.problem, self.plan, self.config
        spec = problem.spec
        encoding = spec.encodings[projection]
        n_rows, columns = spec.matrix_shape(projection)
        gated = projection == "up" and spec.gated
        planes = PLANES[encoding.element]
        plain = x.device.type == "cpu" or decodes_in_float32(problem)
        up = _operands(self.packed, projection, planes, out)
        gate = _operands(self.packed, "gate", planes, out) if gated else up
        assert [t.stride() for t in gate] == [t.stride() for t in up]
        codes, scales, bias = up[0], up[1], up[4]
        scale_at, group_n, group_k = _scales(encoding, n_rows)
        scale_e, scale_n, scale_k = scales.stride() if scale_at != "none" else (0, 0, 0)
        x_scale = {"none": "none", "block": "block"}.get(self.quantization, "row")
        block_k = min(tile.columns, group_k) if scale_at == "block" else tile.columns
        block_k = min(block_k, _X_GROUP) if x_scale == "block" else block_k
        operand = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[x.dtype]
        shared = {
            "N": n_rows, "K": columns, **_decoding(encoding, operand, plain), "PLANES": planes, "OPERAND": operand,
            "PLAIN": plain, "SCALE_AT": scale_at, "GROUP_N": group_n, "GROUP_K": group_k,
            "SCALE_ALIGN": gcd(scale_e, scale_n, 16), "ZERO_POINTS": encoding.zero_points,
            "GLOBAL": encoding.global_scale, "BIAS": spec.bias, "X_SCALE": x_scale, "X_GROUP": _X_GROUP,
            "BLOCK_N": tile.rows, "BLOCK_T": config.tokens, "TAIL_T": config.tail, "BLOCK_K": block_k,
            "CHAINED": config.chained, "num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers,
            **pdl(config.chained),
        }  # fmt: skip
        tiles = (plan.order_R, plan.tile_expert, plan.tile_first, plan.tile_last)
        blocks = ceil_div(n_rows, tile.rows)
        kernel: Any
        if projection == "down" and tile.blocks > 1 and tile.splits == 1 and columns <= MOST_STEPS * block_k:
            kernel = sweep_gemm
            kernel[(plan.tiles * ceil_div(blocks, tile.blocks),)](
                x, x_scales, out, *up, *tiles, x_scales.shape[1], *codes.stride(), scale_e, scale_n, scale_k,
                bias.stride(0), BLOCKS=tile.blocks, **shared,
            )  # fmt: skip
            return
        kernel = grouped_gemm
        kernel[(plan.tiles * blocks * tile.splits,)](
            x, x_scales, out, *gate, *up, *tiles, self.routing.topk_weights_TA,
            slots, x_scales.shape[1], *codes.stride(), scale_e, scale_n, scale_k,
            bias.stride(0), out.stride(0) if out.dim() > 2 else 0, out.stride(1) if out.dim() == 4 else 0,
            GATED=gated, RAW=raw, **_activation(problem.activation if projection == "up" and not raw else None),
            WEIGHT_IN=projection == "up" and problem.weight_on == "input",
            GATHER=projection == "up", SCATTER=projection == "down", OUT_PLANES=out_planes, SPLIT_K=tile.splits,
            **shared,
        )  # fmt: skip


def _operands(packed: Packed, projection: str, planes: int, unused: Tensor) -> tuple[Tensor, ...]:
    """Codes as words, scales and zero points as bytes or floats, global scale and bias; ``unused`` where none."""
    parts = {name.split(".")[1]: t for name, t in packed.tensors.items() if name.startswith(projection + ".")}
    codes = parts["codes"] if planes == 1 else parts["codes"].view(torch.int16)
    scales = parts.get("scales", unused)
    if scales.dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn):
        scales = scales.view(torch.uint8)
    bias = packed.tensors.get(f"{projection}_bias", unused)
    return codes, scales, parts.get("zero_points", unused), parts.get("global_scale", unused), bias


def _scales(encoding: Encoding, rows: int) -> tuple[str, int, int]:
    """Where scales are applied, and how many rows and columns share one."""
    granularity = encoding.granularity
    if granularity is None:
        return "none", 1, 1
    if not isinstance(granularity, PerGroup):
        return "row", rows if isinstance(granularity, PerTensor) else 1, 1
    return "block" if encoding.element == "e4m3" else "loop", granularity.n, granularity.k


def _decoding(encoding: Encoding, operand: Any, plain: bool) -> dict[str, Any]:
    import triton.language as tl

    from polymoe.kernels.triton import decode

    factors = {"e8m0": decode.factor_e8m0, "e4m3": decode.factor_e4m3}
    function, shift = {
        "e2m1": (decode.decode_e2m1, decode.E2M1_SHIFT),
        "int4": (decode.decode_int4, 0),
        "e4m3": (decode.decode_e4m3_half, decode.E4M3_SHIFT) if operand is tl.float16 else (decode.decode_e4m3, 0),
    }.get(encoding.element, (decode.decode_16bit, 0))
    return {
        "DECODE": function,
        "FACTOR": factors.get(encoding.scale_dtype or "", decode.factor_float),
        "UNSHIFT": 0 if plain else shift,
    }


def _activation(activation: Activation | None) -> dict[str, Any]:
    """Name and constants as kernels take them; a limit of 0 is none."""
    name, constants = "none", (1.0, 0.0, 0.0)
    if isinstance(activation, SwiGLU):
        name, constants = "swiglu", (activation.alpha, activation.beta, activation.limit or 0.0)
    elif isinstance(activation, GeGLU):
        name = "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    elif activation is not None:
        name = "relu2"
    return {"ACTIVATION": name, **dict(zip(("ALPHA", "BETA", "LIMIT"), constants, strict=True))}
