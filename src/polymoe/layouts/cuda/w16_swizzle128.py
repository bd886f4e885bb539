"""The order of 16-bit weights in a matrix of the Hopper layout: ``wgmma`` reads it from shared memory as is.

The matrix is cut into groups of 64 rows (the last may have 16, 32 or 48), each into blocks of 128 bytes a row: 64
columns. In a block, row after row, the 16-byte piece p of row r is what the matrix has at piece
``p ^ (r % 8)``: the order that the matrix units call swizzled by 128 bytes, in which no two rows meet in one bank. What
is left of a row has piece after piece, each with all rows of the group. Group after group without gaps.

Rows. Products hold rows g and g + 8 of 16 in one thread. ``up`` with a gate has gate and up in turns of 8 rows, so that
a thread has both inputs of the activation. In other matrices rows of 16 are exchanged (:func:`neighbours`) so that four
neighbours of a result are together.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["neighbours", "pack_tiles", "unpack_tiles"]

_ROWS, _BLOCK, _PIECE = 64, 128, 16


def pack_tiles(rows_NB: Tensor) -> Tensor:
    """One matrix's rows as bytes [N, bytes], a multiple of 16 each, in the module's order: uint8 [N * bytes]."""
    whole = rows_NB.shape[0] // _ROWS * _ROWS
    parts = []
    for piece, rows in ((rows_NB[:whole], _ROWS), (rows_NB[whole:], rows_NB.shape[0] - whole)):
        if len(piece):
            words = piece.contiguous().view(torch.int64).unflatten(0, (-1, rows)).unflatten(2, (-1, _PIECE // 8))
            blocks = words.shape[2] // 8
            inner = words[:, :, : 8 * blocks].unflatten(2, (blocks, 8)).transpose(1, 2)
            tail = words[:, :, 8 * blocks :].transpose(1, 2)
            parts.append(torch.cat([_swizzled(inner).flatten(1), tail.flatten(1)], 1).flatten())
    return torch.cat(parts).view(torch.uint8)


def unpack_tiles(packed: Tensor, rows: int, row_bytes: int) -> Tensor:
    """Inverse of :func:`pack_tiles`: uint8 [rows, row_bytes]."""
    whole, blocks = rows // _ROWS * _ROWS, row_bytes // _BLOCK
    parts = []
    for piece, size in zip(
        packed.split([whole * row_bytes, (rows - whole) * row_bytes]), (_ROWS, rows - whole), strict=True
    ):
        if len(piece):
            groups = piece.view(torch.int64).view(-1, size * row_bytes // 8)
            inner, tail = groups.split([blocks * size * _BLOCK // 8, size * (row_bytes - blocks * _BLOCK) // 8], 1)
            inner = _swizzled(inner.unflatten(1, (blocks, size, 8, 2))).transpose(1, 2).flatten(2)
            tail = tail.unflatten(1, (-1, size, 2)).transpose(1, 2).flatten(2)
            parts.append(torch.cat([inner, tail], 2).flatten(0, 1))
    return torch.cat(parts).view(torch.uint8)


def neighbours(rows: Tensor, inverse: bool = False) -> Tensor:
    """Rows [N, ...] with those of every 16 exchanged: row ``4t + 2h + i`` goes to ``8h + 2t + i``."""
    split = (-1, 2, 4, 2) if inverse else (-1, 4, 2, 2)
    return rows.unflatten(0, split).transpose(1, 2).flatten(0, 3)


def _swizzled(blocks: Tensor) -> Tensor:
    """Pieces [groups, blocks, rows, 8, words] in their places, or back: it is its own inverse."""
    row = torch.arange(blocks.shape[2], device=blocks.device)[:, None]
    piece = torch.arange(8, device=blocks.device)
    return blocks[:, :, row, piece ^ (row % 8)]
