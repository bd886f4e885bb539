"""Permute, the first launch: expanded rows sorted by expert, work tiles, and x in operand order.

Expanded row r = t * A + a is choice a of token t. Permuted rows are sorted by expert. Rows of other ranks' experts come
last and belong to no work tile. The sort is stable, so results do not depend on timing.
"""

# Kernel arguments are not what a type checker takes them for.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

from torch import Tensor

import triton
import triton.language as tl
from polymoe.kernels.triton.activation import ceil_div, launch_options, pdl_wait_and_launch
from polymoe.kernels.triton.quantize import AS_GIVEN, Operand, Quantization, convert_rows

_BLOCK = 512
"""Rows of a block. With more than one block, a separate launch counts each block's rows by expert."""
_ROWS, _MAX_ROWS = 32, 128
_TILES = 8
"""Rows and work tiles of one CTA. It places more rows where it must read the counts of many blocks."""


class Permutation:
    """The expanded row of each permuted row, and the work tiles. All tensors are int32.

    Attributes:
        permuted_to_expanded_R: index of the expanded row.
        tile_expert: expert of each work tile, -1 where the tile is unused.
        tile_first: its first permuted row.
        tile_last: the permuted row after its last.
        num_tiles: length of the ``tile_`` tensors.
    """

    def __init__(
        self, permuted_to_expanded_R: Tensor, tile_expert: Tensor, tile_first: Tensor, tile_last: Tensor
    ) -> None:
        self.permuted_to_expanded_R, self.tile_expert = permuted_to_expanded_R, tile_expert
        self.tile_first, self.tile_last = tile_first, tile_last
        self.num_tiles = tile_expert.numel()


def max_tiles(rows: int, experts: int, block_m: int) -> int:
    """Return the most work tiles of ``block_m`` rows that ``rows`` expanded rows can need, for any routing."""
    return min(experts, rows) + rows // block_m


def _blocks(rows: int) -> tuple[int, int]:
    """Return the rows of a block, and the number of blocks."""
    block: int = min(_BLOCK, max(16, triton.next_power_of_2(rows)))
    return block, ceil_div(rows, block)


def _words(rows: int, experts: int, block_m: int) -> list[int]:
    """Return the words of each array in the buffer: of the rows, of each tensor of tiles, and of the counts.

    Each array begins at a multiple of 16 bytes. For other addresses Triton would compile the kernels again.
    """
    tiles, (_, blocks) = max_tiles(rows, experts, block_m), _blocks(rows)
    counts = blocks * triton.next_power_of_2(experts + 1) if blocks > 1 else 0
    return [ceil_div(words, 4) * 4 for words in (rows, tiles, tiles, tiles, counts)]


def permutation_words(rows: int, experts: int, block_m: int) -> int:
    """Return the length of the buffer for :func:`permute`."""
    return sum(_words(rows, experts, block_m))


def permute(
    buffer: Tensor, ids_TA: Tensor, first_expert: int, experts: int, block_m: int, x_TH: Tensor | None = None,
    operand: Operand | None = None, quantization: Quantization = AS_GIVEN, *, pdl: bool = False,
) -> Permutation:  # fmt: skip
    """Sort expanded rows by expert, on the ids' device, without synchronizing.

    The same launch converts x to ``operand``: one row for each token, or with static quantization one for each expanded
    row. The permutation is in ``buffer``, int32 [:func:`permutation_words`].
    """
    rows, top_k = ids_TA.numel(), ids_TA.shape[1]
    ids = ids_TA.contiguous()
    num_tiles = max_tiles(rows, experts, block_m)
    *parts, counts = buffer.split(_words(rows, experts, block_m))
    permuted_to_expanded, expert, first, last = (
        part[:size] for part, size in zip(parts, (rows, num_tiles, num_tiles, num_tiles), strict=True)
    )
    bins = triton.next_power_of_2(experts + 1)
    block, blocks = _blocks(rows)
    if blocks > 1:
        _count_rows[(blocks,)](
            ids, counts, rows, first_expert, experts, BLOCK=block, BINS=bins, PDL=pdl, **launch_options(pdl)
        )
    else:
        counts = permuted_to_expanded  # not read
    rows_per_program = _ROWS if blocks <= 4 else _MAX_ROWS
    programs = max(ceil_div(rows, rows_per_program), ceil_div(num_tiles, _TILES))
    x = values = scales = static = ids
    extra, ctas_per_row, x_rows, x_row, x_column, per_row = 0, 1, 0, 0, 0, 1
    constants = {"MODE": "none", "GROUP": 16, "PLANES": 1, "BLOCK_X": 16, "ROWS_X": 1}
    if operand is not None:
        assert x_TH is not None
        x, values, scales, ctas_per_row = x_TH, operand.values, operand.scales, operand.ctas_per_row
        (x_row, x_column), x_rows, extra = x_TH.stride(), values.shape[0], operand.programs
        constants = {f"{k}_X" if k in ("BLOCK", "ROWS") else k: v for k, v in operand.constants.items()}
        if quantization.static_E is not None:
            static, per_row = quantization.static_E, top_k
    _permute[(programs + extra,)](
        ids, counts, permuted_to_expanded, expert, first, last, rows, first_expert, experts, blocks, num_tiles,
        programs, x, values, scales, static, x_rows, x_TH.shape[1] if x_TH is not None else 1, x_row, x_column,
        per_row, ctas_per_row,
        BLOCK=block, BINS=bins, BLOCK_M=block_m, SINGLE=blocks == 1, ROWS=rows_per_program, TILES=_TILES,
        CONVERT=operand is not None, PDL=pdl, **constants, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return Permutation(permuted_to_expanded, expert, first, last)


@triton.jit
def _local(ids_ptr, row, rows, first_expert, experts):
    """Return each row's expert as an index into this rank's experts; ``experts`` for others and beyond the rows."""
    ids = tl.load(ids_ptr + row, mask=row < rows, other=-1).to(tl.int64) - first_expert
    return tl.where((ids >= 0) & (ids < experts), ids, experts).to(tl.int32)


# Arguments that depend on the number of tokens: Triton must not compile again for multiples of 16.
@triton.jit(do_not_specialize=["rows"])
def _count_rows(
    ids_ptr, counts_ptr, rows, first_expert, experts,
    BLOCK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait_and_launch(PDL)
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    ids = _local(ids_ptr, row, rows, first_expert, experts)
    counts = tl.histogram(ids, BINS, mask=row < rows)
    tl.store(counts_ptr + block * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["rows", "blocks", "num_tiles", "programs", "x_rows"])
def _permute(
    ids_ptr, counts_ptr, permuted_to_expanded_ptr, expert_ptr, first_ptr, last_ptr, rows, first_expert, experts, blocks,
    num_tiles, programs, x_ptr, values_ptr, scale_ptr, static_ptr, x_rows, columns, x_row, x_column, per_row,
    ctas_per_row,
    BLOCK: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, SINGLE: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, CONVERT: tl.constexpr, PDL: tl.constexpr,
    MODE: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr, BLOCK_X: tl.constexpr,
    ROWS_X: tl.constexpr,
):  # fmt: skip
    """The first ``programs`` CTAs sort rows and write work tiles, the others convert rows of x."""
    pdl_wait_and_launch(PDL)
    program = tl.program_id(0)
    if program < programs:
        _place_rows(
            program, ids_ptr, counts_ptr, permuted_to_expanded_ptr, expert_ptr, first_ptr, last_ptr, rows, first_expert,
            experts, blocks, num_tiles, BLOCK, BINS, BLOCK_M, SINGLE, ROWS, TILES,
        )  # fmt: skip
    elif CONVERT:
        row = (program - programs) // ctas_per_row * ROWS_X + tl.arange(0, ROWS_X)
        convert_rows(
            row, row // per_row, row, (program - programs) % ctas_per_row, x_ptr, values_ptr, scale_ptr, static_ptr,
            ids_ptr, x_rows, columns, 0, 0, x_row, x_column, first_expert, experts,
            1, False, "none", 1.0, 0.0, 0.0, MODE, GROUP, PLANES, BLOCK_X, ROWS_X,
        )  # fmt: skip


@triton.jit
def _place_rows(
    program, ids_ptr, counts_ptr, permuted_to_expanded_ptr, expert_ptr, first_ptr, last_ptr, rows, first_expert,
    experts, blocks, num_tiles,
    BLOCK: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, SINGLE: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Place ROWS rows from ``program * ROWS``, and write TILES work tiles from ``program * TILES``."""
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
        # A row comes after the rows of its block that have the same expert and a smaller index.
        STEP: tl.constexpr = 16
        start = block * BLOCK
        while start < program * ROWS + ROWS:
            other = start + tl.arange(0, STEP)
            other_ids = _local(ids_ptr, other, rows, first_expert, experts)
            same = (other_ids[None, :] == ids[:, None]) & (other[None, :] < row[:, None])
            rank += tl.sum(same.to(tl.int32), 1)
            start += STEP
        tl.store(permuted_to_expanded_ptr + rank, row, mask=row < rows)

    if program * TILES < num_tiles:
        per_expert = tl.where(bins < experts, (total + BLOCK_M - 1) // BLOCK_M, 0)
        tile_end = tl.cumsum(per_expert, 0)
        tile = program * TILES + tl.arange(0, TILES)
        passed = (tile_end[None, :] <= tile[:, None]) & (bins < experts)[None, :]
        expert = tl.sum(passed.to(tl.int32), 1)
        mine = bins[None, :] == expert[:, None]
        first = tl.sum(tl.where(mine, (offset - (tile_end - per_expert) * BLOCK_M)[None, :], 0), 1) + tile * BLOCK_M
        last = tl.sum(tl.where(mine, (offset + total)[None, :], 0), 1)
        tl.store(expert_ptr + tile, tl.where(expert < experts, expert, -1), mask=tile < num_tiles)
        tl.store(first_ptr + tile, first, mask=tile < num_tiles)
        tl.store(last_ptr + tile, tl.minimum(last, first + BLOCK_M), mask=tile < num_tiles)
