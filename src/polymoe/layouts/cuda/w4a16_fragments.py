"""The order of codes and scales in a matrix of the Hopper layout: that of the A operand on the matrix units.

Codes. The matrix is cut into groups of 64 rows (the last may have 16, 32 or 48), each into blocks of 64 columns, each
into tiles of 16 rows. In a tile, lane ``4 * g + t`` of a warp owns rows g and g + 8; its four 32-bit words hold columns
16j + {2t, 2t + 1, 2t + 8, 2t + 9} for j = 0 to 3: 16 bytes a lane, 512 a tile, 2 KiB a block, group after group without
gaps. A last block of fewer columns has its words j one after the other, each as 32 lanes of 4 bytes.

A word holds four pairs of neighbouring columns in the order of the instruction's registers (rows g, g + 8, g, g + 8).
Pair i of an int4 matrix is at bits 4i and 16 + 4i. The bits of e2m1 codes are scattered (:data:`E2M1_BITS`) so that a
rotation and a mask put sign, exponent and mantissa of both halves where bfloat16 has them: nine instructions for
eight weights.

Scales. For each block: for g = 0 to 7, for each tile, for each group of columns, the scales of rows g and g + 8; a last
group of rows has room for four tiles. E8M0 bytes, of which a tile has four for each g, are biased and their bits
scattered (:data:`E8M0_BITS`), so that one mask makes two bfloat16. E4M3 bytes become bytes of a wider exponent
(:func:`e4m3_codes`), their bits scattered too (:data:`E4M3_BITS`). Scales of groups of 128 columns stand once for two
blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from polymoe.formats import Encoding
from polymoe.formats.elements import SCALE_DTYPES
from polymoe.shapes import ceil_div, round_up

__all__ = [
    "E2M1_BITS",
    "E4M3_BITS",
    "E4M3_MOST",
    "E8M0_BIAS",
    "E8M0_BITS",
    "E8M0_MOST",
    "INT4_BITS",
    "TILE",
    "e4m3_codes",
    "inverse",
    "move_bits",
    "pack_codes",
    "pack_scales",
    "parts_of",
    "scale_bytes",
    "unpack_codes",
    "unpack_scales",
]

ROWS, COLUMNS = 64, 64
"""Of a whole block."""
TILE = 16
"""Rows of a tile, and columns of one word of every lane."""

# Bit b of code n of a word (code 2i: the even column of pair i; 2i + 1: the odd one) goes to bit BITS[4 * n + b].
# Pair 0 is in place; 1 is there after << 4; 2 after a rotation by 10; 3 has its sign and two low bits after << 6 and
# its third after >> 2.
_IN_PLACE = (6, 7, 8, 15)
_PAIRS = (_IN_PLACE, (2, 3, 4, 11), (28, 29, 30, 5), (0, 1, 10, 9))
E2M1_BITS = tuple((bit + 16 * half) % 32 for pair in _PAIRS for half in (0, 1) for bit in pair)
"""Where the bits of eight E2M1 codes lie in a word."""

INT4_BITS = tuple(4 * pair + 16 * half + b for pair in range(4) for half in (0, 1) for b in range(4))
"""Where the bits of eight INT4 codes lie in a word."""

_FIRST, _SECOND = tuple(range(7, 15)), (31, *range(7))
E8M0_BITS = (*_FIRST, *(b + 16 for b in _FIRST), *_SECOND, *((b + 16) % 32 for b in _SECOND))
"""Where the bits of four E8M0 scales lie in a word: rows g, g + 8 of one group in place, of the next after a rotation
by 8."""

E8M0_BIAS = 102
"""Added to E8M0 bytes. A code's bits are its value times 2**-126, the scale's are 2**(byte - 25): the product is the
weight times 2**-24, a normal bfloat16 from byte 26 on, and the accumulator gets the 2**24 back."""

E8M0_MOST = 152
"""Largest E8M0 byte: 2**25. Smaller than 26 (2**-101) a weight may lose what is below 2**-110."""

E4M3_BITS = (*range(4, 12), *range(20, 28), *range(28, 32), *range(4), *range(12, 20))
"""Where the bits of four of :func:`e4m3_codes` lie in a word: rows g, g + 8 of one group where bfloat16 has mantissa
and low bits of the exponent, of the next after a rotation by 8."""

E4M3_MOST = 126
"""Largest E4M3 byte that is a scale: 448. What follows is NaN and negative."""


@cache
def e4m3_codes() -> Tensor:
    """What is stored for each E4M3 byte: uint8 [256], a bijection.

    Five bits of exponent and three of mantissa, so that subnormals need no other instructions than the rest: byte
    ``8 * (e + 23) + m`` for the value ``2**e * (1 + m / 8)``, e from -9 to 8; 0 for 0. Bytes that are no scales take
    what is left.
    """
    codes = [0]
    for byte in range(1, E4M3_MOST + 1):
        mantissa, exponent = math.frexp((byte % 8 / 8 + (byte > 7)) * 2.0 ** (max(byte // 8, 1) - 7))
        codes.append(8 * (exponent - 1 + 23) + int(mantissa * 16) - 8)
    left = sorted(set(range(256)) - set(codes))
    return torch.tensor(codes + left, dtype=torch.uint8)


@cache
def _e4m3_codes(device: torch.device) -> Tensor:
    return e4m3_codes().to(device)


def pack_codes(codes_NB: Tensor, encoding: Encoding) -> Tensor:
    """One matrix's codes [N, K/2] in the order the module describes: uint8 [N * K / 2]."""
    rows, half_columns = codes_NB.shape
    whole_rows, whole = rows // ROWS * ROWS, half_columns // (COLUMNS // 2) * (COLUMNS // 2)
    found = []
    for first, last in ((0, whole_rows), (whole_rows, rows)):
        parts = []
        for columns, order, words in (
            (slice(0, whole), (0, 4, 1, 3, 7, 5, 6, 2), 4),
            (slice(whole, half_columns), (0, 4, 1, 5, 3, 7, 6, 2), (half_columns - whole) // (TILE // 2)),
        ):
            part_NB = codes_NB[first:last, columns]
            if part_NB.numel():
                # group of rows, tile, h (row g or g + 8), g, block, j (word), q (columns 0 or 8 on), t
                tiles = min(ROWS, last - first) // TILE
                x = part_NB.unflatten(0, (-1, tiles, 2, 8)).unflatten(4, (-1, words, 2, 4))
                parts.append(move_bits(x.permute(order).flatten(6), _code_bits(encoding)).flatten(1))
        if parts:
            found.append((parts[0] if len(parts) == 1 else torch.cat(parts, 1)).flatten())
    return found[0] if len(found) == 1 else torch.cat(found)


def unpack_codes(packed: Tensor, encoding: Encoding, rows: int, columns: int) -> Tensor:
    """Inverse of :func:`pack_codes`."""
    blocks, rest = columns // COLUMNS, columns % COLUMNS // TILE
    whole, tail = parts_of(packed, rows // TILE, ((blocks, 512), (1, 128 * rest)))
    back = inverse(_code_bits(encoding))
    x = move_bits(whole.unflatten(2, (8, 4, 4, 4)), back).unflatten(5, (2, 2))
    y = move_bits(tail.unflatten(2, (rest, 8, 4, 4)), back).unflatten(5, (2, 2))
    parts = [x.permute(0, 6, 2, 1, 4, 5, 3), y.permute(0, 6, 3, 1, 2, 5, 4)]
    return torch.cat([p.flatten(3).flatten(0, 2) for p in parts], 1)


def _groups_beside(encoding: Encoding, columns: int) -> tuple[int, int]:
    """How often scales stand beside a block (or two), and how many groups each time."""
    group = encoding.group_columns
    return ceil_div(columns, max(COLUMNS, group)), max(COLUMNS // group, 1)


def scale_bytes(encoding: Encoding, rows: int, columns: int) -> int:
    """Bytes of one matrix's packed scales."""
    times, groups = _groups_beside(encoding, columns)
    return round_up(rows, ROWS) * times * groups * SCALE_DTYPES[encoding.scale_dtype or ""].itemsize


def pack_scales(scales_NGB: Tensor, encoding: Encoding, columns: int) -> Tensor:
    """One matrix's scales, as bytes [N, G, bytes], in the order the module describes; what is missing are zeros."""
    times, groups = _groups_beside(encoding, columns)
    rows, present, _ = scales_NGB.shape
    padding = (0, 0, 0, times * groups - present, 0, round_up(rows, ROWS) - rows)
    # group of rows, tile, h, g, time, group of columns, byte
    x = torch.nn.functional.pad(scales_NGB, padding).unflatten(0, (-1, 4, 2, 8)).unflatten(4, (times, groups))
    x = x.permute(0, 4, 3, 1, 5, 2, 6)
    if encoding.scale_dtype == "e8m0":
        x = move_bits((x + E8M0_BIAS).flatten(4), E8M0_BITS)
    elif encoding.scale_dtype == "e4m3":
        codes = _e4m3_codes(x.device).index_select(0, x.flatten().int())
        x = move_bits(codes.view(-1, 4), E4M3_BITS)
    return x.flatten()


def unpack_scales(packed: Tensor, encoding: Encoding, rows: int, columns: int) -> Tensor:
    """Inverse of :func:`pack_scales`: bytes [N, G * bytes]."""
    times, groups = _groups_beside(encoding, columns)
    x = packed.view(-1, times, 8, 4, groups, 2, SCALE_DTYPES[encoding.scale_dtype or ""].itemsize)
    if encoding.scale_dtype == "e8m0":
        x = move_bits(x.flatten(4), inverse(E8M0_BITS)).view(x.shape) - E8M0_BIAS
    elif encoding.scale_dtype == "e4m3":
        codes = move_bits(x.reshape(-1, 4), inverse(E4M3_BITS)).view(x.shape)
        x = _e4m3_codes(x.device).argsort().to(torch.uint8)[codes.int()]
    x = x.permute(0, 3, 5, 2, 1, 4, 6).flatten(4, 5).flatten(0, 3)
    return x[:rows, : ceil_div(columns, encoding.group_columns)].flatten(1)


def parts_of(packed: Tensor, tiles: int, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """A packed matrix as, for each size (blocks, bytes), a tensor [tiles, blocks, bytes]."""
    each = sum(blocks * size for blocks, size in sizes)
    found = []
    for piece, width in zip(packed.split([tiles // 4 * 4 * each, tiles % 4 * each]), (4, tiles % 4), strict=True):
        if piece.numel():
            flat = piece.view(-1, width * each).split([width * blocks * size for blocks, size in sizes], 1)
            found.append(
                [
                    f.unflatten(1, (blocks, width, size)).transpose(1, 2).flatten(0, 1)
                    for f, (blocks, size) in zip(flat, sizes, strict=True)
                ]
            )
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def _code_bits(encoding: Encoding) -> tuple[int, ...]:
    return E2M1_BITS if encoding.element == "e2m1" else INT4_BITS


def inverse(places: Sequence[int]) -> tuple[int, ...]:
    """Places that undo :func:`move_bits`."""
    return tuple(sorted(range(32), key=places.__getitem__))


@cache
def _tables(places: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the bits of a word's lower and of its upper half go: int32 [65536] each, the upper half's from -32768 on.
    Kept: an expert takes less time than making them, and a copy to the device waits for it."""
    halves = []
    for half in (places[:16], places[16:]):
        values = torch.arange(1 << 16)
        halves.append(sum(((values >> bit & 1) << place for bit, place in enumerate(half)), torch.zeros_like(values)))
    low, high = (half.int().to(device) for half in halves)  # wraps: bit 31 is the sign
    return low, high.roll(1 << 15)


def move_bits(words: Tensor, places: Sequence[int]) -> Tensor:
    """Bit b of each little-endian word of 4 bytes [..., 4] to bit ``places[b]``; same shape, new memory."""
    low, high = _tables(tuple(places), words.device)
    values = words.contiguous().view(torch.int32).flatten()
    moved = low.index_select(0, values & 0xFFFF)
    moved |= high.index_select(0, (values >> 16).add_(1 << 15))
    return moved.view(torch.uint8).view(words.shape)
