"""Helpers shared by the layouts of 4-bit weights: permute the bits of words, and split a packed matrix into tiles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def move_bits(words: Tensor, positions: Sequence[int]) -> Tensor:
    """Move bit b of each little-endian 32-bit word to bit ``positions[b]``.

    Args:
        words: uint8 [..., 4].
        positions: a permutation of 0 to 31.

    Returns:
        uint8 of the same shape, in new memory.
    """
    low, high = _tables(tuple(positions), words.device)
    halves = words.contiguous().view(torch.uint16).view(-1, 2)
    moved = low.index_select(0, halves[:, 0].int())
    moved |= high.index_select(0, halves[:, 1].int())
    return moved.view(torch.uint8).view(words.shape)


@cache
def inverse(positions: tuple[int, ...]) -> tuple[int, ...]:
    """Return the inverse permutation, with which :func:`move_bits` restores the words."""
    return tuple(sorted(range(32), key=positions.__getitem__))


@cache
def _tables(positions: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tables of the moved bits of every lower and every upper half of a word, int32 [65536] each.

    They are cached: to build them takes longer than to pack an expert.
    """
    bits = torch.arange(1 << 16, device=device)[:, None] >> torch.arange(16, device=device) & 1
    low, high = (
        (bits << torch.tensor(half, device=device)).sum(1).int()  # int() wraps: bit 31 is the sign
        for half in (positions[:16], positions[16:])
    )
    return low, high


def split_tiles(packed: Tensor, tiles: int, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Split a matrix that is packed in groups of four tiles of 16 rows. The last group may have fewer tiles.

    Args:
        packed: uint8, the whole matrix.
        tiles: number of tiles of 16 rows in the matrix.
        sizes: for each kind of block, in their order within a group: the number of blocks, and the bytes of a tile in
            each block.

    Returns:
        For each kind of block, uint8 [tiles, blocks, bytes].
    """
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
    return [join(parts) for parts in zip(*found, strict=True)]


def join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors. A single one is returned as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
