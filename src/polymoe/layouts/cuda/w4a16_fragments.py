"""Layouts ``w4a16_fragments`` and ``w4a16_fragments_cvt``: 4-bit weights that kernels decode to bfloat16 in registers.

Weights are stored in the order of the MMA's A operand (``mma.sync`` m16n8k16 and ``wgmma`` m64k16).

Codes: the matrix is cut into groups of 64 rows (the last may have 16, 32 or 48). Groups are cut into blocks of 64
columns, and blocks into tiles of 16 rows. In a tile, lane ``4 * g + t`` of a warp has rows g and g + 8. Its four 32-bit
words contain columns 16j + {2t, 2t + 1, 2t + 8, 2t + 9} for j = 0 to 3: 16 bytes per lane, 512 per tile, 2 KiB per
block. There are no gaps between groups. A last block of fewer columns is stored word j by word j, each as 32 lanes of 4
bytes.

A word contains four pairs of neighbouring columns in the order of the instruction's registers (rows g, g + 8, g,
g + 8). The bits of codes are scattered: a rotation and a mask then put both halves where bfloat16 has them. Of E2M1
codes (:data:`E2M1_BITS`) these are sign, exponent and mantissa, in nine instructions for eight weights. An INT4 code
minus 7.5, twice which is an odd number from -15 to 15, is stored as its sign and the three bits above the lowest of its
magnitude (:data:`INT4_BITS`): seven instructions.

Scales: each block stores, for g = 0 to 7, for each tile, for each group of columns, the scales of rows g and g + 8. A
last group of rows is padded to four tiles. E8M0 bytes, four for each g of a tile, are biased and their bits scattered
(:data:`E8M0_SCALE_BITS`), so that one mask yields two bfloat16 values. E4M3 bytes are stored as bytes with a wider
exponent (:func:`e4m3_codes`), also scattered (:data:`E4M3_SCALE_BITS`). Scales of groups of 128 columns are stored once
per two blocks.

Scales of INT4 are bfloat16. With zero points, each pair of scales is followed by a pair of offsets in bfloat16: 7.5
less the zero point, times the scale. What is lost of float16 scales and zero points is the rest, one byte for each
scale, which no kernel reads: the three bits that rounding removed, and the zero point.

``w4a16_fragments_cvt`` is for GPUs that convert E2M1, E4M3 and E8M0 by instructions. Its bytes are those above, in the
same places, but E2M1 codes and their scales keep the order and the values of their bits. So byte i of a word is the
pair of register i, with the even column in its low half: bytes 0 and 2 are row g's columns {2t, 2t + 1} and
{2t + 8, 2t + 9}, bytes 1 and 3 row g + 8's. Scales are the E8M0 or E4M3 bytes of the checkpoint, those of rows g and
g + 8 beside each other. INT4 is stored as above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.common.shapes import ceil_div, round_up
from polymoe.formats import Encoding, PerGroup, QuantTensor
from polymoe.formats.elements import SCALE_DTYPES
from polymoe.layouts.cuda.bits import Columns, inverse, move_bits, pack_words, unpack_words
from polymoe.layouts.cuda.matrices import (
    MatrixLayout,
    ScaleLimit,
    apart,
    as_bytes,
    interleave_gate_up,
    stacked,
    taller,
)
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.verdict import Reasons

if TYPE_CHECKING:
    from torch import Tensor

ROWS, COLUMNS = 64, 64
"""Rows and columns of a whole block."""
TILE = 16
"""Rows of a tile, and columns in one word of all lanes."""

# Bit b of code n of a word (code 2i: the even column of pair i; 2i + 1: the odd one) goes to bit BITS[4 * n + b].
# Pair 0 is in place; pair 1 is after << 4, pair 2 after a rotation by 10; pair 3 has its sign and two low bits in place
# after << 6, and its third bit after >> 2.
_IN_PLACE = (6, 7, 8, 15)
_PAIRS = (_IN_PLACE, (2, 3, 4, 11), (28, 29, 30, 5), (0, 1, 10, 9))
E2M1_BITS = tuple((bit + 16 * half) % 32 for pair in _PAIRS for half in (0, 1) for bit in pair)
"""Where the bits of eight E2M1 codes lie in a word."""

# In place after a rotation to the right by four bits for each pair.
INT4_BITS = tuple((bit + 4 * pair + 16 * half) % 32 for pair in range(4) for half in (0, 1) for bit in (4, 5, 6, 15))
"""Where the bits of eight INT4 codes lie in a word: three of the magnitude, and the sign."""

_FIRST, _SECOND = tuple(range(7, 15)), (31, *range(7))
E8M0_SCALE_BITS = (*_FIRST, *(b + 16 for b in _FIRST), *_SECOND, *((b + 16) % 32 for b in _SECOND))
"""Where the bits of four E8M0 scales lie in a word: rows g and g + 8 of one group in place, those of the next group
after a rotation by 8."""

E8M0_BIAS = 102
"""Added to E8M0 bytes. A code's bits are its value times 2**-126, and the biased scale's are 2**(byte - 25): the
product is the weight times 2**-24, a normal bfloat16 for bytes of at least 26. The epilogue multiplies by 2**24."""

E8M0_MOST = 152
"""Largest E8M0 byte that is decoded: 2**25. With bytes below 26 (2**-101), weights lose bits below 2**-110."""

E4M3_SCALE_BITS = (*range(4, 12), *range(20, 28), *range(28, 32), *range(4), *range(12, 20))
"""Where the bits of four of :func:`e4m3_codes` lie in a word: rows g and g + 8 of one group where bfloat16 has its
mantissa and the low bits of its exponent, those of the next group after a rotation by 8."""

_AS_STORED = tuple(range(32))

E4M3_MOST = 126
"""Largest E4M3 byte that is decoded: 448. Larger bytes are NaN and negative numbers."""


@dataclass(frozen=True, slots=True)
class W4A16Fragments(MatrixLayout):
    """4-bit weights with scales for groups of 16, 32, 64 or 128 columns.

    The kernels ``w4a16_mma``, ``w4a16_mma_tiled`` and ``w4a16_wgmma`` read this layout.

    Attributes:
        cvt: whether bits of E2M1 codes and of their scales stay as they are, for GPUs with instructions that convert
            them.
    """

    name: str = "w4a16_fragments"
    cvt: bool = False
    multiple: ClassVar[int] = TILE
    group_rows: ClassVar[int] = ROWS
    stacks: ClassVar[bool] = True

    def check_encoding(self, reasons: Reasons, projection: str, encoding: Encoding) -> None:
        if not reasons.need(encoding.bits == 4, f"{projection} elements", "4 bits", encoding.element):
            return
        granularity = encoding.granularity
        grouped = isinstance(granularity, PerGroup) and granularity.n == 1 and granularity.k in (16, 32, 64, 128)
        expected = "groups of 16, 32, 64 or 128 columns"
        if reasons.need(grouped, f"{projection} scales", expected, str(granularity)):
            for dtype, columns in (("e8m0", 32), ("e4m3", 16)):
                fits = encoding.scale_dtype != dtype or encoding.group_columns == columns
                expected = f"groups of {columns} columns for {dtype.upper()}"
                reasons.need(fits, f"{projection} scales", expected, str(granularity))

    def scale_limit(self, encoding: Encoding) -> ScaleLimit | None:
        return _SCALE_LIMITS.get(encoding.scale_dtype or "")

    def scale_bytes(self, encoding: Encoding, rows: int, columns: int) -> int:
        times, groups = _groups_beside(encoding, columns)
        return round_up(rows, ROWS) * times * groups * SCALE_DTYPES.itemsize(encoding.scale_dtype or "")

    def rest_bytes(self, encoding: Encoding, rows: int, columns: int) -> int:
        return rows * ceil_div(columns, encoding.group_columns) if _has_rest(encoding) else 0

    def pack_matrix(self, halves: Sequence[QuantTensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        encoding, experts = halves[0].encoding, halves[0].codes.shape[:-2]
        codes_HNB = stacked([q.codes for q in halves])
        parts = {"codes": pack_codes(codes_HNB, encoding, self.cvt)}
        if _has_rest(encoding):
            each = [_rounded(q) for q in halves]
            scales_NGB = interleave_gate_up([scales for scales, _ in each])
            parts["rest"] = interleave_gate_up([rest for _, rest in each]).flatten()
        else:
            scales_NGB = interleave_gate_up([as_bytes(taller(q.scales)) for q in halves if q.scales is not None])
        largest = None if self.scale_limit(encoding) is None else scales_NGB.reshape(*experts, -1).amax(-1)
        parts["scales"] = pack_scales(scales_NGB, encoding, codes_HNB.shape[2] * 2, self.cvt)
        return parts, largest

    def unpack_matrix(
        self, parts: Mapping[str, Tensor], encoding: Encoding, rows: int, columns: int, halves: int
    ) -> list[dict[str, Tensor]]:
        rows *= len(parts["codes"])
        codes_HNB = unpack_codes(parts["codes"].flatten(), encoding, (halves, rows // halves, columns // 2), self.cvt)
        scales_NB = unpack_scales(parts["scales"].flatten(), encoding, rows, columns, self.cvt).contiguous()
        if not _has_rest(encoding):
            return apart(codes_HNB, {"scales": scales_NB})
        rest_NG = parts["rest"].view(rows, -1)
        found = {"scales": _exact(scales_NB, rest_NG, encoding)}
        if encoding.zero_points:
            found["zero_points"] = rest_NG >> _ROUNDED_BITS
        return apart(codes_HNB, found)


def _in_bfloat16(scales: ScaleRange) -> bool:
    return not scales.outside_bfloat16


E8M0_LIMIT = ScaleLimit(
    E8M0_MOST, "E8M0 scales of at most 2**25", lambda byte: f"2**{byte - 127}", decodes=_in_bfloat16
)
"""What kernels decode by multiplying in bfloat16."""

_SCALE_LIMITS = {
    "e8m0": E8M0_LIMIT,
    "e4m3": ScaleLimit(
        E4M3_MOST, "E4M3 scales from 0 to 448", lambda byte: f"the byte {byte:#x}", decodes=_in_bfloat16
    ),
}


@cache
def e4m3_codes() -> Tensor:
    """Return the byte stored for each E4M3 byte: uint8 [256], a bijection.

    Stored bytes have five bits of exponent and three of mantissa, so that subnormals need no extra instructions. Byte
    ``8 * (e + 23) + m`` is ``2**e * (1 + m / 8)``, with e from -9 to 8; byte 0 is 0. E4M3 bytes that are not valid
    scales map to the remaining values.
    """
    codes = [0]
    for byte in range(1, E4M3_MOST + 1):
        mantissa, exponent = math.frexp((byte % 8 / 8 + (byte > 7)) * 2.0 ** (max(byte // 8, 1) - 7))
        codes.append(8 * (exponent - 1 + 23) + int(mantissa * 16) - 8)
    left = sorted(set(range(256)) - set(codes))
    return torch.tensor(codes + left, dtype=torch.uint8, device="cpu")


def pack_codes(codes_HNB: Tensor, encoding: Encoding, cvt: bool = False) -> Tensor:
    """Pack the codes of a matrix, uint8 [halves, N, K/2], in the order that the module describes."""
    if encoding.element == "int4":
        codes_HNB = sign_and_magnitude(codes_HNB)
    return pack_words(codes_HNB, _columns(codes_HNB.shape[2]), _code_bits(encoding, cvt))


def unpack_codes(packed: Tensor, encoding: Encoding, shape: tuple[int, int, int], cvt: bool = False) -> Tensor:
    """Return the codes, uint8 of ``shape`` [halves, N, K/2]: the inverse of :func:`pack_codes`."""
    codes_HNB = unpack_words(packed, shape, _columns(shape[2]), _code_bits(encoding, cvt))
    return from_sign_and_magnitude(codes_HNB) if encoding.element == "int4" else codes_HNB


def _columns(row_bytes: int) -> tuple[Columns, Columns]:
    """Return whole blocks, and the columns behind them: split into block, j (word), q (columns 0 or 8 on), t."""
    whole = row_bytes // (COLUMNS // 2) * (COLUMNS // 2)
    return (
        Columns(0, whole, (-1, 4, 2, 4), (0, 4, 1, 3, 7, 5, 6, 2)),
        Columns(whole, row_bytes, (1, -1, 2, 4), (0, 4, 1, 5, 3, 7, 6, 2)),
    )


_ROUNDED_BITS = 3
"""Bits of a float16 scale's mantissa that bfloat16 does not have. In a byte of the rest they are the lowest."""


def _has_rest(encoding: Encoding) -> bool:
    return encoding.element == "int4" and (encoding.zero_points or encoding.scale_dtype == "float16")


def _rounded(q: QuantTensor) -> tuple[Tensor, Tensor]:
    """Return scales as bytes of bfloat16, each followed by an offset if there are zero points, and their rest.

    Returns:
        uint8 [N, groups, 2], or with zero points [N, 2 * groups, 2]; and uint8 [N, groups].
    """
    assert q.scales is not None
    exact_NG = taller(q.scales).float()
    bits = exact_NG.contiguous().view(torch.int32)
    shift = 16 - _ROUNDED_BITS
    rest = bits >> shift & (1 << _ROUNDED_BITS) - 1
    # Halves are rounded up, so that the rest says whether this one was.
    values = [(bits + (1 << 15) >> 16).to(torch.int16).view(torch.bfloat16)]
    if q.zero_points is not None:
        zero_points_NG = taller(q.zero_points)
        rest = rest | zero_points_NG.int() << _ROUNDED_BITS
        values.append(((7.5 - zero_points_NG.float()) * exact_NG).bfloat16())
    return as_bytes(torch.stack(values, 2).flatten(1)), rest.to(torch.uint8)


def _exact(scales_NB: Tensor, rest_NG: Tensor, encoding: Encoding) -> Tensor:
    """Return scales as they were: the inverse of :func:`_rounded`, whose offsets are left out."""
    rounded_NG = scales_NB.view(torch.int16)[:, :: 2 if encoding.zero_points else 1]
    removed = rest_NG.int() & (1 << _ROUNDED_BITS) - 1
    bits = (rounded_NG.int() << 16) - (removed >> _ROUNDED_BITS - 1 << 16)
    exact = (bits | removed << 16 - _ROUNDED_BITS).view(torch.float32)
    return exact.to(SCALE_DTYPES[encoding.scale_dtype or ""])


def _groups_beside(encoding: Encoding, columns: int) -> tuple[int, int]:
    """Return the number of blocks of scales along K, and the groups of columns in each, twice with zero points."""
    group = encoding.group_columns
    return ceil_div(columns, max(COLUMNS, group)), max(COLUMNS // group, 1) * (1 + encoding.zero_points)


def pack_scales(scales_NGB: Tensor, encoding: Encoding, columns: int, cvt: bool = False) -> Tensor:
    """Pack the scales of a matrix, uint8 [N, G, bytes], in the order that the module describes, padded with zeros."""
    times, groups = _groups_beside(encoding, columns)
    rows, present, _ = scales_NGB.shape
    padding = (0, 0, 0, times * groups - present, 0, round_up(rows, ROWS) - rows)
    # group of rows, tile, h, g, time, group of columns, byte
    x = torch.nn.functional.pad(scales_NGB, padding).unflatten(0, (-1, 4, 2, 8)).unflatten(4, (times, groups))
    x = x.permute(0, 4, 3, 1, 5, 2, 6)
    if encoding.scale_dtype == "e8m0" and not cvt:
        x = move_bits((x + E8M0_BIAS).flatten(4), E8M0_SCALE_BITS)
    elif encoding.scale_dtype == "e4m3" and not cvt:
        codes = e4m3_codes().to(x.device).index_select(0, x.flatten().int())
        x = move_bits(codes.view(-1, 4), E4M3_SCALE_BITS)
    return x.flatten()


def unpack_scales(packed: Tensor, encoding: Encoding, rows: int, columns: int, cvt: bool = False) -> Tensor:
    """Return the scales, uint8 [N, G * bytes]: the inverse of :func:`pack_scales`."""
    times, groups = _groups_beside(encoding, columns)
    x = packed.view(-1, times, 8, 4, groups, 2, SCALE_DTYPES.itemsize(encoding.scale_dtype or ""))
    if encoding.scale_dtype == "e8m0" and not cvt:
        x = move_bits(x.flatten(4), inverse(E8M0_SCALE_BITS)).view(x.shape) - E8M0_BIAS
    elif encoding.scale_dtype == "e4m3" and not cvt:
        codes = move_bits(x.reshape(-1, 4), inverse(E4M3_SCALE_BITS)).view(x.shape)
        x = e4m3_codes().to(x.device).argsort().to(torch.uint8)[codes.int()]
    x = x.permute(0, 3, 5, 2, 1, 4, 6).flatten(4, 5).flatten(0, 3)
    return x[:rows, : ceil_div(columns, encoding.group_columns) * (1 + encoding.zero_points)].flatten(1)


def sign_and_magnitude(codes: Tensor) -> Tensor:
    """Return pairs of INT4 codes as pairs of signs (bit 3) and magnitudes of the code minus 7.5, less 0.5."""
    negative = (codes >> 3 & 0x11) ^ 0x11
    return codes ^ (negative * 7 + 0x88)


def from_sign_and_magnitude(codes: Tensor) -> Tensor:
    """Return INT4 codes: the inverse of :func:`sign_and_magnitude`."""
    return codes ^ ((codes >> 3 & 0x11) * 7 + 0x88)


def _code_bits(encoding: Encoding, cvt: bool) -> tuple[int, ...]:
    if encoding.element == "int4":
        return INT4_BITS
    return _AS_STORED if cvt else E2M1_BITS
