"""The order of E4M3 weights in a matrix of the Hopper layout: converted in registers, two codes by one instruction.

The matrix is cut into tiles of 256 rows (the last may have 128), each into blocks of 128 columns, each into groups of
64 rows, each into 16 rows, each into 32 columns. There, lane after lane of a warp has 16 codes: of the first 16 columns
and of the last, the four registers of two codes each that ``wgmma`` m64k16 wants of its A operand.

Rows: see :mod:`polymoe.layouts.cuda.w16_swizzle128`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BLOCK", "pack_bytes", "unpack_bytes"]

BLOCK = 128
"""What rows and columns must be multiples of."""

_ROWS = 256
_PLACES = (0, 5, 1, 2, 6, 4, 9, 7, 8, 3)


def pack_bytes(codes_NK: Tensor) -> Tensor:
    """One matrix's codes, uint8 [N, K], in the module's order: uint8 [N * K]."""
    whole = codes_NK.shape[0] // _ROWS * _ROWS
    parts = []
    for rows in (codes_NK[:whole], codes_NK[whole:]):
        if len(rows):
            pairs = rows.contiguous().view(torch.int16)
            parts.append(_split(pairs, min(len(rows), _ROWS)).permute(_PLACES).flatten())
    return torch.cat(parts).view(torch.uint8)


def unpack_bytes(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of :func:`pack_bytes`: uint8 [rows, columns]."""
    counts, parts = (rows // _ROWS * _ROWS, rows % _ROWS), []
    for count, piece in zip(counts, packed.split([count * columns for count in counts]), strict=True):
        if count:
            natural = torch.empty(count, columns // 2, dtype=torch.int16, device=packed.device)
            places = _split(natural, min(count, _ROWS)).permute(_PLACES)
            places.copy_(piece.view(torch.int16).view(places.shape))
            parts.append(natural)
    return torch.cat(parts).view(torch.uint8)


def _split(pairs: Tensor, tile: int) -> Tensor:
    """Pairs of codes [N, K/2] as [tiles, groups, 16 rows, half, g, blocks, 32 columns, step, half, t]."""
    return pairs.unflatten(1, (-1, 4, 2, 2, 4)).unflatten(0, (-1, tile // 64, 4, 2, 8))
