"""Kernels on whole rows: x into operand order before the first product, experts' results into y after the last."""

# Kernel arguments are not what a type checker takes them for.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

__all__ = ["combine", "prepare"]


def prepare(x_TH: Tensor, planes: int, operand: torch.dtype) -> Tensor:
    """x in the operand dtype with its columns in planes; x itself where nothing changes.

    Column c goes to ``(c % planes) * (H / planes) + c // planes``.
    """
    rows, columns = x_TH.shape
    if planes == 1 and x_TH.dtype == operand and x_TH.is_contiguous():
        return x_TH
    out = torch.empty(rows, columns, dtype=operand, device=x_TH.device)
    block = min(1024, triton.next_power_of_2(columns))
    _prepare[(rows, triton.cdiv(columns, block))](
        x_TH, out, columns, x_TH.stride(0), x_TH.stride(1), PLANES=planes, BLOCK=block, num_warps=4
    )
    return out


@triton.jit
def _prepare(x_ptr, out_ptr, columns, x_row, x_column, PLANES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = columns // PLANES
    column = (place % width) * PLANES + place // width
    x = tl.load(x_ptr + row * x_row + column * x_column, mask=place < columns)
    tl.store(out_ptr + row * columns + place, x.to(out_ptr.dtype.element_ty), mask=place < columns)


def combine(
    y_SRH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor, first_expert: int, experts: int, weighted: bool
) -> None:
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
        SLOTS=slots, SPLITS=y_SRH.shape[0], WEIGHTED=weighted, BLOCK=block, num_warps=4 if block > 256 else 2,
    )  # fmt: skip


@triton.jit
def _combine(
    y_ptr, ids_ptr, weights_ptr, out_ptr, columns, y_split, ids_t, ids_a, weights_t, weights_a, out_t, out_h,
    first_expert, experts, SLOTS: tl.constexpr, SPLITS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
