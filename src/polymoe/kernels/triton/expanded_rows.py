"""Launches around GEMMs of other libraries that read and write expanded rows: their work tiles, and the activation."""

# Kernel arguments are not what a type checker takes them for.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from polymoe.kernels.triton.activation import activate, ceil_div, launch_options
from polymoe.kernels.triton.permute import Permutation

__all__ = ["PaddedTiles", "activate_rows", "pad_tiles"]


class PaddedTiles:
    """Work tiles as vLLM's ``moe_align_block_size`` writes them. All tensors are int32.

    Attributes:
        rows: expanded rows, each tile's padded with the number of rows to ``block_m``.
        experts: the expert of each tile.
        num_rows: [1], entries of ``rows`` that are in use, a multiple of ``block_m``.
    """

    def __init__(self, rows: Tensor, experts: Tensor, num_rows: Tensor) -> None:
        self.rows, self.experts, self.num_rows = rows, experts, num_rows


def pad_tiles(permutation: Permutation, block_m: int) -> PaddedTiles:
    """Pad the tiles of a permutation that was made for ``block_m``, without synchronizing."""
    p, rows = permutation, permutation.permuted_to_expanded_R.numel()
    padded = torch.empty(p.num_tiles * block_m, dtype=torch.int32, device=p.tile_expert.device)
    num_rows = torch.empty(1, dtype=torch.int32, device=p.tile_expert.device)
    _pad_tiles[(p.num_tiles,)](
        p.permuted_to_expanded_R, p.tile_expert, p.tile_first, p.tile_last, padded, num_rows, rows, p.num_tiles,
        BLOCK_M=block_m, LANES=triton.next_power_of_2(block_m), num_warps=1,
        **launch_options(),
    )  # fmt: skip
    return PaddedTiles(padded, p.tile_expert, num_rows)


@triton.jit(do_not_specialize=["rows", "num_tiles"])
def _pad_tiles(
    permuted_to_expanded_ptr, expert_ptr, first_ptr, last_ptr, padded_ptr, num_rows_ptr, rows, num_tiles,
    BLOCK_M: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    used = tl.load(expert_ptr + tile) >= 0
    first, last = tl.load(first_ptr + tile), tl.load(last_ptr + tile)
    lane = tl.arange(0, LANES)
    row = tl.load(permuted_to_expanded_ptr + first + lane, mask=used & (first + lane < last), other=rows)
    tl.store(padded_ptr + tile * BLOCK_M + lane, row, mask=lane < BLOCK_M)
    # Tiles in use come first.
    following = tl.load(expert_ptr + tile + 1, mask=tile + 1 < num_tiles, other=-1) >= 0
    if used & (following == 0):
        tl.store(num_rows_ptr, (tile + 1) * BLOCK_M)
    if (tile == 0) & (used == 0):
        tl.store(num_rows_ptr, 0)


def activate_rows(
    gate_up_RN: Tensor, out_RF: Tensor, activation: dict[str, Any], ids_TA: Tensor, first_expert: int, experts: int,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Write the activation of rows [R, 2F] (gate, then up) or [R, F] to ``out_RF``.

    ``activation`` holds ACTIVATION, ALPHA, BETA and LIMIT of :func:`~.activation.activate`. ``scales``, float32 [E]
    each, multiply gate and up first, by the row's expert.
    """
    rows, columns = out_RF.shape
    gate_scales, up_scales = scales or (out_RF, out_RF)
    block = min(1024, triton.next_power_of_2(columns))
    _activate_rows[(rows, ceil_div(columns, block))](
        gate_up_RN, out_RF, ids_TA.contiguous(), gate_scales, up_scales, gate_scales.stride(0), columns, first_expert,
        experts, GATED=gate_up_RN.shape[1] != columns, SCALED=scales is not None, BLOCK=block, **activation,
        num_warps=4, **launch_options(),
    )  # fmt: skip


@triton.jit
def _activate_rows(
    in_ptr, out_ptr, ids_ptr, gate_scale_ptr, up_scale_ptr, scale_stride, columns, first_expert, experts,
    GATED: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    start = row * columns
    if GATED:
        start += start
    gate = tl.load(in_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if GATED:
        up = tl.load(in_ptr + start + columns + column, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        expert = tl.load(ids_ptr + row).to(tl.int64) - first_expert
        expert = tl.where((expert >= 0) & (expert < experts), expert, 0)  # rows of other ranks are never read
        gate *= tl.load(gate_scale_ptr + expert * scale_stride)
        up *= tl.load(up_scale_ptr + expert * scale_stride)
    h = activate(gate, up, ACTIVATION, ALPHA, BETA, LIMIT)
    tl.store(out_ptr + row * columns + column, h.to(out_ptr.dtype.element_ty), mask=inside)
