"""Layout ``w8a16_fragments``: MXFP8 weights that kernels decode to bfloat16 in registers.

Codes are in the order of :mod:`.w4a16_fragments`, in blocks of 32 columns, which are 2 KiB as well: a lane's four
words of a block are two of 16 columns and two of the next 16. Of 16j columns, the first word contains the columns 2t
and 2t + 1 of rows g and g + 8, and the second the columns 2t + 8 and 2t + 9 of both rows. A last block of 16 columns is
stored as 32 lanes of 8 bytes.

A word contains two registers of the instruction. The bits of the first one's codes are where bfloat16 has its sign, the
low bits of its exponent and the high bits of its mantissa; those of the second one's are scattered (:data:`E4M3_BITS`).
With two shifts and three masks both are numbers times 2**-120.

Scales: each block stores, for g = 0 to 7, for each tile, the E8M0 bytes of rows g and g + 8, biased as those of MXFP4.
A last group of rows is padded to four tiles. The product of code and scale is the weight times 2**-18, which the
epilogue undoes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.common.shapes import ceil_div, round_up
from polymoe.formats import FORMATS, Encoding, QuantTensor
from polymoe.layouts.cuda.bits import Columns, pack_words, unpack_words
from polymoe.layouts.cuda.matrices import (
    MatrixLayout,
    ScaleLimit,
    apart,
    interleave_gate_up,
    stacked,
    taller,
)
from polymoe.layouts.cuda.w4a16_fragments import E8M0_BIAS, E8M0_LIMIT, ROWS, TILE
from polymoe.problem.verdict import Reasons

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
"""Columns of a whole block, which share a scale."""

# Bit b of code n of a word goes to bit E4M3_BITS[8 * n + b]. The first register's codes are in place; of the second's,
# four bits are after << 4 and the sign too, and three after >> 4.
_REGISTERS = ((4, 5, 6, 7, 8, 9, 10, 15), (0, 1, 2, 3, 12, 13, 14, 11))
E4M3_BITS = tuple(bit + 16 * half for register in _REGISTERS for half in (0, 1) for bit in register)
"""Where the bits of four E4M3 codes lie in a word."""


@dataclass(frozen=True, slots=True)
class W8A16Fragments(MatrixLayout):
    """E4M3 weights with E8M0 scales for groups of 32 columns. The kernels ``w8a16_mma``, ``w8a16_mma_tiled`` and
    ``w8a16_wgmma`` read this layout."""

    name: str = "w8a16_fragments"
    multiple: ClassVar[int] = TILE
    group_rows: ClassVar[int] = ROWS
    stacks: ClassVar[bool] = True

    def check_encoding(self, reasons: Reasons, projection: str, encoding: Encoding) -> None:
        if reasons.need(encoding.element == "e4m3", f"{projection} elements", "e4m3", encoding.element):
            known = FORMATS["mxfp8"].encoding
            got = f"{encoding.granularity}, {encoding.scale_dtype}"
            same = (encoding.granularity, encoding.scale_dtype) == (known.granularity, known.scale_dtype)
            reasons.need(same, f"{projection} scales", f"{known.granularity}, {known.scale_dtype}", got)

    def scale_limit(self, encoding: Encoding) -> ScaleLimit | None:
        return E8M0_LIMIT

    def scale_bytes(self, encoding: Encoding, rows: int, columns: int) -> int:
        return round_up(rows, ROWS) * ceil_div(columns, BLOCK)

    def pack_matrix(self, halves: Sequence[QuantTensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        codes_HNK = stacked([q.codes.view(torch.uint8) for q in halves])
        scales_NG = interleave_gate_up([taller(q.scales).view(torch.uint8) for q in halves if q.scales is not None])
        padded = torch.nn.functional.pad(scales_NG, (0, 0, 0, -len(scales_NG) % ROWS))
        # group of rows, block, g, tile, h (row g or g + 8)
        scales = padded.unflatten(0, (-1, 4, 2, 8)).permute(0, 4, 3, 1, 2) + E8M0_BIAS
        largest = scales_NG.reshape(*halves[0].codes.shape[:-2], -1).amax(-1)
        return {
            "codes": pack_words(codes_HNK, _columns(codes_HNK.shape[2]), E4M3_BITS),
            "scales": scales.flatten(),
        }, largest

    def unpack_matrix(
        self, parts: Mapping[str, Tensor], encoding: Encoding, rows: int, columns: int, halves: int
    ) -> list[dict[str, Tensor]]:
        rows *= len(parts["codes"])
        shape = halves, rows // halves, columns
        codes_HNK = unpack_words(parts["codes"].flatten(), shape, _columns(columns), E4M3_BITS)
        scales = parts["scales"].flatten().view(-1, ceil_div(columns, BLOCK), 8, 4, 2) - E8M0_BIAS
        return apart(codes_HNK, {"scales": scales.permute(0, 3, 4, 2, 1).flatten(0, 3)[:rows]})


def _columns(row_bytes: int) -> tuple[Columns, Columns]:
    """Return whole blocks, and 16 columns behind them: split into block, j (16 columns), q (columns 0 or 8 on), t,
    column."""
    whole, order = row_bytes // BLOCK * BLOCK, (0, 4, 1, 3, 7, 5, 6, 2, 8)
    return Columns(0, whole, (-1, 2, 2, 4, 2), order), Columns(whole, row_bytes, (1, 1, 2, 4, 2), order)
