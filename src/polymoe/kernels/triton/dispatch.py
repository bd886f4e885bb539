"""The first launch: which routed rows go to which expert, and x in operand order.

Routed row r = t * A + a. Rows are sorted by expert; those whose id is not one of this rank's experts come last and
belong to no tile. Sorting is stable, so results do not depend on timing.
"""

# Kernel arguments are not what a type checker takes them for.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from polymoe.kernels.triton.activation import chain
from polymoe.kernels.triton.rows import UNQUANTIZED, Operand, Quantization, convert_rows, pdl

__all__ = ["Dispatch", "dispatch", "tile_bound"]

_SINGLE = 512
"""Rows of a block. More rows than one block take a launch of their own that counts each block's."""
_ROWS, _MOST_ROWS = 32, 128
_TILES = 8
"""Rows placed and tiles described by one program: more rows where each program reads the counts of many blocks."""


class Dispatch:
    """Rows in expert order, and for each tile its expert (-1: unused), first row and row past the last."""

    def __init__(self, order_R: Tensor, tile_expert: Tensor, tile_first: Tensor, tile_last: Tensor) -> None:
        self.order_R, self.tile_expert, self.tile_first, self.tile_last = order_R, tile_expert, tile_first, tile_last
        self.tiles = tile_expert.numel()


def tile_bound(rows: int, experts: int, block_t: int) -> int:
    """Most tiles of ``block_t`` rows that ``rows`` routed rows can need, however they are spread."""
    return min(experts, rows) + rows // block_t


def dispatch(
    ids_TA: Tensor, first_expert: int, experts: int, block_t: int, x_TH: Tensor | None = None,
    operand: Operand | None = None, quantization: Quantization = UNQUANTIZED, *, chained: bool = False,
) -> Dispatch:  # fmt: skip
    """Sort routed rows by expert, on the ids' device, without synchronizing.

    In the same launch, x goes to ``operand``: row by row, or with a static quantization each token once a slot.
    """
    rows, slots = ids_TA.numel(), ids_TA.shape[1]
    ids = ids_TA.contiguous()
    tiles = tile_bound(rows, experts, block_t)
    # Each part begins at a multiple of 16 bytes: kernels are compiled once more for addresses that do not.
    sizes = (rows, tiles, tiles, tiles)
    spaces = [triton.cdiv(size, 4) * 4 for size in sizes]
    work = torch.empty(sum(spaces), dtype=torch.int32, device=ids.device)
    order, expert, first, last = (part[:size] for part, size in zip(work.split(spaces), sizes, strict=True))
    bins = triton.next_power_of_2(experts + 1)
    block = min(_SINGLE, max(16, triton.next_power_of_2(rows)))
    blocks = triton.cdiv(rows, block)
    counts = order
    if blocks > 1:
        counts = torch.empty(blocks, bins, dtype=torch.int32, device=ids.device)
        _count[(blocks,)](
            ids, counts, rows, first_expert, experts, BLOCK=block, BINS=bins, CHAINED=chained, **pdl(chained)
        )
    placed = _ROWS if blocks <= 4 else _MOST_ROWS
    programs = max(triton.cdiv(rows, placed), triton.cdiv(tiles, _TILES))
    x = values = scales = static = ids
    extra, parts, x_rows, x_row, x_column, per_row = 0, 1, 0, 0, 0, 1
    constants = {"MODE": "none", "GROUP": 16, "PLANES": 1, "BLOCK_X": 16, "ROWS_X": 1}
    if operand is not None:
        assert x_TH is not None
        x, values, scales, parts = x_TH, operand.values, operand.scales, operand.parts
        (x_row, x_column), x_rows, extra = x_TH.stride(), values.shape[0], operand.programs
        constants = {f"{k}_X" if k in ("BLOCK", "ROWS") else k: v for k, v in operand.constants.items()}
        if quantization.static_E is not None:
            static, per_row = quantization.static_E, slots
    _start[(programs + extra,)](
        ids, counts, order, expert, first, last, rows, first_expert, experts, blocks, tiles, programs,
        x, values, scales, static, x_rows, x_TH.shape[1] if x_TH is not None else 1, x_row, x_column, per_row, parts,
        BLOCK=block, BINS=bins, BLOCK_T=block_t, SINGLE=blocks == 1, ROWS=placed, TILES=_TILES,
        CONVERT=operand is not None, CHAINED=chained, **constants, num_warps=4, **pdl(chained),
    )  # fmt: skip
    return Dispatch(order, expert, first, last)


@triton.jit
def _local(ids_ptr, row, rows, first_expert, experts):
    """This rank's number of each row's expert; ``experts`` where it has none, ``experts`` beyond the rows too."""
    ids = tl.load(ids_ptr + row, mask=row < rows, other=-1).to(tl.int64) - first_expert
    return tl.where((ids >= 0) & (ids < experts), ids, experts).to(tl.int32)


# Numbers that change with the number of tokens: kernels are not compiled again for those that 16 divides.
@triton.jit(do_not_specialize=["rows"])
def _count(
    ids_ptr, counts_ptr, rows, first_expert, experts,
    BLOCK: tl.constexpr, BINS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    chain(CHAINED)
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    ids = _local(ids_ptr, row, rows, first_expert, experts)
    counts = tl.histogram(ids, BINS, mask=row < rows)
    tl.store(counts_ptr + block * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["rows", "blocks", "tiles", "programs", "x_rows"])
def _start(
    ids_ptr, counts_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, rows, first_expert, experts, blocks, tiles,
    programs, x_ptr, values_ptr, scale_ptr, static_ptr, x_rows, columns, x_row, x_column, per_row, parts,
    BLOCK: tl.constexpr, BINS: tl.constexpr, BLOCK_T: tl.constexpr, SINGLE: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, CONVERT: tl.constexpr, CHAINED: tl.constexpr,
    MODE: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr, BLOCK_X: tl.constexpr,
    ROWS_X: tl.constexpr,
):  # fmt: skip
    """The first ``programs`` programs place rows and describe tiles, the others convert rows of x."""
    chain(CHAINED)
    program = tl.program_id(0)
    if program < programs:
        _place(
            program, ids_ptr, counts_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, rows, first_expert, experts,
            blocks, tiles, BLOCK, BINS, BLOCK_T, SINGLE, ROWS, TILES,
        )  # fmt: skip
    elif CONVERT:
        row = (program - programs) // parts * ROWS_X + tl.arange(0, ROWS_X)
        convert_rows(
            row, row // per_row, row, (program - programs) % parts, x_ptr, values_ptr, scale_ptr, static_ptr, ids_ptr,
            x_rows, columns, 0, 0, x_row, x_column, first_expert, experts,
            1, False, "none", 1.0, 0.0, 0.0, MODE, GROUP, PLANES, BLOCK_X, ROWS_X,
        )  # fmt: skip


@triton.jit
def _place(
    program, ids_ptr, counts_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, rows, first_expert, experts, blocks,
    tiles,
    BLOCK: tl.constexpr, BINS: tl.constexpr, BLOCK_T: tl.constexpr, SINGLE: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Program p places rows ``p * ROWS`` and on, and describes tiles ``p * TILES`` and on."""
    row = program * ROWS + tl.arange(0, ROWS)
    block = program * ROWS // BLOCK
    bins = tl.arange(0, BINS)
    if SINGLE:
        every = tl.arange(0, BLOCK)
        total = tl.histogram(_local(ids_ptr, every, rows, first_expert, experts), BINS, mask=every < rows)
        before = tl.zeros((BINS,), tl.int32)
    else:
        total = tl.zeros((BINS,), tl.int32)
        before = tl.zeros((BINS,), tl.int32)
        CHUNK: tl.constexpr = 8
        start = 0
        while start < blocks:
            b = start + tl.arange(0, CHUNK)
            counts = tl.load(counts_ptr + b[:, None] * BINS + bins[None, :], mask=(b < blocks)[:, None], other=0)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where((b < block)[:, None], counts, 0), 0)
            start += CHUNK
    offset = tl.cumsum(total, 0) - total

    if program * ROWS < rows:
        ids = _local(ids_ptr, row, rows, first_expert, experts)
        rank = tl.gather(offset + before, ids, 0)
        # A row comes after the rows of its block that have the same expert and a smaller number.
        STEP: tl.constexpr = 16
        start = block * BLOCK
        while start < program * ROWS + ROWS:
            other = start + tl.arange(0, STEP)
            other_ids = _local(ids_ptr, other, rows, first_expert, experts)
            same = (other_ids[None, :] == ids[:, None]) & (other[None, :] < row[:, None])
            rank += tl.sum(same.to(tl.int32), 1)
            start += STEP
        tl.store(order_ptr + rank, row, mask=row < rows)

    if program * TILES < tiles:
        per_expert = tl.where(bins < experts, (total + BLOCK_T - 1) // BLOCK_T, 0)
        tile_end = tl.cumsum(per_expert, 0)
        tile = program * TILES + tl.arange(0, TILES)
        passed = (tile_end[None, :] <= tile[:, None]) & (bins < experts)[None, :]
        expert = tl.sum(passed.to(tl.int32), 1)
        mine = bins[None, :] == expert[:, None]
        first = tl.sum(tl.where(mine, (offset - (tile_end - per_expert) * BLOCK_T)[None, :], 0), 1) + tile * BLOCK_T
        last = tl.sum(tl.where(mine, (offset + total)[None, :], 0), 1)
        tl.store(expert_ptr + tile, tl.where(expert < experts, expert, -1), mask=tile < tiles)
        tl.store(first_ptr + tile, first, mask=tile < tiles)
        tl.store(last_ptr + tile, tl.minimum(last, first + BLOCK_T), mask=tile < tiles)
