"""Layout ``w4a8_fragments``: MXFP4 and INT4 weights for rows of x in E4M3, in the order of the A operand of ``wgmma``
m64k32.

A lookup in a table of eight magnitudes yields each MXFP4 weight in E4M3 with its scale applied. INT4 weights yield a
code less its zero point, which E4M3 represents exactly; their scales multiply sums of 128 columns.

Codes: as in :mod:`.w4a16_fragments`, the matrix is cut into groups of 64 rows, blocks of 64 columns and tiles of 16
rows. Lane ``4 * g + t`` of a warp has rows g and g + 8 of a tile. Its four words of a block are row g and row g + 8 of
the first 32 columns, then of the other 32. A word contains columns 4t to 4t + 3 (``first``) and the
same 16 columns further on (``second``). The three low bits of the eight codes are in the word's eight nibbles, where
one byte permutation uses four of them as indices into the table. The signs are the nibbles' fourth bits: those of
``second`` where E4M3 has them, those of ``first`` four bits lower (:data:`BITS`).

INT4 codes with zero points are stored the same way: the fourth bits are those of the index into a table of 16. Without
zero points, a code less 8 is stored as a sign and i, for i or -(i + 1), where E4M3 has the sign and the three lowest
bits; ``second``'s are there after a rotation by four (:data:`SIGNED_BITS`).

Scales of MXFP4: a weight's scale is the largest of its row times 2**-step. Steps are stored times 8, the size of a
table. Each block stores, for g = 0 to 7, for each tile, for each of two groups of 32 columns, the bytes of rows g and g
+ 8. A last group of rows is padded to four tiles. The E8M0 byte of each row's largest scale follows after all blocks.
Groups of zeros do not count for the largest; their own scales are clamped to the range of the steps.

Scales of INT4: for each 128 columns, for each tile, for g = 0 to 7, those of rows g and g + 8 as float32, which holds
float16 and bfloat16 and leaves the lowest bits free: the last four are the zero point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.common.shapes import ceil_div, round_up
from polymoe.formats import FORMATS, Encoding, PerGroup, QuantTensor
from polymoe.formats.elements import SCALE_DTYPES
from polymoe.layouts.cuda.bits import inverse, move_bits, split_tiles
from polymoe.layouts.cuda.matrices import (
    MatrixLayout,
    ScaleLimit,
    as_bytes,
    deinterleave_gate_up,
    interleave_gate_up,
)
from polymoe.layouts.cuda.w4a16_fragments import (
    COLUMNS,
    ROWS,
    TILE,
    from_sign_and_magnitude,
    sign_and_magnitude,
)
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.verdict import Reasons

if TYPE_CHECKING:
    from torch import Tensor

BITS = tuple(bit for n in range(8) for bit in (4 * n, 4 * n + 1, 4 * n + 2, 8 * (n % 4) + (3 if n < 4 else 7)))
"""Where the bits of eight codes lie in a word: MXFP4, and INT4 with zero points."""

SIGNED_BITS = tuple((8 * (n % 4) + bit + 4 * (n // 4)) % 32 for n in range(8) for bit in (0, 1, 2, 7))
"""The same for INT4 without zero points, as sign and the rest."""

MOST_STEP = 14
"""Largest ratio of a row's largest scale to another, in powers of two. Down to there, E4M3 represents every magnitude
of E2M1. A step of 15 yields zeros."""

_GROUP, _INT4_GROUP = 32, 128  # columns that share a scale


@dataclass(frozen=True, slots=True)
class W4A8Fragments(MatrixLayout):
    """MXFP4 weights whose scales are within 2**14 of each other in each row, and INT4 weights by groups of 128 columns.

    The kernels ``w4a8`` (MXFP4) and ``w4a8_rows`` read this layout.
    """

    name: str = "w4a8_fragments"
    multiple: ClassVar[int] = COLUMNS
    group_rows: ClassVar[int] = ROWS

    def check_encoding(self, reasons: Reasons, projection: str, encoding: Encoding) -> None:
        """Add a reason unless weights are MXFP4, or INT4 with float16 or bfloat16 scales of 128 columns."""
        int4 = encoding.element == "int4" and encoding.granularity == PerGroup(1, _INT4_GROUP)
        held = encoding == FORMATS["mxfp4"].encoding or (int4 and encoding.scale_dtype in ("float16", "bfloat16"))
        expected = f"mxfp4, or int4 with 16-bit scales of {_INT4_GROUP} columns"
        reasons.need(held, f"{projection} weights", expected, encoding.name)

    def scale_limit(self, encoding: Encoding) -> ScaleLimit | None:
        """Return the limit of MXFP4: at most :data:`MOST_STEP` powers of two within a row. INT4 has none."""
        return None if encoding.element == "int4" else _STEPS

    def decodes(self, encoding: Encoding, scales: ScaleRange) -> bool:
        """Return whether the scales of each row are within 2**14 of each other."""
        return scales.spread <= MOST_STEP

    def scale_bytes(self, encoding: Encoding, rows: int, columns: int) -> int:
        """Return the bytes of the scales of one packed matrix."""
        if encoding.element == "int4":
            return round_up(rows, ROWS) * ceil_div(columns, _INT4_GROUP) * 4
        return scale_bytes(rows, columns)

    def pack_matrix(self, halves: Sequence[QuantTensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return packed codes and scales, and of MXFP4 the largest step."""
        codes_NB = interleave_gate_up([q.codes for q in halves])
        if halves[0].encoding.element == "int4":
            signed = not halves[0].encoding.zero_points
            codes = pack_codes(sign_and_magnitude(codes_NB), SIGNED_BITS) if signed else pack_codes(codes_NB)
            return {"codes": codes, "scales": _pack_int4_scales(halves)}, None
        scales_NG = interleave_gate_up([as_bytes(q.scales) for q in halves]).squeeze(2)
        scales, step = pack_scales(scales_NG, codes_NB)
        return {"codes": pack_codes(codes_NB), "scales": scales}, step

    def unpack_matrix(
        self, parts: Mapping[str, Tensor], encoding: Encoding, rows: int, columns: int, halves: int
    ) -> list[dict[str, Tensor]]:
        """Return codes, scales and zero points of each projection. The scale of an MXFP4 group of zeros may differ from
        the original."""
        all_rows = rows * len(parts["codes"])
        if encoding.element != "int4":
            codes_NB = unpack_codes(parts["codes"].flatten(), all_rows, columns)
            found = {"codes": codes_NB, "scales": unpack_scales(parts["scales"], rows, columns)}
        else:
            found = _unpack_int4_scales(parts["scales"].flatten(), encoding, all_rows)
            bits = BITS if encoding.zero_points else SIGNED_BITS
            codes_NB = unpack_codes(parts["codes"].flatten(), all_rows, columns, bits)
            found["codes"] = codes_NB if encoding.zero_points else from_sign_and_magnitude(codes_NB)
        split = {name: deinterleave_gate_up(part, halves) for name, part in found.items()}
        made = [{name: each[i].contiguous() for name, each in split.items()} for i in range(halves)]
        dtype = SCALE_DTYPES[encoding.scale_dtype or ""]
        return [each | {"scales": each["scales"].view(dtype)} for each in made]


_STEPS = ScaleLimit(MOST_STEP, "scales of a row within 2**14 of each other", "some 2**{step} apart")


def _pack_int4_scales(halves: Sequence[QuantTensor]) -> Tensor:
    """Pack scales and zero points in the order that the module describes, padded with zeros."""
    each = []
    for q in halves:
        assert q.scales is not None
        words = q.scales.float().contiguous().view(torch.int32)
        each.append(words if q.zero_points is None else words | q.zero_points.int())
    words_NG = interleave_gate_up(each)
    x = torch.nn.functional.pad(words_NG, (0, 0, 0, -len(words_NG) % ROWS)).unflatten(0, (-1, 4, 2, 8))
    # group of rows, tile, h, g, group of columns
    return x.permute(0, 4, 1, 3, 2).flatten().view(torch.uint8)


def _unpack_int4_scales(packed: Tensor, encoding: Encoding, rows: int) -> dict[str, Tensor]:
    """Return scales, as bytes or as they are, and zero points: the inverse of :func:`_pack_int4_scales`."""
    x = packed.view(torch.int32).view(round_up(rows, ROWS) // ROWS, -1, 4, 8, 2)
    words_NG = x.permute(0, 2, 4, 3, 1).flatten(0, 3)[:rows]
    scales = (words_NG & ~15).view(torch.float32).to(SCALE_DTYPES[encoding.scale_dtype or ""])
    return {"scales": scales, **({"zero_points": (words_NG & 15).byte()} if encoding.zero_points else {})}


def pack_codes(codes_NB: Tensor, bits: tuple[int, ...] = BITS) -> Tensor:
    """Pack the codes of a matrix in the order that the module describes: uint8 [N, K/2] to [N * K / 2]."""
    rows, whole = len(codes_NB), len(codes_NB) // ROWS * ROWS
    found, pairs = [], codes_NB.contiguous().view(torch.int16)
    for first, last in ((0, whole), (whole, rows)):
        if first < last:
            # group of rows, tile, h (row g or g + 8), g, block, 32 columns, half, t: two bytes each
            x = pairs[first:last].unflatten(0, (-1, min(ROWS, last - first) // TILE, 2, 8))
            x = x.unflatten(4, (-1, 2, 2, 4)).permute(0, 4, 1, 3, 7, 5, 2, 6).flatten()
            found.append(move_bits(x.view(torch.uint8).view(-1, 4), bits).flatten())
    return torch.cat(found)


def unpack_codes(packed: Tensor, rows: int, columns: int, bits: tuple[int, ...] = BITS) -> Tensor:
    """Return the codes, uint8 [rows, columns / 2]: the inverse of :func:`pack_codes`."""
    (whole,) = split_tiles(packed, rows // TILE, ((columns // COLUMNS, 512),))
    x = move_bits(whole.view(*whole.shape[:2], 8, 4, 2, 2, 4), inverse(bits)).view(torch.int16)
    # tile, block, g, t, 32 columns, h, half: two bytes each
    return x.permute(0, 5, 2, 1, 4, 6, 3).flatten(3).flatten(0, 2).view(torch.uint8)


def scale_bytes(rows: int, columns: int) -> int:
    """Return the bytes of the scales of one packed matrix [rows, columns]."""
    return round_up(rows, ROWS) * columns // _GROUP + rows


def pack_scales(scales_NG: Tensor, codes_NB: Tensor) -> tuple[Tensor, Tensor]:
    """Pack the E8M0 scales of a matrix, uint8 [N, G], in the order that the module describes.

    Returns:
        The packed bytes, and as a scalar tensor the largest step of a group that is not all zeros. A step above
        :data:`MOST_STEP` is not recoverable from the packed bytes.
    """
    zeros = (codes_NB & 0x77).unflatten(1, (-1, _GROUP // 2)).amax(2) == 0
    scales = scales_NG.short()
    seen = scales.masked_fill(zeros, 0)
    largest = seen.amax(1)
    largest = torch.where(zeros.all(1), scales.amax(1), largest)
    steps = largest[:, None] - scales
    farthest = steps.masked_fill(zeros, 0).amax()
    steps = (steps.clamp(0, MOST_STEP + 1) * 8).byte()
    x = torch.nn.functional.pad(steps, (0, 0, 0, -len(steps) % ROWS)).unflatten(0, (-1, 4, 2, 8)).unflatten(4, (-1, 2))
    # group of rows, tile, h, g, block, group of columns
    return torch.cat([x.permute(0, 4, 3, 1, 5, 2).flatten(), largest.byte()]), farthest


def unpack_scales(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scales of matrices behind each other, from uint8 [matrices, bytes], as uint8 [matrices * rows, G]: the
    inverse of :func:`pack_scales`, except for groups of zeros."""
    steps, largest = packed.split([packed.shape[1] - rows, rows], 1)
    x = steps.reshape(-1, columns // COLUMNS, 8, 4, 2, 2).permute(0, 3, 5, 2, 1, 4).flatten(4).flatten(0, 3)
    largest = largest.reshape(-1, 1).short()
    return (largest - x[: len(largest)].short() // 8).clamp(min=0).byte()
