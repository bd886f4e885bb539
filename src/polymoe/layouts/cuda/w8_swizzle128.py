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
from polymoe.formats.elements import CODE_DTYPES, SCALE_DTYPES
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
        """Add a reason for other elements, blocks, dtypes of scales, global scales or zero points."""
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
        """Return the bytes of the scales of one packed matrix, in float32."""
        return (rows if _by_row(encoding) else rows // BLOCK * (columns // BLOCK)) * 4

    def pack_matrix(self, halves: Sequence[QuantTensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return packed codes, and scales as the bytes of float32; nothing is bounded."""
        codes = [q.codes.flatten(0, -2).view(torch.uint8) for q in halves]
        rows_NK = interleave_gate_up(codes) if len(codes) > 1 else exchange_rows(codes[0])
        each = [q.scales.float() for q in halves if q.scales is not None]
        if _by_row(halves[0].encoding):
            by_row = [
                s.reshape(*q.codes.shape[:-2], -1, 1).expand(*q.codes.shape[:-1], 1).contiguous().flatten(0, -2)
                for s, q in zip(each, halves, strict=True)
            ]
            scales = interleave_gate_up(by_row) if len(by_row) > 1 else exchange_rows(by_row[0])
        else:
            scales = torch.cat([scales.flatten(-2) for scales in each], -1)
        return {"codes": pack_codes(rows_NK), "scales": scales.flatten().view(torch.uint8)}, None

    def unpack_matrix(
        self, parts: Mapping[str, Tensor], encoding: Encoding, rows: int, columns: int, halves: int
    ) -> list[dict[str, Tensor]]:
        """Return codes and scales of each projection, in their original dtypes."""
        rows_NK = unpack_codes(parts["codes"].flatten(), rows * len(parts["codes"]), columns)
        codes = deinterleave_gate_up(rows_NK, halves) if halves > 1 else [exchange_rows(rows_NK, inverse=True)]
        assert encoding.granularity is not None
        grid = encoding.granularity.scale_shape(rows // halves, columns)
        scales = parts["scales"].view(torch.float32).to(SCALE_DTYPES[encoding.scale_dtype or ""])
        if _by_row(encoding):
            rows_N1 = scales.flatten()[:, None]
            each = deinterleave_gate_up(rows_N1, halves) if halves > 1 else [exchange_rows(rows_N1, inverse=True)]
            if encoding.granularity == PerTensor():
                each = [half[:: rows // halves].contiguous() for half in each]
        else:
            each = [half.flatten(0, 1) for half in scales.view(-1, halves, *grid).unbind(1)]
        dtype = CODE_DTYPES[encoding.element]
        return [{"codes": c.view(dtype), "scales": s} for c, s in zip(codes, each, strict=True)]


def _by_row(encoding: Encoding) -> bool:
    """Return whether scales are stored for each row."""
    return encoding.granularity in (PerChannel(), PerTensor())


def pack_codes(codes_NK: Tensor) -> Tensor:
    """Pack the codes of a matrix in the order that the module describes: uint8 [N, K] to [N * K]."""
    whole = codes_NK.shape[0] // _ROWS * _ROWS
    parts = [swizzled(_blocks(rows)).flatten() for rows in codes_NK.contiguous().tensor_split([whole]) if len(rows)]
    return torch.cat(parts).view(torch.uint8)


def unpack_codes(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Return the codes, uint8 [rows, columns]: the inverse of :func:`pack_codes`."""
    whole = rows // _ROWS * _ROWS
    natural = torch.empty(rows, columns, dtype=torch.uint8, device=packed.device)
    pieces = packed.tensor_split([whole * columns])
    for part, piece in zip(natural.tensor_split([whole]), pieces, strict=True):
        if len(part):
            places = _blocks(part)
            places.copy_(swizzled(piece.view(torch.int64).view(places.shape)))
    return natural


def _blocks(rows_NK: Tensor) -> Tensor:
    """View codes [N, K] as [tiles, blocks, rows, 8 pieces, 2 words of 8 bytes]."""
    words = rows_NK.view(torch.int64).unflatten(1, (-1, BLOCK // 16, 2))
    return words.unflatten(0, (-1, min(len(words), _ROWS))).transpose(1, 2)
