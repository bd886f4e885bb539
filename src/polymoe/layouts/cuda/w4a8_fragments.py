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
from polymoe.layouts.cuda.bits import Columns, pack_words, unpack_words
from polymoe.layouts.cuda.matrices import (
    MatrixLayout,
    ScaleLimit,
    apart,
    interleave_gate_up,
    stacked,
    taller,
)
from polymoe.layouts.cuda.w4a16_fragments import (
    COLUMNS,
    ROWS,
    from_sign_and_magnitude,
    sign_and_magnitude,
)
from polymoe.layouts.staging import wide
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
    stacks: ClassVar[bool] = True

    def check_encoding(self, reasons: Reasons, projection: str, encoding: Encoding) -> None:
        int4 = encoding.element == "int4" and encoding.granularity == PerGroup(1, _INT4_GROUP)
        held = encoding == FORMATS["mxfp4"].encoding or (int4 and encoding.scale_dtype in ("float16", "bfloat16"))
        expected = f"mxfp4, or int4 with 16-bit scales of {_INT4_GROUP} columns"
        reasons.need(held, f"{projection} weights", expected, encoding.name)

    def scale_limit(self, encoding: Encoding) -> ScaleLimit | None:
        return None if encoding.element == "int4" else _STEPS

    def scale_bytes(self, encoding: Encoding, rows: int, columns: int) -> int:
        if encoding.element == "int4":
            return round_up(rows, ROWS) * ceil_div(columns, _INT4_GROUP) * 4
        return round_up(rows, ROWS) * columns // _GROUP + rows

    def pack_matrix(self, halves: Sequence[QuantTensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        encoding, codes_HNB = halves[0].encoding, stacked([q.codes for q in halves])
        stored = sign_and_magnitude(codes_HNB) if _is_signed(encoding) else codes_HNB
        codes = pack_words(stored, _columns(codes_HNB.shape[2]), _code_bits(encoding))
        if encoding.element == "int4":
            return {"codes": codes, "scales": _pack_int4_scales(halves)}, None
        scales_NG = interleave_gate_up([taller(q.scales).view(torch.uint8) for q in halves if q.scales is not None])
        zeros_NG = interleave_gate_up(list(groups_of_zeros(codes_HNB)))
        scales, step = pack_scales(scales_NG, zeros_NG, halves[0].codes.shape[:-2])
        return {"codes": codes, "scales": scales}, step

    def unpack_matrix(
        self, parts: Mapping[str, Tensor], encoding: Encoding, rows: int, columns: int, halves: int
    ) -> list[dict[str, Tensor]]:
        """Return codes, scales and zero points of each projection. The scale of an MXFP4 group of zeros may differ from
        the original."""
        all_rows = rows * len(parts["codes"])
        shape = halves, all_rows // halves, columns // 2
        codes_HNB = unpack_words(parts["codes"].flatten(), shape, _columns(shape[2]), _code_bits(encoding))
        if _is_signed(encoding):
            codes_HNB = from_sign_and_magnitude(codes_HNB)
        if encoding.element == "int4":
            found = _unpack_int4_scales(parts["scales"].flatten(), encoding, all_rows)
        else:
            found = {"scales": unpack_scales(parts["scales"], rows, columns)}
        return apart(codes_HNB, found)


_STEPS = ScaleLimit(
    MOST_STEP,
    "scales of a row within 2**14 of each other",
    lambda step: f"some 2**{step} apart",
    decodes=lambda scales: scales.spread <= MOST_STEP,
)


def _is_signed(encoding: Encoding) -> bool:
    return encoding.element == "int4" and not encoding.zero_points


def _code_bits(encoding: Encoding) -> tuple[int, ...]:
    return SIGNED_BITS if _is_signed(encoding) else BITS


def _pack_int4_scales(halves: Sequence[QuantTensor]) -> Tensor:
    """Pack scales and zero points in the order that the module describes, padded with zeros."""
    each = []
    for q in halves:
        assert q.scales is not None
        words = taller(q.scales).float().contiguous().view(torch.int32)
        each.append(words if q.zero_points is None else words | taller(q.zero_points).int())
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


def _columns(row_bytes: int) -> tuple[Columns]:
    """Return all columns, split into block, 32 columns, half, t, byte."""
    return (Columns(0, row_bytes, (-1, 2, 2, 4, 2), (0, 4, 1, 3, 7, 5, 2, 6, 8)),)


def groups_of_zeros(codes: Tensor) -> Tensor:
    """Return which groups of a matrix's codes, uint8 [..., K/2], are zeros of either sign: bool [..., G]."""
    (words,) = wide(codes)
    magnitudes = words & int.from_bytes(b"\x77" * words.itemsize, "little")
    return magnitudes.unflatten(-1, (-1, _GROUP // 2 // words.itemsize)).amax(-1) == 0


def pack_scales(scales_NG: Tensor, zeros_NG: Tensor, experts: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Pack the E8M0 scales of a matrix, uint8 [N, G], in the order that the module describes.

    Args:
        scales_NG: the scales.
        zeros_NG: which of them are of groups of zeros.
        experts: [n] for the rows of n experts behind each other.

    Returns:
        The packed bytes; and, as a scalar or [n], the largest step of a group that is not all zeros. A step above
        :data:`MOST_STEP` is not recoverable from the packed bytes.
    """
    scales = scales_NG.short()
    seen = scales.masked_fill(zeros_NG, 0)
    largest = seen.amax(1)
    largest = torch.where(zeros_NG.all(1), scales.amax(1), largest)
    steps = largest[:, None] - scales
    farthest = steps.masked_fill(zeros_NG, 0).reshape(*experts, -1).amax(-1)
    steps = (steps.clamp(0, MOST_STEP + 1) * 8).byte()
    x = torch.nn.functional.pad(steps, (0, 0, 0, -len(steps) % ROWS)).unflatten(0, (-1, 4, 2, 8)).unflatten(4, (-1, 2))
    # group of rows, tile, h, g, block, group of columns
    parts = x.permute(0, 4, 3, 1, 5, 2), largest.byte()
    return torch.cat([part.reshape(*experts, -1) for part in parts], -1).flatten(), farthest


def unpack_scales(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scales of matrices behind each other, from uint8 [matrices, bytes], as uint8 [matrices * rows, G]: the
    inverse of :func:`pack_scales`, except for groups of zeros."""
    steps, largest = packed.split([packed.shape[1] - rows, rows], 1)
    x = steps.reshape(-1, columns // COLUMNS, 8, 4, 2, 2).permute(0, 3, 5, 2, 1, 4).flatten(4).flatten(0, 3)
    largest = largest.reshape(-1, 1).short()
    return (largest - x[: len(largest)].short() // 8).clamp(min=0).byte()
