"""Triton: every format on every GPU since Ampere, from the natural layout, without a compiler or a binary wheel.

Four launches: permute (which also converts x to operand order), gate and up with the activation, down, finalize. With
split-K or quantized activations, a fifth launch after gate and up adds up the parts and rounds to E4M3. Weights are
decoded in registers. All MMAs have 16-bit operands: 16 bits hold every E4M3 number, and Hopper's FP8 tensor cores
accumulate too coarsely.
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
    from polymoe.kernels.triton.permute import Permutation
    from polymoe.kernels.triton.quantize import Quantization

__all__ = ["Tile", "Triton", "TritonConfig"]

log = logging.getLogger("polymoe")


_HANDLES: Handled = {
    **SHARDS, "activation": (SwiGLU, GeGLU, ReLU2), "weight_on": ("output", "input"), "dtype": ("bf16", "fp16", "fp32"),
    "activations": tuple(ACTIVATIONS.values()), "scales": ANY, "spec.bias": ANY,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Triton(BackendBase):
    """Grouped GEMMs with A and B swapped: the weights are the left operand. Capturable."""

    name: str = "triton"
    layouts: tuple[str, ...] = ("natural",)
    fitting: dict[tuple[Problem, Config], TritonConfig] = field(default_factory=dict, compare=False, repr=False)
    """By configuration that the GPU refused at its first launch: the one that runs in its place."""

    @property
    def handles(self) -> Handled:
        """Values that the kernels cover. :meth:`check` rejects combinations that they do not."""
        return _HANDLES

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        """Collect every reason against it: the GPU, the triton package, and what the kernels do not cover."""
        device, spec, reasons = machine.device, problem.spec, Reasons()
        reasons.need(device.kind == "cuda" and device.sm >= 80, "GPU", "SM80 or newer", device.arch)
        version = machine.packages.get("triton", "")
        recent = bool(version) and tuple(int(v) for v in version.split(".")[:2]) >= (3, 6)
        reasons.need(recent, "triton", "3.6 or newer", version or "none")
        static_input = problem.activations.static and problem.weight_on == "input"
        reasons.need(not static_input, "routing weight on the input", "dynamic scales of activations", "fp8_static")
        if problem.activations.quantized:
            # If weights were rounded to 16 bits, the E4M3 rounding of h would differ from the reference.
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
        """Return the heuristic's tiles."""
        return heuristic(problem, machine, tokens)

    def tuning_configs(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
    ) -> Sequence[Config]:
        """See :func:`polymoe.backends.triton.tiles.tuning_configs`."""
        return tuning_configs(problem, machine, tokens, timed)

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        """Return the sum of four times.

        Weights are read at 0.68 of the bandwidth if they are 4-bit, else at 0.98. MMAs run at 0.7 of the 16-bit rate.
        Rows between the GEMMs are written and read. Launches take 14 us. The root mean square error is 9 % over the
        records of six cases on one H200 (``benchmarks/results/triton-h200.jsonl``).
        """
        c, spec, device = cost(problem, machine.device, tokens), problem.spec, machine.device
        weights_us = c.memory_us / (0.68 if spec.up.bits == 4 else 0.98)
        flops_us = 1e6 * c.flops / device.flops_16bit / 0.7
        rows = tokens * problem.top_k * spec.local_experts / spec.experts
        rows_us = 1e6 * rows * 4 * (spec.hidden + spec.intermediate) / device.bandwidth
        return Prediction(weights_us + flops_us + rows_us + 14, "cost model")

    def compile(
        self, problem: Problem, packed: Packed, x_TH: Tensor, routing: Routing, config: Config, out_TH: Tensor
    ) -> None:
        """See :meth:`polymoe.backends.base.Backend.compile`."""
        from polymoe.kernels.triton.compile_only import compile_only

        with compile_only():
            self.bind(problem, packed).run(x_TH, routing, config, out_TH)

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        """Return a runner for one packed layer."""
        return _TritonRunner(problem, packed, self.fitting)


@dataclass(frozen=True, slots=True)
class _TritonRunner(RunnerBase):
    problem: Problem
    packed: Packed
    fitting: dict[tuple[Problem, Config], TritonConfig]

    def run(self, x_TH: Tensor, routing: Routing, config: Config, out_TH: Tensor, **_: object) -> None:
        """See :meth:`polymoe.backends.base.Runner.run`. On a CPU (Triton's interpreter) operands are float32.

        Tiles are chosen by an estimate of the shared memory that Triton needs. If the GPU refuses one, the next smaller
        tile runs.
        """
        assert isinstance(config, TritonConfig)
        problem = self.problem
        if self.fitting:
            config = self.fitting.get((problem, config), config)
        asked, refusal = config, None
        while True:
            try:
                self._run(x_TH, routing, config, out_TH)
                break
            except _DoesNotFit as error:
                refusal = error.cause
                next_config = smaller(config, error.projection, problem.spec.encodings[error.projection])
                if next_config is None:
                    raise refusal from None
                config = next_config
        if refusal is not None:
            log.warning("triton: %s do not fit this GPU (%s): from now on %s", asked, refusal, config)
            self.fitting[problem, asked] = config

    def _run(self, x_TH: Tensor, routing: Routing, config: TritonConfig, out_TH: Tensor) -> None:
        from polymoe.kernels.triton.finalize import finalize
        from polymoe.kernels.triton.permute import permute
        from polymoe.kernels.triton.quantize import Operand, activate_and_quantize

        problem, packed = self.problem, self.packed
        spec, pdl = problem.spec, config.pdl
        tokens, top_k = routing.topk_ids_TA.shape
        rows, device = tokens * top_k, x_TH.device
        operand_up, operand_down = (_operand(e, x_TH, problem.activations) for e in (spec.up, spec.down))
        planes_up, planes_down = PLANES[spec.up.element], PLANES[spec.down.element]
        quantization = _quantization(problem, packed, "gate_up")
        quantized = quantization.mode != "none"
        static = quantization.mode == "static"

        x: Operand | None = None
        if quantized or planes_up > 1 or x_TH.dtype != operand_up or not x_TH.is_contiguous():
            x = Operand.empty(rows if static else tokens, spec.hidden, planes_up, operand_up, quantization, device)
        permutation = permute(
            routing.topk_ids_TA, spec.first_expert, spec.local_experts, config.block_m, x_TH, x, quantization,
            pdl=pdl,
        )  # fmt: skip
        values, scales = (x_TH, x_TH) if x is None else (x.values, x.scales)

        launch = _Launch(problem, packed, permutation, routing, config, quantization.mode)
        if quantized or config.up.split_k > 1:
            # A separate launch adds up the parts and quantizes. They stay float32 until then: rounded twice, more than
            # one in a hundred E4M3 values would differ from the reference.
            raw = config.up.split_k > 1
            matrices = 2 if raw and spec.gated else 1
            shape = config.up.split_k, matrices, rows, spec.intermediate
            parts = torch.empty(shape, dtype=torch.float32, device=device)
            launch.gemm("up", values, scales, parts, config.up, top_k=1 if static else top_k, raw=raw)
            down_quantization = _quantization(problem, packed, "down")
            h = Operand.empty(rows, spec.intermediate, planes_down, operand_down, down_quantization, device)
            activate_and_quantize(
                parts, h, down_quantization, _activation(problem.activation if raw else None),
                permutation.permuted_to_expanded_R, routing.topk_ids_TA.contiguous(),
                spec.first_expert, spec.local_experts, pdl=pdl,
            )  # fmt: skip
            values, scales = h.values, h.scales
        else:
            h_RF = torch.empty(rows, spec.intermediate, dtype=operand_down, device=device)
            launch.gemm("up", values, scales, h_RF, config.up, top_k=top_k, out_planes=planes_down)
            values = scales = h_RF
        # Finalize adds rows over choices and split-K parts. They stay float32 while they are few.
        exact = rows <= 4096 or operand_down == torch.float32
        y_type = torch.float32 if exact or config.down.split_k > 1 else operand_down
        y_SRH = torch.empty(config.down.split_k, rows, spec.hidden, dtype=y_type, device=device)
        launch.gemm("down", values, scales, y_SRH, config.down, top_k=top_k)
        finalize(
            y_SRH, routing.topk_ids_TA, routing.topk_weights_TA, out_TH, spec.first_expert, spec.local_experts,
            weighted=problem.weight_on == "output", pdl=pdl,
        )  # fmt: skip


class _DoesNotFit(Exception):
    """The GPU refused the kernel of a GEMM."""

    def __init__(self, projection: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.projection, self.cause = projection, cause


_X_GROUP = 128


def _quantization(problem: Problem, packed: Packed, inputs: str) -> Quantization:
    """Return how the input of the projection ``inputs`` ("gate_up" or "down") is rounded."""
    from polymoe.kernels.triton.quantize import Quantization

    a = problem.activations
    mode = "none" if not a.quantized else "static" if a.static else "row" if a.group_columns is None else "block"
    return Quantization(mode, packed.tensors[f"{inputs}_input_scale"] if mode == "static" else None)


def _operand(encoding: Encoding, x: Tensor, activations: ActivationQuantization) -> torch.dtype:
    """Return the dtype of both MMA operands.

    float16 if weights and x are float16, or if x is E4M3 and float16 holds the weights; otherwise bfloat16.
    """
    if x.device.type == "cpu":
        return torch.float32
    if not activations.quantized:
        return torch.float16 if encoding.element == "fp16" and x.dtype == torch.float16 else torch.bfloat16
    return torch.float16 if encoding.element in ("fp16", "e4m3") else torch.bfloat16


@dataclass(frozen=True, slots=True)
class _Launch:
    """The GEMMs of one call."""

    problem: Problem
    packed: Packed
    permutation: Permutation
    routing: Routing
    config: TritonConfig
    quantization: str

    def gemm(
        self, projection: str, x: Tensor, x_scales: Tensor, out: Tensor, tile: Tile, *, top_k: int,
        out_planes: int = 1, raw: bool = False,
    ) -> None:  # fmt: skip
        """Launch gate and up with the activation (``projection`` "up"; without it if ``raw``), or down.

        Raises:
            _DoesNotFit: if the tile needs more shared memory, or another resource, than the GPU has.
        """
        from triton.runtime.errors import OutOfResources

        try:
            self._launch(projection, x, x_scales, out, tile, top_k, out_planes, raw)
        except OutOfResources as error:
            raise _DoesNotFit(projection, error) from error

    def _launch(
        self, projection: str, x: Tensor, x_scales: Tensor, out: Tensor, tile: Tile, top_k: int, out_planes: int,
        raw: bool,
    ) -> None:  # fmt: skip
        import triton.language as tl

        from polymoe.kernels.triton.activation import pdl_options
        from polymoe.kernels.triton.grouped_gemm import grouped_gemm
        from polymoe.kernels.triton.grouped_gemm_short_k import MAX_STEPS, grouped_gemm_short_k

        problem, permutation, config = self.problem, self.permutation, self.config
        spec = problem.spec
        encoding = spec.encodings[projection]
        n, k = spec.matrix_shape(projection)
        gated = projection == "up" and spec.gated
        planes = PLANES[encoding.element]
        plain = x.device.type == "cpu" or decodes_in_float32(problem)
        up = _operands(self.packed, projection, planes, out)
        gate = _operands(self.packed, "gate", planes, out) if gated else up
        assert [t.stride() for t in gate] == [t.stride() for t in up]
        codes, scales, bias = up[0], up[1], up[4]
        scale_at, group_n, group_k = _scales(encoding, n)
        scale_e, scale_n, scale_k = scales.stride() if scale_at != "none" else (0, 0, 0)
        x_scale = {"none": "none", "block": "block"}.get(self.quantization, "row")
        block_k = min(tile.block_k, group_k) if scale_at == "block" else tile.block_k
        block_k = min(block_k, _X_GROUP) if x_scale == "block" else block_k
        operand = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[x.dtype]
        shared = {
            "N": n, "K": k, **_decoding(encoding, operand, plain), "PLANES": planes, "OPERAND": operand,
            "PLAIN": plain, "SCALE_AT": scale_at, "GROUP_N": group_n, "GROUP_K": group_k,
            "SCALE_ALIGN": gcd(scale_e, scale_n, 16), "ZERO_POINTS": encoding.zero_points,
            "GLOBAL": encoding.global_scale, "BIAS": spec.bias, "X_SCALE": x_scale, "X_GROUP": _X_GROUP,
            "BLOCK_N": tile.block_n, "BLOCK_M": config.block_m, "TAIL_BLOCK_M": config.tail_block_m, "BLOCK_K": block_k,
            "PDL": config.pdl, "num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": tile.maxnreg,
            **pdl_options(config.pdl),
        }  # fmt: skip
        expanded = permutation.permuted_to_expanded_R
        work_tiles = (expanded, permutation.tile_expert, permutation.tile_first, permutation.tile_last)
        n_blocks = ceil_div(n, tile.block_n)
        kernel: Any
        if projection == "down" and tile.n_blocks_per_cta > 1 and tile.split_k == 1 and k <= MAX_STEPS * block_k:
            kernel = grouped_gemm_short_k
            kernel[(permutation.num_tiles * ceil_div(n_blocks, tile.n_blocks_per_cta),)](
                x, x_scales, out, *up, *work_tiles, x_scales.shape[1], *codes.stride(), scale_e, scale_n, scale_k,
                bias.stride(0), N_BLOCKS_PER_CTA=tile.n_blocks_per_cta, **shared,
            )  # fmt: skip
            return
        kernel = grouped_gemm
        kernel[(permutation.num_tiles * n_blocks * tile.split_k,)](
            x, x_scales, out, *gate, *up, *work_tiles, self.routing.topk_weights_TA,
            top_k, x_scales.shape[1], *codes.stride(), scale_e, scale_n, scale_k,
            bias.stride(0), out.stride(0) if out.dim() > 2 else 0, out.stride(1) if out.dim() == 4 else 0,
            GATED=gated, RAW=raw, **_activation(problem.activation if projection == "up" and not raw else None),
            ROUTER_WEIGHT_ON_INPUT=projection == "up" and problem.weight_on == "input",
            GATHER=projection == "up", SCATTER=projection == "down", OUT_PLANES=out_planes, SPLIT_K=tile.split_k,
            **shared,
        )  # fmt: skip


def _operands(packed: Packed, projection: str, planes: int, unused: Tensor) -> tuple[Tensor, ...]:
    """Return codes as words, scales and zero points as bytes or floats, global scale and bias; ``unused`` for none."""
    parts = {name.split(".")[1]: t for name, t in packed.tensors.items() if name.startswith(projection + ".")}
    codes = parts["codes"] if planes == 1 else parts["codes"].view(torch.int16)
    scales = parts.get("scales", unused)
    if scales.dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn):
        scales = scales.view(torch.uint8)
    bias = packed.tensors.get(f"{projection}_bias", unused)
    return codes, scales, parts.get("zero_points", unused), parts.get("global_scale", unused), bias


def _scales(encoding: Encoding, rows: int) -> tuple[str, int, int]:
    """Return where scales are applied, and how many rows and columns share one."""
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
    """Return name and constants as constexpr arguments; a limit of 0 means none."""
    name, constants = "none", (1.0, 0.0, 0.0)
    if isinstance(activation, SwiGLU):
        name, constants = "swiglu", (activation.alpha, activation.beta, activation.limit or 0.0)
    elif isinstance(activation, GeGLU):
        name = "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    elif activation is not None:
        name = "relu2"
    return {"ACTIVATION": name, **dict(zip(("ALPHA", "BETA", "LIMIT"), constants, strict=True))}
