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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.formats import Encoding, QuantTensor
from polymoe.formats.elements import CODE_DTYPES
from polymoe.layouts.cuda.matrices import (
    MatrixLayout,
    deinterleave_gate_up,
    exchange_rows,
    interleave_gate_up,
    swizzled,
)
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
        """Add a reason unless elements are bfloat16."""
        reasons.need(encoding.element == "bf16", f"{projection} elements", "bf16", encoding.element)

    def scale_bytes(self, encoding: Encoding, rows: int, columns: int) -> int:
        """Return 0: there are no scales."""
        return 0

    def pack_matrix(self, halves: Sequence[QuantTensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the packed weights as ``codes``; nothing is bounded."""
        rows = [q.codes.flatten(0, -2).view(torch.uint8) for q in halves]
        rows_NB = interleave_gate_up(rows) if len(rows) > 1 else exchange_rows(rows[0])
        return {"codes": pack_tiles(rows_NB)}, None

    def unpack_matrix(
        self, parts: Mapping[str, Tensor], encoding: Encoding, rows: int, columns: int, halves: int
    ) -> list[dict[str, Tensor]]:
        """Return the weights of each projection, without scales."""
        rows_NB = unpack_tiles(parts["codes"].flatten(), rows * len(parts["codes"]), 2 * columns)
        codes = deinterleave_gate_up(rows_NB, halves) if halves > 1 else [exchange_rows(rows_NB, inverse=True)]
        return [{"codes": part.view(CODE_DTYPES[encoding.element])} for part in codes]


def pack_tiles(rows_NB: Tensor) -> Tensor:
    """Pack a matrix in the order that the module describes: uint8 [N, bytes] to [N * bytes]; bytes % 16 must be 0."""
    whole = rows_NB.shape[0] // _ROWS * _ROWS
    parts = []
    for piece, rows in ((rows_NB[:whole], _ROWS), (rows_NB[whole:], rows_NB.shape[0] - whole)):
        if len(piece):
            words = piece.contiguous().view(torch.int64).unflatten(0, (-1, rows)).unflatten(2, (-1, _PIECE // 8))
            blocks = words.shape[2] // 8
            inner = words[:, :, : 8 * blocks].unflatten(2, (blocks, 8)).transpose(1, 2)
            tail = words[:, :, 8 * blocks :].transpose(1, 2)
            parts.append(torch.cat([swizzled(inner).flatten(1), tail.flatten(1)], 1).flatten())
    return torch.cat(parts).view(torch.uint8)


def unpack_tiles(packed: Tensor, rows: int, row_bytes: int) -> Tensor:
    """Return the matrix, uint8 [rows, row_bytes]: the inverse of :func:`pack_tiles`."""
    whole, blocks = rows // _ROWS * _ROWS, row_bytes // _BLOCK
    parts = []
    for piece, size in zip(
        packed.split([whole * row_bytes, (rows - whole) * row_bytes]), (_ROWS, rows - whole), strict=True
    ):
        if len(piece):
            groups = piece.view(torch.int64).view(-1, size * row_bytes // 8)
            inner, tail = groups.split([blocks * size * _BLOCK // 8, size * (row_bytes - blocks * _BLOCK) // 8], 1)
            inner = swizzled(inner.unflatten(1, (blocks, size, 8, 2))).transpose(1, 2).flatten(2)
            tail = tail.unflatten(1, (-1, size, 2)).transpose(1, 2).flatten(2)
            parts.append(torch.cat([inner, tail], 2).flatten(0, 1))
    return torch.cat(parts).view(torch.uint8)
