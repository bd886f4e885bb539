"""TritonRunner: the calls of one layer on the Triton kernels."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from polymoe.activation_quantization import ActivationQuantization
from polymoe.activations import Activation, GeGLU, SwiGLU
from polymoe.backends.base import RunnerBase, mapped_ids
from polymoe.backends.config import Config
from polymoe.backends.triton.config import Tile, TritonConfig
from polymoe.backends.triton.tiles import PLANES, decodes_in_float32, smaller
from polymoe.formats import Encoding, PerGroup, PerTensor
from polymoe.kernels.triton import decode
from polymoe.kernels.triton.activation import pdl_options
from polymoe.kernels.triton.finalize import finalize
from polymoe.kernels.triton.grouped_gemm import OutOfResources, grouped_gemm
from polymoe.kernels.triton.grouped_gemm_short_k import MAX_STEPS, grouped_gemm_short_k
from polymoe.kernels.triton.permute import Permutation, permute
from polymoe.kernels.triton.quantize import OPERANDS, UNQUANTIZED, Operand, Quantization, activate_and_quantize
from polymoe.layouts import Packed
from polymoe.problem import Problem
from polymoe.routing import Routing
from polymoe.shapes import ceil_div

__all__ = ["TritonRunner"]

log = logging.getLogger("polymoe")

_X_GROUP = 128


class TritonRunner(RunnerBase):
    """Holds the packed tensors as kernels take them, and the constants of each configuration's launches."""

    def __init__(self, problem: Problem, packed: Packed, fitting: dict[tuple[Problem, Config], TritonConfig]) -> None:
        self.problem, self.fitting = problem, fitting
        spec, device = problem.spec, packed.tensors["up.codes"].device
        self.device = device
        self.up = _Matrix.of(problem, packed, "up")
        self.gate = _Matrix.of(problem, packed, "gate") if spec.gated else self.up
        self.down = _Matrix.of(problem, packed, "down")
        assert self.gate.strides == self.up.strides
        self.activation, self.no_activation = _activation(problem.activation), _activation(None)
        mode = _mode(problem.activations)
        scales = [packed.tensors[f"{p}_input_scale"] if mode == "static" else None for p in ("gate_up", "down")]
        self.x_quantization, self.h_quantization = (Quantization(mode, static_E) for static_E in scales)
        self.launches: dict[tuple[int, str, torch.dtype], tuple[TritonConfig, dict[str, Any]]] = {}

    @property
    def options(self) -> frozenset[str]:
        """``x_scales`` where x is quantized as it comes."""
        dynamic = self.problem.activations.quantized and not self.problem.activations.static
        return frozenset(("expert_map", "x_scales") if dynamic else ("expert_map",))

    def run(
        self, x_TH: Tensor, routing: Routing, config: Config, out_TH: Tensor, *, workspace: Tensor | None = None,
        x_scales: Tensor | None = None, expert_map: Tensor | None = None,
    ) -> None:  # fmt: skip
        """See :meth:`polymoe.backends.base.Runner.run`. On a CPU (Triton's interpreter) operands are float32.

        Tiles are chosen by an estimate of the shared memory that Triton needs. If the GPU refuses one, the next smaller
        tile runs.
        """
        assert isinstance(config, TritonConfig)
        first_expert = self.problem.spec.first_expert
        if expert_map is not None:
            routing, first_expert = Routing(mapped_ids(routing.topk_ids_TA, expert_map), routing.topk_weights_TA), 0
        if self.fitting:
            config = self.fitting.get((self.problem, config), config)
        wanted, refusal = config, None
        while True:
            try:
                self._run(x_TH, x_scales, routing, first_expert, config, out_TH)
                break
            except _DoesNotFit as error:
                refusal = error.cause
                less = smaller(config, error.projection, self.problem.spec.encodings[error.projection])
                if less is None:
                    raise refusal from None
                config = less
        if refusal is not None:
            log.warning("triton: %s do not fit this GPU (%s): from now on %s", wanted, refusal, config)
            self.fitting[self.problem, wanted] = config

    def _run(
        self, x_TH: Tensor, x_scales: Tensor | None, routing: Routing, first_expert: int, config: TritonConfig,
        out_TH: Tensor,
    ) -> None:  # fmt: skip
        spec, pdl, device = self.problem.spec, config.pdl, self.device
        ids_TA, weights_TA = routing.topk_ids_TA, routing.topk_weights_TA.contiguous()  # the GEMM reads weights flat
        tokens, top_k = ids_TA.shape
        rows, experts = tokens * top_k, spec.local_experts
        operand_up, operand_down = (_operand(e, x_TH, self.problem.activations) for e in (spec.up, spec.down))
        x_quantization = self.x_quantization
        if x_scales is not None:  # E4M3 numbers are exact in 16 bits
            x_TH, x_quantization = x_TH.to(operand_up), UNQUANTIZED
        static = x_quantization.mode == "static"
        quantized = self.h_quantization.mode != "none"

        x: Operand | None = None
        planes = self.up.planes
        rounded = x_quantization.mode != "none"
        if rounded or planes > 1 or x_TH.dtype != operand_up or not x_TH.is_contiguous():
            x_rows = rows if static else tokens
            x = Operand.empty(x_rows, spec.hidden, planes, operand_up, x_quantization, device)
        permutation = permute(ids_TA, first_expert, experts, config.block_m, x_TH, x, x_quantization, pdl=pdl)
        values, scales = (x_TH, x_TH) if x is None else (x.values, x.scales)
        if x_scales is not None:
            scales = x_scales

        if quantized or config.up.split_k > 1:
            # A separate launch adds up the parts and quantizes. They stay float32 until then: rounded twice, more than
            # one in a hundred E4M3 values would differ from the reference.
            raw = config.up.split_k > 1
            matrices = 2 if raw and spec.gated else 1
            shape = config.up.split_k, matrices, rows, spec.intermediate
            parts = torch.empty(shape, dtype=torch.float32, device=device)
            self._gemm("up", values, scales, parts, weights_TA, permutation, config, 1 if static else top_k, raw=raw)
            h = Operand.empty(rows, spec.intermediate, self.down.planes, operand_down, self.h_quantization, device)
            activate_and_quantize(
                parts, h, self.h_quantization, self.activation if raw else self.no_activation,
                permutation.permuted_to_expanded_R, ids_TA.contiguous(), first_expert, experts, pdl=pdl,
            )  # fmt: skip
            values, scales = h.values, h.scales
        else:
            h_RF = torch.empty(rows, spec.intermediate, dtype=operand_down, device=device)
            self._gemm("up", values, scales, h_RF, weights_TA, permutation, config, top_k, out_planes=self.down.planes)
            values = scales = h_RF
        # Finalize adds rows over choices and split-K parts. They stay float32 while they are few.
        exact = rows <= 4096 or operand_down == torch.float32
        y_type = torch.float32 if exact or config.down.split_k > 1 else operand_down
        y_SRH = torch.empty(config.down.split_k, rows, spec.hidden, dtype=y_type, device=device)
        self._gemm("down", values, scales, y_SRH, weights_TA, permutation, config, top_k)
        finalize(
            y_SRH, ids_TA, weights_TA, out_TH, first_expert, experts,
            weighted=self.problem.weight_on == "output", pdl=pdl,
        )  # fmt: skip

    def _gemm(
        self, projection: str, x: Tensor, x_scales: Tensor, out: Tensor, weights_TA: Tensor, permutation: Permutation,
        config: TritonConfig, top_k: int, *, out_planes: int = 1, raw: bool = False,
    ) -> None:  # fmt: skip
        """Gate and up with the activation (``projection`` "up"; without it if ``raw``), or down.

        Raises:
            _DoesNotFit: if the GPU has less shared memory, or less of something else, than the tile needs.
        """
        tile: Tile = config.up if projection == "up" else config.down
        matrix = self.up if projection == "up" else self.down
        key = (id(config), projection, x.dtype)  # a configuration is held beside its constants: its id stays its own
        found = self.launches.get(key)
        if found is None:
            found = self.launches[key] = config, self._constants(projection, matrix, tile, config, x)
        constants = found[1]
        p = permutation
        tiles = (p.permuted_to_expanded_R, p.tile_expert, p.tile_first, p.tile_last)
        blocks = ceil_div(matrix.n, tile.block_n)
        kernel: Any
        try:
            if projection == "down" and tile.n_blocks_per_cta > 1 and tile.split_k == 1 and (
                matrix.k <= MAX_STEPS * constants["BLOCK_K"]
            ):  # fmt: skip
                kernel = grouped_gemm_short_k
                kernel[(p.num_tiles * ceil_div(blocks, tile.n_blocks_per_cta),)](
                    x, x_scales, out, *matrix.tensors, *tiles, x_scales.shape[1], *matrix.strides,
                    N_BLOCKS_PER_CTA=tile.n_blocks_per_cta, **constants,
                )  # fmt: skip
                return
            up = projection == "up"
            kernel = grouped_gemm
            kernel[(p.num_tiles * blocks * tile.split_k,)](
                x, x_scales, out, *(self.gate if up else matrix).tensors, *matrix.tensors, *tiles, weights_TA,
                top_k, x_scales.shape[1], *matrix.strides,
                out.stride(0) if out.dim() > 2 else 0, out.stride(1) if out.dim() == 4 else 0,
                GATED=up and self.problem.spec.gated, RAW=raw,
                **(self.activation if up and not raw else self.no_activation),
                ROUTER_WEIGHT_ON_INPUT=up and self.problem.weight_on == "input",
                GATHER=up, SCATTER=not up, OUT_PLANES=out_planes, SPLIT_K=tile.split_k, **constants,
            )  # fmt: skip
        except OutOfResources as error:
            raise _DoesNotFit(projection, error) from error

    def _constants(
        self, projection: str, matrix: _Matrix, tile: Tile, config: TritonConfig, x: Tensor
    ) -> dict[str, Any]:
        """Constants and options of one GEMM's launches with x in this dtype."""
        problem, encoding = self.problem, matrix.encoding
        in_float32 = x.device.type == "cpu" or decodes_in_float32(problem)
        scale_at, group_n, group_k = _scales(encoding, matrix.n)
        x_scale = {"none": "none", "block": "block"}.get(self.h_quantization.mode, "row")
        block_k = min(tile.block_k, group_k) if scale_at == "block" else tile.block_k
        block_k = min(block_k, _X_GROUP) if x_scale == "block" else block_k
        return {
            "N": matrix.n, "K": matrix.k, **_decoding(encoding, x.dtype, in_float32), "PLANES": matrix.planes,
            "OPERAND": OPERANDS[x.dtype], "PLAIN": in_float32,
            "SCALE_AT": scale_at, "GROUP_N": group_n, "GROUP_K": group_k,
            "SCALE_ALIGN": matrix.scale_align, "ZERO_POINTS": encoding.zero_points, "GLOBAL": encoding.global_scale,
            "BIAS": problem.spec.bias, "X_SCALE": x_scale, "X_GROUP": _X_GROUP, "BLOCK_N": tile.block_n,
            "BLOCK_M": config.block_m, "TAIL_BLOCK_M": config.tail_block_m, "BLOCK_K": block_k, "PDL": config.pdl,
            "num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": tile.maxnreg,
            **pdl_options(config.pdl),
        }  # fmt: skip


class _DoesNotFit(Exception):
    """The GPU refused the kernel of a GEMM."""

    def __init__(self, projection: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.projection, self.cause = projection, cause


@dataclass(frozen=True, slots=True, eq=False)
class _Matrix:
    """One projection of all experts, as kernels take it.

    Attributes:
        encoding: of the weights.
        n, k: rows and columns of one expert's matrix.
        tensors: codes as words, scales and zero points as bytes or floats, global scale and bias; where there is none,
            the codes, which are then not read.
        strides: of codes by expert, row and word, of scales by expert, row and group, of the bias by expert.
    """

    encoding: Encoding
    n: int
    k: int
    tensors: tuple[Tensor, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem, packed: Packed, projection: str) -> _Matrix:
        encoding = problem.spec.encodings[projection]
        parts = {name.split(".")[1]: t for name, t in packed.tensors.items() if name.startswith(projection + ".")}
        codes = parts["codes"] if PLANES[encoding.element] == 1 else parts["codes"].view(torch.int16)
        scales = parts.get("scales", codes)
        if scales.dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn):
            scales = scales.view(torch.uint8)
        bias = packed.tensors.get(f"{projection}_bias", codes)
        scale_strides = scales.stride() if encoding.granularity is not None else (0, 0, 0)
        return cls(
            encoding,
            *problem.spec.matrix_shape(projection),
            (codes, scales, parts.get("zero_points", codes), parts.get("global_scale", codes), bias),
            (*codes.stride(), *scale_strides, bias.stride(0)),
        )

    @property
    def planes(self) -> int:
        """Columns that one word of codes holds."""
        return PLANES[self.encoding.element]

    @property
    def scale_align(self) -> int:
        """A power of two up to 16 that divides the offsets of rows of scales."""
        return gcd(self.strides[3], self.strides[4], 16)


def _mode(activations: ActivationQuantization) -> str:
    """How the kernels round inputs."""
    if not activations.quantized:
        return "none"
    return "static" if activations.static else "row" if activations.group_columns is None else "block"


def _operand(encoding: Encoding, x: Tensor, activations: ActivationQuantization) -> torch.dtype:
    """Return the dtype of both MMA operands.

    float16 if weights and x are float16, or if x is E4M3 and float16 holds the weights; otherwise bfloat16.
    """
    if x.device.type == "cpu":
        return torch.float32
    if not activations.quantized:
        return torch.float16 if encoding.element == "fp16" and x.dtype == torch.float16 else torch.bfloat16
    return torch.float16 if encoding.element in ("fp16", "e4m3") else torch.bfloat16


def _scales(encoding: Encoding, rows: int) -> tuple[str, int, int]:
    """Where scales are applied, and how many rows and columns share one."""
    granularity = encoding.granularity
    if granularity is None:
        return "none", 1, 1
    if not isinstance(granularity, PerGroup):
        return "row", rows if isinstance(granularity, PerTensor) else 1, 1
    return "block" if encoding.element == "e4m3" else "loop", granularity.n, granularity.k


def _decoding(encoding: Encoding, operand: torch.dtype, in_float32: bool) -> dict[str, Any]:
    """The device functions that decode codes and scales, and the power of two that the accumulator gets back."""
    factors = {"e8m0": decode.factor_e8m0, "e4m3": decode.factor_e4m3}
    function, shift = {
        "e2m1": (decode.decode_e2m1, decode.E2M1_SHIFT),
        "int4": (decode.decode_int4, 0),
        "e4m3": (decode.decode_e4m3_half, decode.E4M3_SHIFT) if operand == torch.float16 else (decode.decode_e4m3, 0),
    }.get(encoding.element, (decode.decode_16bit, 0))
    return {
        "DECODE": function,
        "FACTOR": factors.get(encoding.scale_dtype or "", decode.factor_float),
        "UNSHIFT": 0 if in_float32 else shift,
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
