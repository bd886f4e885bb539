"""Layout ``w16_swizzle128``: bfloat16 weights as ``wgmma`` reads them from shared memory, swizzled by 128 bytes.

The matrix is cut into groups of 64 rows (the last may have 16, 32 or 48), and each group into blocks of 64 columns, 128
bytes per row. A block is stored row by row. Piece p (16 bytes) of row r in the block is piece ``p ^ (r % 8)`` of that
row in the matrix. The PTX ISA calls this order 128-byte swizzle; it avoids bank conflicts. Columns beyond the last
whole block are stored piece by piece, each with all rows of the group. There are no gaps between groups.

Rows: a thread of the MMA has rows g and g + 8 of 16. With a gate, ``up`` interleaves gate and up, so that a thread has
both inputs of the activation. Rows of other matrices are permuted by
:func:`~polymoe.layouts.cuda.matrices.exchange_rows`, so that a thread stores four neighbouring results at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.formats import Encoding, QuantTensor
from polymoe.layouts.cuda.matrices import MatrixLayout, natural_rows, packed_rows
from polymoe.problem.verdict import Reasons

if TYPE_CHECKING:
    from torch import Tensor

_ROWS, _BLOCK, _PIECE = 64, 128, 16


@dataclass(frozen=True, slots=True)
class W16Swizzle128(MatrixLayout):
    """bfloat16 weights, read by the kernels ``bf16``."""

    name: str = "w16_swizzle128"
    multiple: ClassVar[int] = 16
    group_rows: ClassVar[int] = _ROWS
    stacks: ClassVar[bool] = True

    def check_encoding(self, reasons: Reasons, projection: str, encoding: Encoding) -> None:
        reasons.need(encoding.element == "bf16", f"{projection} elements", "bf16", encoding.element)

    def scale_bytes(self, encoding: Encoding, rows: int, columns: int) -> int:
        return 0

    def pack_matrix(self, halves: Sequence[QuantTensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        rows_NB = packed_rows([q.codes.flatten(0, -2).view(torch.uint8) for q in halves])
        return {"codes": pack_tiles(rows_NB, _ROWS)}, None

    def unpack_matrix(
        self, parts: Mapping[str, Tensor], encoding: Encoding, rows: int, columns: int, halves: int
    ) -> list[dict[str, Tensor]]:
        rows_NB = unpack_tiles(parts["codes"].flatten(), rows * len(parts["codes"]), 2 * columns, _ROWS)
        return [{"codes": part} for part in natural_rows(rows_NB, halves)]


def pack_tiles(rows_NB: Tensor, height: int) -> Tensor:
    """Pack a matrix in the order that the module describes, with groups of ``height`` rows: uint8 [N, bytes] to
    [N * bytes]; bytes % 16 must be 0."""
    packed = rows_NB.new_empty(rows_NB.numel())
    for natural, place, swizzles in _views(rows_NB.contiguous(), packed, height):
        place.copy_(swizzled(natural) if swizzles else natural)
    return packed


def unpack_tiles(packed: Tensor, rows: int, row_bytes: int, height: int) -> Tensor:
    """Return the matrix, uint8 [rows, row_bytes]: the inverse of :func:`pack_tiles`."""
    rows_NB = packed.new_empty(rows, row_bytes)
    for natural, place, swizzles in _views(rows_NB, packed, height):
        natural.copy_(swizzled(place) if swizzles else place)
    return rows_NB


def _views(rows_NB: Tensor, packed: Tensor, height: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield views of the same words of 8 bytes in a matrix and in the packed one, and whether one of them is to be
    swizzled: [groups, blocks, rows, 8 pieces, 2] of whole blocks, and [groups, pieces, rows, 2] of columns behind."""
    whole, (_, row_bytes) = len(rows_NB) // height * height, rows_NB.shape
    blocks = row_bytes // _BLOCK
    for rows, piece in zip(rows_NB.tensor_split([whole]), packed.tensor_split([whole * row_bytes]), strict=True):
        if len(rows):
            size = min(len(rows), height)
            natural = rows.view(torch.int64).unflatten(0, (-1, size)).unflatten(2, (-1, _PIECE // 8)).transpose(1, 2)
            places = piece.view(torch.int64).view(len(natural), -1)
            inner = blocks * size * _BLOCK // 8
            if blocks:
                in_blocks = natural[:, : 8 * blocks].unflatten(1, (blocks, 8)).transpose(2, 3)
                yield in_blocks, places[:, :inner].unflatten(1, in_blocks.shape[1:]), True
            if row_bytes % _BLOCK:
                behind = natural[:, 8 * blocks :]
                yield behind, places[:, inner:].unflatten(1, behind.shape[1:]), False


def swizzled(blocks: Tensor) -> Tensor:
    """Return blocks [groups, blocks, rows, 8 pieces, words] with piece p of row r where piece ``p ^ (r % 8)`` was: the
    PTX ISA's 128-byte swizzle. Rows must be a multiple of 8. The permutation is its own inverse."""
    row, piece = (index.to(blocks.device) for index in _swizzle())
    return blocks.unflatten(2, (-1, 8))[:, :, :, row, piece].flatten(2, 3)


@cache
def _swizzle() -> tuple[Tensor, Tensor]:
    """Return which row and which piece each of 8 rows and 8 pieces has, on the CPU."""
    row, piece = torch.meshgrid(*(torch.arange(8, device="cpu"),) * 2, indexing="ij")
    return row, piece ^ row
