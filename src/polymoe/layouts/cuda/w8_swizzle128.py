"""Layout ``w8_swizzle128``: E4M3 weights as ``wgmma`` reads them from shared memory, swizzled by 128 bytes.

The matrix is cut into tiles of 256 rows (the last may have 128), and each tile into blocks of 128 columns, 128 bytes
per row. A block is stored row by row. Piece p (16 bytes) of row r in the block is piece ``p ^ (r % 8)`` of that row in
the matrix, as in :mod:`.w16_swizzle128`. So ``wgmma`` reads a block where a bulk copy left it, and ``ldmatrix`` brings
it into the registers of kernels that convert codes: four neighbouring columns a lane.

Rows are interleaved or permuted as in :mod:`.w16_swizzle128`. Scales are stored as float32. Those for 128 x 128 weights
are in their natural order, and those of the gate come before those of up. One scale for a row lies where its row does;
one for a whole matrix is stored for each of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.formats import Encoding, PerChannel, PerGroup, PerTensor, QuantTensor
from polymoe.formats.elements import SCALE_DTYPES
from polymoe.layouts.cuda.matrices import MatrixLayout, natural_rows, packed_rows
from polymoe.layouts.cuda.w16_swizzle128 import pack_tiles, unpack_tiles
from polymoe.problem.verdict import Reasons

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128
"""Rows and columns must be multiples of this."""

_ROWS = 256


@dataclass(frozen=True, slots=True)
class W8Swizzle128(MatrixLayout):
    """E4M3 weights with a scale for each 128 x 128, each row or the matrix. Read by the kernels ``w8a8_mma``,
    ``w8a8_f16`` and ``w8a8``, or where scales are not for 128 x 128 by ``w8a8_mma_channel`` and so on."""

    name: str = "w8_swizzle128"
    multiple: ClassVar[int] = BLOCK
    group_rows: ClassVar[int] = _ROWS
    stacks: ClassVar[bool] = True

    def check_encoding(self, reasons: Reasons, projection: str, encoding: Encoding) -> None:
        if not reasons.need(encoding.element == "e4m3", f"{projection} elements", "e4m3", encoding.element):
            return
        granularity = encoding.granularity
        known = granularity in (PerGroup(BLOCK, BLOCK), PerChannel(), PerTensor())
        expected = "one for 128 x 128 weights, a row or the matrix"
        reasons.need(known, f"{projection} scales", expected, str(granularity))
        fits = encoding.scale_dtype in ("float32", "bfloat16", "float16", "e8m0")
        reasons.need(fits, f"{projection} scales", "float32, bfloat16, float16 or e8m0", f"{encoding.scale_dtype}")
        reasons.need(not encoding.global_scale, f"{projection} global scale")
        reasons.need(not encoding.zero_points, f"{projection} zero points")

    def scale_bytes(self, encoding: Encoding, rows: int, columns: int) -> int:
        return (rows if _by_row(encoding) else rows // BLOCK * (columns // BLOCK)) * 4

    def pack_matrix(self, halves: Sequence[QuantTensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        rows_NK = packed_rows([q.codes.flatten(0, -2).view(torch.uint8) for q in halves])
        each = [q.scales.float() for q in halves if q.scales is not None]
        if _by_row(halves[0].encoding):
            scales = packed_rows([
                s.reshape(*q.codes.shape[:-2], -1, 1).expand(*q.codes.shape[:-1], 1).contiguous().flatten(0, -2)
                for s, q in zip(each, halves, strict=True)
            ])  # fmt: skip
        else:
            scales = torch.cat([scales.flatten(-2) for scales in each], -1)
        return {"codes": pack_tiles(rows_NK, _ROWS), "scales": scales.flatten().view(torch.uint8)}, None

    def unpack_matrix(
        self, parts: Mapping[str, Tensor], encoding: Encoding, rows: int, columns: int, halves: int
    ) -> list[dict[str, Tensor]]:
        rows_NK = unpack_tiles(parts["codes"].flatten(), rows * len(parts["codes"]), columns, _ROWS)
        codes = natural_rows(rows_NK, halves)
        assert encoding.granularity is not None
        grid = encoding.granularity.scale_shape(rows // halves, columns)
        scales = parts["scales"].view(torch.float32).to(SCALE_DTYPES[encoding.scale_dtype or ""])
        if _by_row(encoding):
            each = natural_rows(scales.flatten()[:, None], halves)
            if encoding.granularity == PerTensor():
                each = [half[:: rows // halves].contiguous() for half in each]
        else:
            each = [half.flatten(0, 1) for half in scales.view(-1, halves, *grid).unbind(1)]
        return [{"codes": c, "scales": s} for c, s in zip(codes, each, strict=True)]


def _by_row(encoding: Encoding) -> bool:
    """Return whether scales are stored for each row."""
    return encoding.granularity in (PerChannel(), PerTensor())
