"""Inputs of a GEMM in operand order: the sum of split-K parts, the activation, and quantization to E4M3."""

# Kernel arguments are not what a type checker takes them for.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from polymoe.kernels.triton.activation import activate, ceil_div, launch_options, pdl_wait_and_launch, round_e4m3

OPERANDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""Types of MMA operands, as Triton names them."""

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the input of a GEMM is rounded to E4M3. The MMA's operands have 16 bits, which hold every E4M3 number, unless
    the mode is "mx_codes".

    Attributes:
        mode: "none", "row" (one scale for each row), "block" (one for each row and ``group`` columns), "static" (one
            for each expert, so that x needs expanded rows), "mx" (a power of two for each row and ``group`` columns, by
            which the numbers are multiplied again: bfloat16 holds the products, so that no scale is left over), or
            "mx_codes" (the same scales, for an MMA that takes E4M3 codes and E8M0 scales).
        static_E: float32 scales of "static".
        group: columns that share a scale, in "block", "mx" and "mx_codes".
    """

    mode: str = "none"
    static_E: Tensor | None = None
    group: int | None = None


AS_GIVEN = Quantization()


@dataclass(frozen=True, slots=True)
class Operand:
    """An input of a GEMM: its tensors, and the arguments with which :func:`convert_rows` writes them.

    Attributes:
        values: [rows, K] in operand order: column c is at ``(c % planes) * (K / planes) + c // planes``.
        scales: float32 [rows, groups], or uint8 for "mx_codes"; where there are none, ``values``.
        ctas_per_row: CTAs for each row; 1 where a CTA converts ``constants["ROWS"]`` rows.
        constants: constexpr arguments.
    """

    values: Tensor
    scales: Tensor
    ctas_per_row: int
    constants: dict[str, Any]

    @property
    def programs(self) -> int:
        """How many Triton programs (CTAs) write it."""
        return ceil_div(self.values.shape[0], self.constants["ROWS"]) * self.ctas_per_row

    @staticmethod
    def shapes(rows: int, columns: int, quantization: Quantization) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """Return the shapes of the values and of the scales of an operand, None where it has no scales."""
        if quantization.mode in ("none", "mx"):
            return (rows, columns), None
        group = quantization.group
        return (rows, columns), (rows, ceil_div(columns, group) if group else 1)

    @classmethod
    def of(cls, values: Tensor, scales: Tensor | None, planes: int, quantization: Quantization) -> Operand:
        """Return the operand in these tensors, not yet written."""
        rows, columns = values.shape
        width = triton.next_power_of_2(columns)
        mode, group = quantization.mode, quantization.group
        block = width if mode == "row" else min(_BLOCK, max(width, group or planes))
        constants = {
            "MODE": mode,
            "GROUP": group or block,
            "PLANES": planes,
            "BLOCK": block,
            "ROWS": max(1, _BLOCK // block) if rows > 512 else 1,
        }
        return cls(values, values if scales is None else scales, ceil_div(columns, block), constants)


def activate_and_quantize(
    parts_SGRF: Tensor, operand: Operand, quantization: Quantization, activation: dict[str, Any],
    permuted_to_expanded_R: Tensor, ids_TA: Tensor, first_expert: int, experts: int, *, pdl: bool,
) -> None:  # fmt: skip
    """Fill ``operand`` with the activation of gate (``[:, 0]``) and up (``[:, -1]``), after adding up split-K parts.

    Rows are permuted rows. ``activation`` holds ACTIVATION, ALPHA, BETA and LIMIT of :func:`~.activation.activate`.
    """
    split_k, matrices, rows, columns = parts_SGRF.shape
    static = operand.values if quantization.static_E is None else quantization.static_E
    _activate_and_quantize[(operand.programs,)](
        parts_SGRF, operand.values, operand.scales, static, ids_TA, permuted_to_expanded_R,
        rows, columns, parts_SGRF.stride(0), parts_SGRF.stride(1), first_expert, experts,
        SPLIT_K=split_k, GATED=matrices == 2, CTAS_PER_ROW=operand.ctas_per_row, PDL=pdl, **activation,
        **operand.constants, num_warps=4, **launch_options(pdl),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _activate_and_quantize(
    in_ptr, out_ptr, scale_ptr, static_ptr, ids_ptr, permuted_to_expanded_ptr, rows, columns, in_split, in_gate,
    first_expert, experts, SPLIT_K: tl.constexpr, GATED: tl.constexpr, CTAS_PER_ROW: tl.constexpr, PDL: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr,
    MODE: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    pdl_wait_and_launch(PDL)
    row = tl.program_id(0) // CTAS_PER_ROW * ROWS + tl.arange(0, ROWS)
    expanded_row = row
    if MODE == "static":
        expanded_row = tl.load(permuted_to_expanded_ptr + row, mask=row < rows, other=0)
    convert_rows(
        row, row, expanded_row, tl.program_id(0) % CTAS_PER_ROW, in_ptr, out_ptr, scale_ptr, static_ptr, ids_ptr,
        rows, columns, in_split, in_gate, columns, 1, first_expert, experts,
        SPLIT_K, GATED, ACTIVATION, ALPHA, BETA, LIMIT, MODE, GROUP, PLANES, BLOCK, ROWS,
    )  # fmt: skip


@triton.jit
def convert_rows(
    row, source, expanded_row, cta_of_row, in_ptr, out_ptr, scale_ptr, static_ptr, ids_ptr,
    rows, columns, in_split, in_gate, in_row, in_column, first_expert, experts,
    SPLIT_K: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr,
    MODE: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Convert BLOCK columns from ``cta_of_row * BLOCK`` of the input's rows ``source`` [ROWS], to rows ``row``."""
    WORDS: tl.constexpr = BLOCK // PLANES
    word = cta_of_row * WORDS + tl.arange(0, WORDS)[None, None, :]
    plane = tl.arange(0, PLANES)[None, :, None]
    column = word * PLANES + plane
    inside = (column < columns) & (row < rows)[:, None, None]
    at = in_ptr + source.to(tl.int64)[:, None, None] * in_row + column * in_column
    up = tl.zeros((ROWS, PLANES, WORDS), tl.float32)
    gate = up
    for split in tl.static_range(SPLIT_K):
        if GATED:
            gate += tl.load(at + split * in_split, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(at + split * in_split + in_gate, mask=inside, other=0.0).to(tl.float32)
        else:
            up += tl.load(at + split * in_split, mask=inside, other=0.0).to(tl.float32)
    x = activate(gate, up, ACTIVATION, ALPHA, BETA, LIMIT)
    if MODE == "static":
        expert = tl.load(ids_ptr + expanded_row, mask=row < rows, other=0).to(tl.int64) - first_expert
        # Rows of other ranks' experts are quantized with some scale, and never read.
        scale = tl.load(static_ptr + tl.where((expert >= 0) & (expert < experts), expert, 0))
        x = round_e4m3(tl.div_rn(x, tl.zeros_like(x) + scale[:, None, None]))
        tl.store(scale_ptr + row, scale, mask=row < rows)
    elif MODE != "none":
        GROUPS: tl.constexpr = BLOCK // GROUP
        grouped = tl.reshape(tl.where(inside, x, 0.0), (ROWS, PLANES, GROUPS, GROUP // PLANES))
        amax = tl.max(tl.max(tl.abs(grouped), 3), 1)
        if MODE == "mx" or MODE == "mx_codes":
            # 448 is 1.75 * 2**8: a fraction of amax above 0.75 carries into the exponent, from which 8 is taken.
            exponent = tl.maximum(((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 1)
            scale = (exponent << 23).to(tl.float32, bitcast=True)
        else:
            scale = tl.div_rn(amax, tl.full((ROWS, GROUPS), 448.0, tl.float32))
            scale = tl.where(scale == 0, 1.0, scale)
        scales = tl.zeros_like(grouped) + scale[:, None, :, None]
        quantized = round_e4m3(tl.div_rn(grouped, scales))
        x = tl.reshape(quantized * scales if MODE == "mx" else quantized, (ROWS, PLANES, WORDS))
    if MODE == "row" or MODE == "block" or MODE == "mx_codes":
        num_groups = tl.cdiv(columns, GROUP)
        group = cta_of_row * GROUPS + tl.arange(0, GROUPS)[None, :]
        mask = (group < num_groups) & (row < rows)[:, None]
        stored = exponent.to(tl.uint8) if MODE == "mx_codes" else scale  # an E8M0 code is a float32's exponent
        tl.store(scale_ptr + row[:, None] * num_groups + group, stored, mask=mask)
    out_at = out_ptr + row.to(tl.int64)[:, None, None] * columns + plane * (columns // PLANES) + word
    tl.store(out_at, x.to(out_ptr.dtype.element_ty), mask=inside)
