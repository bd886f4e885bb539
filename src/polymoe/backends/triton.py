"""Triton: every format on every GPU since Ampere, from the natural layout, without a compiler or a binary wheel.

Five launches: dispatch, prepare, gate and up with the activation, down, combine. Weights are decoded in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polymoe.activations import Activation, GeGLU, SwiGLU
from polymoe.backends.base import Prediction
from polymoe.backends.triton_tiles import PLANES, Tile, TritonConfig, candidates, heuristic
from polymoe.formats import Encoding, PerGroup, PerTensor
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.planning.cost import cost
from polymoe.planning.plan import Config
from polymoe.problem import Problem
from polymoe.routing import Routing
from polymoe.shapes import ceil_div
from polymoe.verdict import Accepted, Reasons, Verdict

if TYPE_CHECKING:
    from polymoe.kernels.triton.dispatch import Dispatch

__all__ = ["Tile", "Triton", "TritonConfig"]


@dataclass(frozen=True, slots=True)
class Triton:
    """Grouped GEMM with weights as the left operand. Capturable."""

    name: str = "triton"
    layouts: tuple[str, ...] = ("natural",)

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        """Every reason against it: the GPU, the package, and what its kernels do not cover."""
        device, spec, reasons = machine.device, problem.spec, Reasons()
        reasons.need(device.kind == "cuda" and device.sm >= 80, "GPU", "SM80 or newer", device.arch)
        version = machine.packages.get("triton", "")
        recent = bool(version) and tuple(int(v) for v in version.split(".")[:2]) >= (3, 6)
        reasons.need(recent, "triton", "3.6 or newer", version or "none")
        reasons.need(problem.activations == "16bit", "activations", "16bit", problem.activations)
        if spec.gate is not None:
            reasons.need(spec.gate == spec.up, "gate and up", "one encoding", f"{spec.gate!r}, {spec.up!r}")
        for projection, encoding in spec.encodings.items():
            columns, planes = spec.matrix_shape(projection)[1], PLANES[encoding.element]
            reasons.need(columns % planes == 0, f"{projection} columns", f"a multiple of {planes}", columns)
            granularity, group = encoding.granularity, encoding.group_columns
            if isinstance(granularity, PerGroup):
                fits = group % 16 == 0 and group & (group - 1) == 0
                reasons.need(fits, f"{projection} scale groups", "a power of two of at least 16 columns", group)
            elif encoding.zero_points:
                reasons.need(False, f"{projection} zero points", "scales by group", str(granularity))
        reasons.need(not problem.batch_invariant, "batch-invariant results", "not asked for", "asked for")
        return reasons.verdict(Accepted(capturable=True))

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> TritonConfig:
        """The heuristic's tiles."""
        return heuristic(problem, machine, tokens)

    def candidates(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
    ) -> Sequence[Config]:
        """See :func:`polymoe.backends.triton_tiles.candidates`."""
        return candidates(problem, machine, tokens, timed)

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        """Bytes at 0.72 and products at 0.44 of the device's rates (measured on one H200, where each alone binds),
        overlapping in part, and five launches."""
        c = cost(problem, machine.device, tokens)
        time_us = ((c.memory_us / 0.72) ** 1.5 + (c.compute_us / 0.44) ** 1.5) ** (2 / 3) + 15
        return Prediction(time_us, "cost model")

    def compile(
        self, problem: Problem, packed: Packed, x_TH: Tensor, routing: Routing, config: Config, out_TH: Tensor
    ) -> None:
        """See :meth:`polymoe.backends.Backend.compile`."""
        from polymoe.kernels.triton.warm_up import compile_only

        with compile_only():
            self.run(problem, packed, x_TH, routing, config, out_TH)

    def run(
        self, problem: Problem, packed: Packed, x_TH: Tensor, routing: Routing, config: Config, out_TH: Tensor
    ) -> None:
        """See :meth:`polymoe.backends.Backend.run`. On a CPU (Triton's interpreter) operands are float32."""
        from polymoe.kernels.triton.dispatch import dispatch
        from polymoe.kernels.triton.rows import combine, prepare

        assert isinstance(config, TritonConfig)
        spec = problem.spec
        tokens, slots = routing.topk_ids_TA.shape
        rows = tokens * slots
        plan = dispatch(routing.topk_ids_TA, spec.first_expert, spec.local_experts, config.tokens)
        operand_up, operand_down = _operand(spec.up, x_TH), _operand(spec.down, x_TH)
        planes_down = PLANES[spec.down.element]
        x = prepare(x_TH, PLANES[spec.up.element], operand_up)
        h_RF = torch.empty(rows, spec.intermediate, dtype=operand_down, device=x.device)
        _product(
            problem, packed, "up", x, h_RF, plan, routing, config.up, config.tokens,
            out_planes=planes_down, gather=True, slots=slots,
        )  # fmt: skip
        # Rows are summed over slots and splits: kept in float32 while they are few.
        exact = rows <= 4096 or operand_down == torch.float32
        y_type = torch.float32 if exact or config.down.splits > 1 else operand_down
        y_SRH = torch.empty(config.down.splits, rows, spec.hidden, dtype=y_type, device=x.device)
        _product(
            problem, packed, "down", h_RF, y_SRH, plan, routing, config.down, config.tokens,
            out_planes=1, gather=False, slots=slots,
        )  # fmt: skip
        combine(
            y_SRH, routing.topk_ids_TA, routing.topk_weights_TA, out_TH, spec.first_expert, spec.local_experts,
            problem.weight_on == "output",
        )  # fmt: skip


def _operand(encoding: Encoding, x: Tensor) -> torch.dtype:
    """What both operands are on the matrix units: float16 where weights and x are, else bfloat16."""
    if x.device.type == "cpu":
        return torch.float32
    return torch.float16 if encoding.element == "fp16" and x.dtype == torch.float16 else torch.bfloat16


def _product(
    problem: Problem, packed: Packed, projection: str, x: Tensor, out: Tensor, plan: Dispatch, routing: Routing,
    tile: Tile, tokens: int, *, out_planes: int, gather: bool, slots: int,
) -> None:  # fmt: skip
    """Launch gate and up with the activation (``projection`` "up"), or down."""
    import triton.language as tl

    from polymoe.kernels.triton.gemm import grouped_gemm

    spec = problem.spec
    encoding = spec.encodings[projection]
    n_rows, columns = spec.matrix_shape(projection)
    gated = projection == "up" and spec.gated
    planes = PLANES[encoding.element]
    plain = x.device.type == "cpu"
    up = _operands(packed, projection, planes, out)
    gate = _operands(packed, "gate", planes, out) if gated else up
    assert [t.stride() for t in gate] == [t.stride() for t in up]
    codes, scales, bias = up[0], up[1], up[4]
    scale_at, group_n, group_k = _scales(encoding, n_rows)
    scale_e, scale_n, scale_k = scales.stride() if scale_at != "none" else (0, 0, 0)
    activation = _activation(problem.activation) if projection == "up" else ("none", 1.0, 0.0, 0.0)
    splits = tile.splits if projection == "down" else 1
    block_k = min(tile.columns, group_k) if scale_at == "block" else tile.columns
    operand = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[x.dtype]
    kernel: Any = grouped_gemm
    grid = (plan.tiles * ceil_div(n_rows, tile.rows) * splits,)
    kernel[grid](
        x, x, out, *gate, *up, plan.order_R, plan.tile_expert, plan.tile_first, plan.tile_last, routing.topk_weights_TA,
        slots, *codes.stride(), scale_e, scale_n, scale_k,
        bias.stride(0), out.stride(0) if out.dim() == 3 else 0,
        N=n_rows, K=columns, GATED=gated,
        ACTIVATION=activation[0], ALPHA=activation[1], BETA=activation[2], LIMIT=activation[3],
        **_decoding(encoding, plain), PLANES=planes, OPERAND=operand, PLAIN=plain,
        SCALE_AT=scale_at, GROUP_N=group_n, GROUP_K=group_k,
        SCALE_ALIGN=gcd(scale_e, scale_n, 16), ZERO_POINTS=encoding.zero_points,
        GLOBAL=encoding.global_scale, BIAS=spec.bias, X_SCALE=False,
        WEIGHT_IN=projection == "up" and problem.weight_on == "input",
        GATHER=gather, SCATTER=not gather, OUTPLANES=out_planes, SPLIT_K=splits,
        BLOCK_N=tile.rows, BLOCK_T=tokens, BLOCK_K=block_k,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
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


def _decoding(encoding: Encoding, plain: bool) -> dict[str, Any]:
    from polymoe.kernels.triton import decode

    by_element = {"e2m1": decode.decode_e2m1, "int4": decode.decode_int4, "e4m3": decode.decode_e4m3}
    factor = {"e8m0": decode.factor_e8m0, "e4m3": decode.factor_e4m3}.get(
        encoding.scale_dtype or "", decode.factor_float
    )
    return {
        "DECODE": by_element.get(encoding.element, decode.decode_16bit),
        "FACTOR": factor,
        "UNSHIFT": decode.E2M1_SHIFT if encoding.element == "e2m1" and not plain else 0,
    }


def _activation(activation: Activation) -> tuple[str, float, float, float]:
    """Name and constants as the kernel takes them; a limit of 0 is none."""
    if isinstance(activation, SwiGLU):
        return "swiglu", activation.alpha, activation.beta, activation.limit or 0.0
    if isinstance(activation, GeGLU):
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu", 1.0, 0.0, 0.0
    return "relu2", 1.0, 0.0, 0.0
