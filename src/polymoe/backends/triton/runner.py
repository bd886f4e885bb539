"""TritonRunner: the calls of one layer on the Triton kernels."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polymoe.backends.base import RunnerBase, mapped_ids, require_aligned
from polymoe.backends.config import Config
from polymoe.backends.triton.arguments import (
    ProjectionArguments,
    activation_arguments,
    decoding,
    mode_of,
    operand_dtype,
    scale_arguments,
)
from polymoe.backends.triton.buffers import Buffers, aligned_bytes, allocate, within
from polymoe.backends.triton.config import Tile, TritonConfig
from polymoe.backends.triton.tiles import decodes_in_float32, smaller
from polymoe.common.shapes import ceil_div
from polymoe.kernels.triton.activation import launch_options
from polymoe.kernels.triton.finalize import finalize
from polymoe.kernels.triton.grouped_gemm import OutOfResources, grouped_gemm
from polymoe.kernels.triton.grouped_gemm_block_scaled import grouped_gemm_block_scaled
from polymoe.kernels.triton.grouped_gemm_short_k import MAX_STEPS, grouped_gemm_short_k
from polymoe.kernels.triton.hooks import hooks_without_functions
from polymoe.kernels.triton.permute import Permutation, permutation_words, permute
from polymoe.kernels.triton.quantize import AS_GIVEN, OPERANDS, Operand, Quantization, activate_and_quantize
from polymoe.layouts import Packed
from polymoe.problem import Problem
from polymoe.problem.call import CallArguments

log = logging.getLogger("polymoe")

_X_GROUP = 128


class TritonRunner(RunnerBase):
    """Holds the packed tensors as kernels take them, and the constants of each configuration's launches."""

    def __init__(self, problem: Problem, packed: Packed, fitting: dict[tuple[Problem, Config], TritonConfig]) -> None:
        self.problem, self.fitting = problem, fitting
        spec, device = problem.spec, packed.tensors["up.codes"].device
        self.device = device
        self.up = ProjectionArguments.of(problem, packed, "up")
        self.gate = ProjectionArguments.of(problem, packed, "gate") if spec.gated else self.up
        self.down = ProjectionArguments.of(problem, packed, "down")
        assert self.gate.strides == self.up.strides
        self.activation, self.no_activation = activation_arguments(problem.activation), activation_arguments(None)
        mode = mode_of(problem.activations)
        scales = [packed.tensors[f"{p}_input_scale"] if mode == "static" else None for p in ("gate_up", "down")]
        self.x_quantization, self.h_quantization = (
            Quantization(mode, static_E, problem.activations.group_columns) for static_E in scales
        )
        dynamic = problem.activations.quantized and not problem.activations.static
        self.options = frozenset(("workspace", "expert_map", "x_scales") if dynamic else ("workspace", "expert_map"))
        self.gemms: dict[tuple[int, str, torch.dtype], _Gemm] = {}

    def workspace_bytes(self, tokens: int, top_k: int, config: Config) -> int:
        """Return the bytes for the permutation, x, h and y, and for the parts that are added up."""
        assert isinstance(config, TritonConfig)
        config = self.fitting.get((self.problem, config), config)
        operands = self._operands(torch.bfloat16, config)  # as large as those of another dtype of x
        converted = self._rounding(self.x_quantization, config)
        return sum(aligned_bytes(*b) for b in self._buffers(tokens, top_k, config, operands, converted).values())

    def run(self, call: CallArguments, config: Config) -> None:
        """See :meth:`polymoe.backends.base.Runner.run`. On a CPU (Triton's interpreter) operands are float32.

        Tiles are chosen by an estimate of the shared memory that Triton needs. If the GPU refuses one, the next smaller
        tile runs.
        """
        assert isinstance(config, TritonConfig)
        first_expert = self.problem.spec.first_expert
        if call.expert_map is not None:
            call, first_expert = call._replace(topk_ids_TA=mapped_ids(call.topk_ids_TA, call.expert_map)), 0
        if call.workspace is not None:
            require_aligned("workspace", call.workspace)
        if self.fitting:
            config = self.fitting.get((self.problem, config), config)
        wanted, refusal = config, None
        while True:
            try:
                self._run(call, config, first_expert)
                break
            except _DoesNotFit as error:
                refusal = error.cause
                less = smaller(config, error.projection, self.problem.spec.encodings[error.projection])
                if less is None:
                    raise refusal from None
                config, call = less, call._replace(workspace=None)  # smaller tiles may need a larger workspace
        if refusal is not None:
            log.warning("triton: %s do not fit this GPU (%s): from now on %s", wanted, refusal, config)
            self.fitting[self.problem, wanted] = config

    def _run(self, call: CallArguments, config: TritonConfig, first_expert: int) -> None:
        """Launch the kernels of a call.

        Raises:
            _DoesNotFit: if the GPU has less shared memory, or less of something else, than a tile needs.
        """
        spec, pdl = self.problem.spec, config.pdl
        x_TH, ids_TA, _, _, workspace, x_scales, _ = call
        weights_TA = call.topk_weights_TA.contiguous()  # the GEMM reads weights flat
        tokens, top_k = ids_TA.shape
        experts = spec.local_experts
        operands = self._operands(x_TH.dtype, config)
        planes = 1 if config.block_scaled else self.up.planes
        x_quantization, h_quantization = (
            self._rounding(quantization, config) for quantization in (self.x_quantization, self.h_quantization)
        )
        if x_scales is not None:  # E4M3 numbers are exact in 16 bits, and in bfloat16 their products with powers of two
            if self.problem.activations.scale_dtype == "e8m0":
                group = self.problem.activations.group_columns or 1
                x_TH = x_TH.float() * x_scales.repeat_interleave(group, 1)[:, : x_TH.shape[1]]
            if not config.block_scaled:  # which rounds the products to themselves
                x_TH, x_quantization = x_TH.to(operands[0]), AS_GIVEN
        static = x_quantization.mode == "static"
        as_it_is = x_quantization.mode == "none" and planes == 1 and x_TH.dtype == operands[0]
        converted = None if as_it_is and x_TH.is_contiguous() else x_quantization
        buffers = self._buffers(tokens, top_k, config, operands, converted)
        memory = allocate(buffers, self.device) if workspace is None else within(workspace, buffers)

        x = None
        if converted is not None:
            x = Operand.of(memory["x"], memory.get("x_scales"), planes, converted)
        permutation = permute(
            memory["permutation"], ids_TA, first_expert, experts, config.block_m, x_TH, x, x_quantization, pdl=pdl
        )
        values, scales = (x_TH, x_TH) if x is None else (x.values, x.scales)
        if x_scales is not None and x_quantization is AS_GIVEN:
            scales = x_scales

        parts = memory.get("parts")
        if parts is not None:
            # A separate launch adds up the parts and quantizes. They stay float32 until then: rounded twice, more than
            # one in a hundred E4M3 values would differ from the reference.
            self._gemm("up", values, scales, parts, weights_TA, permutation, config, 1 if static else top_k)
            h_planes = 1 if config.block_scaled else self.down.planes
            h = Operand.of(memory["h"], memory.get("h_scales"), h_planes, h_quantization)
            activation = self.activation if config.up.split_k > 1 else self.no_activation
            rows = permutation.permuted_to_expanded_R
            ids = ids_TA.contiguous()
            activate_and_quantize(parts, h, h_quantization, activation, rows, ids, first_expert, experts, pdl=pdl)
            values, scales = h.values, h.scales
        else:
            values_RF = memory["h"]
            self._gemm("up", values, scales, values_RF, weights_TA, permutation, config, top_k)
            values = scales = values_RF
        y_SRH, weighted = memory["y"], self.problem.weight_on == "output"
        self._gemm("down", values, scales, y_SRH, weights_TA, permutation, config, top_k)
        finalize(y_SRH, ids_TA, weights_TA, call.out_TH, first_expert, experts, weighted=weighted, pdl=pdl)

    def add_rows(self, y_RH: Tensor, call: CallArguments, config: Config) -> None:
        assert isinstance(config, TritonConfig)
        spec, weighted = self.problem.spec, self.problem.weight_on == "output"
        arguments = (call.topk_ids_TA, call.topk_weights_TA, call.out_TH, spec.first_expert, spec.local_experts)
        finalize(y_RH[None], *arguments, weighted=weighted, pdl=config.pdl)

    def _rounding(self, quantization: Quantization, config: TritonConfig) -> Quantization:
        """Return how an input is rounded: where MMAs take E8M0 scales, to codes beside their scales."""
        return replace(quantization, mode="mx_codes") if config.block_scaled else quantization

    def _operands(self, x_dtype: torch.dtype, config: TritonConfig) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of the MMA operands of both GEMMs for x in ``x_dtype``."""
        if config.block_scaled:
            return torch.float8_e4m3fn, torch.float8_e4m3fn
        problem, device = self.problem, self.device
        up, down = (
            operand_dtype(e, device, x_dtype, problem.activations) for e in (problem.spec.up, problem.spec.down)
        )
        return up, down

    def _adds_parts(self, config: TritonConfig) -> bool:
        """Whether a launch between the GEMMs adds up the parts of a split K, or quantizes."""
        return self.h_quantization.mode != "none" or config.up.split_k > 1

    def _buffers(
        self,
        tokens: int,
        top_k: int,
        config: TritonConfig,
        operands: tuple[torch.dtype, torch.dtype],
        converted: Quantization | None,
    ) -> Buffers:
        """Return the shapes and dtypes of the tensors of a call besides its arguments. ``operands`` are the dtypes of
        both GEMMs' MMA operands; ``converted`` is how x is rounded, None if the first GEMM reads x as it is."""
        spec, rows = self.problem.spec, tokens * top_k
        words = permutation_words(rows, spec.local_experts, config.block_m)
        found: Buffers = {"permutation": ((words,), torch.int32)}

        def add(name: str, rows: int, columns: int, dtype: torch.dtype, to: Quantization) -> None:
            values, scales = Operand.shapes(rows, columns, to)
            found[name] = values, dtype
            if scales is not None:
                found[f"{name}_scales"] = scales, torch.uint8 if to.mode == "mx_codes" else torch.float32

        if converted is not None:
            x_rows = rows if converted.mode == "static" else tokens
            add("x", x_rows, spec.hidden, operands[0], converted)
        if self._adds_parts(config):
            split = config.up.split_k
            matrices = 2 if split > 1 and spec.gated else 1
            found["parts"] = (split, matrices, rows, spec.intermediate), torch.float32
        add("h", rows, spec.intermediate, operands[1], self._rounding(self.h_quantization, config))
        # Finalize adds rows over choices and split-K parts. They stay float32 while they are few.
        exact = rows <= 4096 or operands[1] == torch.float32
        y_type = torch.bfloat16 if config.block_scaled else operands[1]
        y_type = torch.float32 if exact or config.down.split_k > 1 else y_type
        found["y"] = (config.down.split_k, rows, spec.hidden), y_type
        return found

    def _gemm(
        self,
        projection: str,
        x: Tensor,
        x_scales: Tensor,
        out: Tensor,
        weights_TA: Tensor,
        permutation: Permutation,
        config: TritonConfig,
        top_k: int,
    ) -> None:
        """Launch gate and up with the activation (``projection`` "up"; without it where parts are added up), or down.

        Raises:
            _DoesNotFit: if the GPU has less shared memory, or less of something else, than the tile needs.
        """
        key = (id(config), projection, x.dtype)
        gemm = self.gemms.get(key)
        if gemm is None:
            gemm = self.gemms[key] = self._prepared(projection, config, x.dtype)
        matrix, first = (self.up, self.gate) if projection == "up" else (self.down, self.down)
        p = permutation
        tiles = (p.permuted_to_expanded_R, p.tile_expert, p.tile_first, p.tile_last)
        args: tuple[Any, ...]
        if gemm.kernel is grouped_gemm_block_scaled:
            (code_e, code_n, _, scale_e, scale_n, _, bias_e), parts = matrix.byte_strides, []
            for codes, scales, _, _, bias in (first.tensors, matrix.tensors):
                parts += [codes.view(torch.uint8), scales, bias]
            args = (x, x_scales, out, *parts, *tiles, weights_TA, top_k, code_e, code_n, scale_e, scale_n, bias_e)
        elif gemm.kernel is grouped_gemm_short_k:
            args = (x, x_scales, out, *matrix.tensors, *tiles, x_scales.shape[1], *matrix.strides)
        else:
            split = out.stride(0) if out.dim() > 2 else 0
            gate = out.stride(1) if out.dim() == 4 else 0
            tensors = (*first.tensors, *matrix.tensors, *tiles, weights_TA)
            args = (x, x_scales, out, *tensors, top_k, x_scales.shape[1], *matrix.strides, split, gate)
        try:
            with hooks_without_functions():
                gemm.kernel[(p.num_tiles * gemm.ctas,)](*args, **gemm.constants)
        except OutOfResources as error:
            raise _DoesNotFit(projection, error) from error

    def _constants(self, matrix: ProjectionArguments, tile: Tile, config: TritonConfig) -> dict[str, Any]:
        """Return the constants and options of a GEMM's launches, whichever kernel it is."""
        return {
            "N": matrix.n,
            "K": matrix.k,
            "BIAS": self.problem.spec.bias,
            "BLOCK_N": tile.block_n,
            "BLOCK_M": config.block_m,
            "PDL": config.pdl,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "maxnreg": tile.maxnreg,
            **launch_options(config.pdl),
        }

    def _prepared(self, projection: str, config: TritonConfig, dtype: torch.dtype) -> _Gemm:
        """Return the kernel, constants and options of one GEMM's launches with operands of ``dtype``."""
        problem, up = self.problem, projection == "up"
        tile, matrix = (config.up, self.up) if up else (config.down, self.down)
        encoding = matrix.encoding
        if config.block_scaled:
            return self._prepared_block_scaled(matrix, tile, config, up=up)
        in_float32 = self.device.type == "cpu" or decodes_in_float32(problem)
        scale_at, group_n, group_k = scale_arguments(encoding, matrix.n)
        x_scale = {"none": "none", "mx": "none", "block": "block"}.get(self.h_quantization.mode, "row")
        block_k = min(tile.block_k, group_k) if scale_at == "block" else tile.block_k
        block_k = min(block_k, _X_GROUP) if x_scale == "block" else block_k
        constants = {
            **self._constants(matrix, tile, config),
            **decoding(encoding, dtype, in_float32, exact=problem.activations.quantized),
            "PLANES": matrix.planes,
            "OPERAND": OPERANDS[dtype],
            "PLAIN": in_float32,
            "SCALE_AT": scale_at,
            "GROUP_N": group_n,
            "GROUP_K": group_k,
            "SCALE_ALIGN": matrix.scale_align,
            "ZERO_POINTS": encoding.zero_points,
            "GLOBAL": encoding.global_scale,
            "X_SCALE": x_scale,
            "X_GROUP": _X_GROUP,
            "TAIL_BLOCK_M": config.tail_block_m,
            "BLOCK_K": block_k,
        }
        blocks, several = ceil_div(matrix.n, tile.block_n), tile.n_blocks_per_cta
        if not up and several > 1 and tile.split_k == 1 and matrix.k <= MAX_STEPS * block_k:
            constants["N_BLOCKS_PER_CTA"] = several
            return _Gemm(config, grouped_gemm_short_k, ceil_div(blocks, several), constants)
        parts = up and self._adds_parts(config)
        raw = parts and tile.split_k > 1
        constants |= {
            "GATED": up and problem.spec.gated,
            "RAW": raw,
            **(self.activation if up and not raw else self.no_activation),
            "ROUTER_WEIGHT_ON_INPUT": up and problem.weight_on == "input",
            "GATHER": up,
            "SCATTER": not up,
            "OUT_PLANES": self.down.planes if up and not parts else 1,
            "SPLIT_K": tile.split_k,
        }
        return _Gemm(config, grouped_gemm, blocks * tile.split_k, constants)

    def _prepared_block_scaled(
        self, matrix: ProjectionArguments, tile: Tile, config: TritonConfig, *, up: bool
    ) -> _Gemm:
        """Return the same for MMAs that take E8M0 scales."""
        problem = self.problem
        constants = {
            **self._constants(matrix, tile, config),
            "GATED": up and problem.spec.gated,
            **(self.activation if up else self.no_activation),
            "E2M1": matrix.encoding.element == "e2m1",
            "X_GROUP": problem.activations.group_columns,
            "PLAIN": self.device.type == "cpu",
            "ROUTER_WEIGHT_ON_INPUT": up and problem.weight_on == "input",
            "GATHER": up,
            "SCATTER": not up,
            "BLOCK_K": tile.block_k,
        }
        return _Gemm(config, grouped_gemm_block_scaled, ceil_div(matrix.n, tile.block_n), constants)


@dataclass(frozen=True, slots=True, eq=False)
class _Gemm:
    """A GEMM of one configuration, with operands of one dtype.

    Attributes:
        config: the configuration. It is kept so that its id stays its own, by which the GEMM is found.
        kernel: the kernel.
        ctas: CTAs for each work tile.
        constants: constants and options of the launches.
    """

    config: TritonConfig
    kernel: Any
    ctas: int
    constants: dict[str, Any]


class _DoesNotFit(Exception):
    """The GPU refused the kernel of a GEMM."""

    def __init__(self, projection: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.projection, self.cause = projection, cause
