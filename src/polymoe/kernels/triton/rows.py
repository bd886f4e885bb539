"""Kernels on whole rows: inputs of a product into operand order, experts' results into y after the last."""

# Kernel arguments are not what a type checker takes them for.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from polymoe.kernels.triton.activation import activate, chain, round_e4m3

__all__ = ["UNQUANTIZED", "Operand", "Quantization", "combine", "convert_rows", "hidden", "pdl"]

_GROUP = 128
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a product's input is rounded to E4M3, to be multiplied in 16 bit, which holds every E4M3 number.

    ``mode`` is "none", "row" (a scale a row), "block" (one a row and 128 columns), or "static": ``static_E`` float32
    has each expert's scale, so that the rows are routed ones.
    """

    mode: str = "none"
    static_E: Tensor | None = None


UNQUANTIZED = Quantization()


@dataclass(frozen=True, slots=True)
class Operand:
    """A product's input to be: where it is written, and the arguments of :func:`convert_rows` that do it.

    Column c of a row goes to ``(c % planes) * (K / planes) + c // planes`` of ``values`` [rows, K]. ``scales`` [rows,
    groups] are float32; without quantization, ``values``.
    """

    values: Tensor
    scales: Tensor
    parts: int
    """Programs a row, or 1 where a program takes ``constants["ROWS"]`` rows."""
    constants: dict[str, Any]

    @property
    def programs(self) -> int:
        """Programs that write it."""
        return int(triton.cdiv(self.values.shape[0], self.constants["ROWS"])) * self.parts

    @classmethod
    def empty(
        cls, rows: int, columns: int, planes: int, dtype: torch.dtype, quantization: Quantization, device: torch.device
    ) -> Operand:
        """For ``rows`` of ``columns``, not yet written."""
        mode = quantization.mode
        values = torch.empty(rows, columns, dtype=dtype, device=device)
        width = triton.next_power_of_2(columns)
        block = width if mode == "row" else min(_BLOCK, max(width, _GROUP if mode == "block" else planes))
        scales = values
        if mode != "none":
            groups = triton.cdiv(columns, _GROUP) if mode == "block" else 1
            scales = torch.empty(rows, groups, dtype=torch.float32, device=device)
        constants = {
            "MODE": mode, "GROUP": {"block": _GROUP}.get(mode, block), "PLANES": planes, "BLOCK": block,
            "ROWS": max(1, _BLOCK // block) if rows > 512 else 1,
        }  # fmt: skip
        return cls(values, scales, triton.cdiv(columns, block), constants)


def pdl(chained: bool) -> dict[str, bool]:
    """Launch options for programmatic dependent launch."""
    return {"launch_pdl": True} if chained else {}


def hidden(
    parts_SGRF: Tensor, operand: Operand, quantization: Quantization, activation: dict[str, Any], order_R: Tensor,
    ids_TA: Tensor, first_expert: int, experts: int, *, chained: bool,
) -> None:  # fmt: skip
    """Fill ``operand`` with the activation of gate (``[:, 0]``) and up (``[:, -1]``), each summed over splits first.

    Rows are in expert order. ``activation`` holds ACTIVATION, ALPHA, BETA and LIMIT of :func:`~.activation.activate`.
    """
    splits, matrices, rows, columns = parts_SGRF.shape
    static = operand.values if quantization.static_E is None else quantization.static_E
    _hidden[(operand.programs,)](
        parts_SGRF, operand.values, operand.scales, static, ids_TA, order_R,
        rows, columns, parts_SGRF.stride(0), parts_SGRF.stride(1), first_expert, experts,
        SPLITS=splits, GATED=matrices == 2, PARTS=operand.parts, CHAINED=chained, **activation, **operand.constants,
        num_warps=4, **pdl(chained),
    )  # fmt: skip


@triton.jit
def _hidden(
    in_ptr, out_ptr, scale_ptr, static_ptr, ids_ptr, order_ptr, rows, columns, in_split, in_gate, first_expert,
    experts, SPLITS: tl.constexpr, GATED: tl.constexpr, PARTS: tl.constexpr, CHAINED: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr,
    MODE: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    chain(CHAINED)
    row = tl.program_id(0) // PARTS * ROWS + tl.arange(0, ROWS)
    routed = row
    if MODE == "static":
        routed = tl.load(order_ptr + row, mask=row < rows, other=0)
    convert_rows(
        row, row, routed, tl.program_id(0) % PARTS, in_ptr, out_ptr, scale_ptr, static_ptr, ids_ptr,
        rows, columns, in_split, in_gate, columns, 1, first_expert, experts,
        SPLITS, GATED, ACTIVATION, ALPHA, BETA, LIMIT, MODE, GROUP, PLANES, BLOCK, ROWS,
    )  # fmt: skip


@triton.jit
def convert_rows(
    row, source, routed, part, in_ptr, out_ptr, scale_ptr, static_ptr, ids_ptr,
    rows, columns, in_split, in_gate, in_row, in_column, first_expert, experts,
    SPLITS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr,
    MODE: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Columns ``part * BLOCK`` and on of rows ``source`` [ROWS] of the input, to rows ``row`` of the output."""
    WORDS: tl.constexpr = BLOCK // PLANES
    word = part * WORDS + tl.arange(0, WORDS)[None, None, :]
    plane = tl.arange(0, PLANES)[None, :, None]
    column = word * PLANES + plane
    inside = (column < columns) & (row < rows)[:, None, None]
    at = in_ptr + source.to(tl.int64)[:, None, None] * in_row + column * in_column
    up = tl.zeros((ROWS, PLANES, WORDS), tl.float32)
    gate = up
    for split in tl.static_range(SPLITS):
        if GATED:
            gate += tl.load(at + split * in_split, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(at + split * in_split + in_gate, mask=inside, other=0.0).to(tl.float32)
        else:
            up += tl.load(at + split * in_split, mask=inside, other=0.0).to(tl.float32)
    x = activate(gate, up, ACTIVATION, ALPHA, BETA, LIMIT)
    if MODE == "static":
        expert = tl.load(ids_ptr + routed, mask=row < rows, other=0).to(tl.int64) - first_expert
        # Rows of other ranks are quantized like any, by some scale, and never read.
        scale = tl.load(static_ptr + tl.where((expert >= 0) & (expert < experts), expert, 0))
        x = round_e4m3(tl.div_rn(x, tl.zeros_like(x) + scale[:, None, None]))
        tl.store(scale_ptr + row, scale, mask=row < rows)
    elif MODE != "none":
        GROUPS: tl.constexpr = BLOCK // GROUP
        grouped = tl.reshape(tl.where(inside, x, 0.0), (ROWS, PLANES, GROUPS, GROUP // PLANES))
        largest = tl.max(tl.max(tl.abs(grouped), 3), 1)
        scale = tl.div_rn(largest, tl.full((ROWS, GROUPS), 448.0, tl.float32))
        scale = tl.where(scale == 0, 1.0, scale)
        quantized = round_e4m3(tl.div_rn(grouped, tl.zeros_like(grouped) + scale[:, None, :, None]))
        x = tl.reshape(quantized, (ROWS, PLANES, WORDS))
        count = tl.cdiv(columns, GROUP)
        group = part * GROUPS + tl.arange(0, GROUPS)[None, :]
        tl.store(scale_ptr + row[:, None] * count + group, scale, mask=(group < count) & (row < rows)[:, None])
    place = out_ptr + row.to(tl.int64)[:, None, None] * columns + plane * (columns // PLANES) + word
    tl.store(place, x.to(out_ptr.dtype.element_ty), mask=inside)


def combine(
    y_SRH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor, first_expert: int, experts: int, *,
    weighted: bool, chained: bool,
) -> None:  # fmt: skip
    """``out[t] = sum over slots a, in order, of weight[t, a] * sum over splits of y[s, t * A + a]`` in float32.

    Slots whose expert is not of this rank are never read. Without ``weighted`` every weight is 1.
    """
    tokens, slots = ids_TA.shape
    columns = out_TH.shape[1]
    block = min(1024, triton.next_power_of_2(columns)) if tokens > 16 else min(256, triton.next_power_of_2(columns))
    _combine[(tokens, triton.cdiv(columns, block))](
        y_SRH, ids_TA, weights_TA, out_TH, columns, y_SRH.stride(0),
        ids_TA.stride(0), ids_TA.stride(1), weights_TA.stride(0), weights_TA.stride(1),
        out_TH.stride(0), out_TH.stride(1), first_expert, experts,
        SLOTS=slots, SPLITS=y_SRH.shape[0], WEIGHTED=weighted, BLOCK=block, CHAINED=chained,
        num_warps=4 if block > 256 else 2, **pdl(chained),
    )  # fmt: skip


@triton.jit
def _combine(
    y_ptr, ids_ptr, weights_ptr, out_ptr, columns, y_split, ids_t, ids_a, weights_t, weights_a, out_t, out_h,
    first_expert, experts, SLOTS: tl.constexpr, SPLITS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    chain(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(SLOTS):
        expert = tl.load(ids_ptr + token * ids_t + slot * ids_a).to(tl.int64) - first_expert
        here = (expert >= 0) & (expert < experts)
        weight = 1.0
        if WEIGHTED:
            weight = tl.load(weights_ptr + token * weights_t + slot * weights_a)
        y = tl.zeros((BLOCK,), tl.float32)
        for split in tl.static_range(SPLITS):
            at = y_ptr + split * y_split + (token * SLOTS + slot) * columns + column
            y += tl.load(at, mask=(column < columns) & here, other=0.0).to(tl.float32)
        total += tl.where(here, weight * y, 0.0)
    tl.store(out_ptr + token * out_t + column * out_h, total.to(out_ptr.dtype.element_ty), mask=column < columns)
