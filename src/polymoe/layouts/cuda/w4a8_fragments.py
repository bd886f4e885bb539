"""The order of MXFP4 codes and scales in a matrix of the Hopper layout for E4M3 rows: that of the A operand of
``wgmma`` m64k32, and that in which a weight becomes E4M3 with its scale by a look into a table.

Codes. As in :mod:`.w4a16_fragments` the matrix is cut into groups of 64 rows, each into blocks of 64
columns, each into tiles of 16 rows, and lane ``4 * g + t`` of a warp owns rows g and g + 8 of a tile. Its four words of
a block are row g and row g + 8 of the first 32 columns, then of the others. A word holds columns 4t to 4t + 3
(``first``) and those 16 further on (``second``). The three low bits of the eight codes stand in the word's eight
digits, where one permutation of bytes takes four of them as places in a table of the eight magnitudes; the signs stand
in the digits' fourth bits, those of ``second`` where E4M3 has them, those of ``first`` four bits lower (:data:`BITS`).

Scales. A weight's scale is the largest of its row times a power of two, 2**-step; steps are multiplied by 8, the size
of a table. For each block: for g = 0 to 7, for each tile, for each of two groups of 32 columns, the bytes of rows g and
g + 8; a last group of rows has room for four tiles. Behind all of them: for each row the E8M0 byte of its largest
scale. A group of zeros has no say in that: its own scale is held as far as the others allow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polymoe.layouts.cuda.w4a16_fragments import COLUMNS, ROWS, TILE, inverse, move_bits, parts_of
from polymoe.shapes import round_up

__all__ = ["BITS", "MOST_STEP", "pack_codes", "pack_scales", "scale_bytes", "unpack_codes", "unpack_scales"]

BITS = tuple(bit for n in range(8) for bit in (4 * n, 4 * n + 1, 4 * n + 2, 8 * (n % 4) + (3 if n < 4 else 7)))
"""Where the bits of eight codes lie in a word."""

MOST_STEP = 14
"""Farthest that a scale may lie below its row's largest, in powers of two: E4M3 holds every magnitude of E2M1 down to
there. Steps of 15 are zeros."""

_GROUP = 32  # columns that share a scale


def pack_codes(codes_NB: Tensor) -> Tensor:
    """One matrix's codes [N, K/2] in the order the module describes: uint8 [N * K / 2]."""
    rows, whole = len(codes_NB), len(codes_NB) // ROWS * ROWS
    found = []
    for first, last in ((0, whole), (whole, rows)):
        if first < last:
            # group of rows, tile, h (row g or g + 8), g, block, 32 columns, half, t, byte
            x = codes_NB[first:last].unflatten(0, (-1, min(ROWS, last - first) // TILE, 2, 8))
            x = x.unflatten(4, (-1, 2, 2, 4, 2)).permute(0, 4, 1, 3, 7, 5, 2, 6, 8)
            found.append(move_bits(x.flatten(7), BITS).flatten())
    return torch.cat(found)


def unpack_codes(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of :func:`pack_codes`."""
    (whole,) = parts_of(packed, rows // TILE, ((columns // COLUMNS, 512),))
    x = move_bits(whole.view(*whole.shape[:2], 8, 4, 2, 2, 4), inverse(BITS)).unflatten(6, (2, 2))
    # tile, block, g, t, 32 columns, h, half, byte
    return x.permute(0, 5, 2, 1, 4, 6, 3, 7).flatten(3).flatten(0, 2)


def scale_bytes(rows: int, columns: int) -> int:
    """Bytes of one matrix's packed scales."""
    return round_up(rows, ROWS) * columns // _GROUP + rows


def pack_scales(scales_NG: Tensor, codes_NB: Tensor) -> tuple[Tensor, Tensor]:
    """One matrix's E8M0 bytes [N, G] in the order the module describes, and the largest step [] of a group that is not
    all zeros: more than :data:`MOST_STEP` cannot be told from what is packed."""
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
    """Inverse of :func:`pack_scales`, up to groups of zeros: bytes [N, G]."""
    steps, largest = packed.split([len(packed) - rows, rows])
    x = steps.view(-1, columns // COLUMNS, 8, 4, 2, 2).permute(0, 3, 5, 2, 1, 4).flatten(4).flatten(0, 3)
    return (largest[:, None].short() - x[:rows].short() // 8).clamp(min=0).byte()
