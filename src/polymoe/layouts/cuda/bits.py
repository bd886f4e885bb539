"""Shared by layouts that permute the bits of words: the words of a matrix in tiles of 16 rows, and their bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from polymoe.kernels.cuda.bits import copy_bits as launch_copy_bits
from polymoe.kernels.cuda.bits import target_with_bits

if TYPE_CHECKING:
    from torch import Tensor


def move_bits(words: Tensor, positions: tuple[int, ...]) -> Tensor:
    """Move bit b of each little-endian 32-bit word to bit ``positions[b]``.

    Args:
        words: uint8 [..., 4].
        positions: a permutation of 0 to 31.

    Returns:
        uint8 of the same shape, in new memory.
    """
    words = words.contiguous()
    moved = torch.empty_like(words)
    copy_bits(moved.view(-1, 2, 2), words.view(-1, 2, 2), positions)
    return moved


def copy_bits(to: Tensor, words: Tensor, positions: tuple[int, ...]) -> None:
    """Copy words to other places, and move bit b of each to bit ``positions[b]``.

    Args:
        to, words: uint8 [..., 2, 2], the four bytes of each word: views of at most nine dimensions, with any strides.
        positions: a permutation of 0 to 31.
    """
    target = target_with_bits(words.device)
    if target is not None:
        with torch.cuda.device(words.device):
            launch_copy_bits(to, words, positions, target, torch.cuda.current_stream().cuda_stream)
        return
    low, high = (table.to(words.device) for table in _tables(positions))
    halves = words.contiguous().view(torch.uint16).view(-1, 2)
    moved = low.index_select(0, halves[:, 0].int())
    moved |= high.index_select(0, halves[:, 1].int())
    to.copy_(moved.view(torch.uint8).view(words.shape))


@cache
def inverse(positions: tuple[int, ...]) -> tuple[int, ...]:
    """Return the inverse permutation, with which :func:`move_bits` restores the words."""
    return tuple(sorted(range(32), key=positions.__getitem__))


@cache
def _tables(positions: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return tables of the moved bits of every lower and every upper half of a word, int32 [65536] each, on the CPU.

    They are cached: to build them takes longer than to pack an expert.
    """
    bits = torch.arange(1 << 16, device="cpu")[:, None] >> torch.arange(16, device="cpu") & 1
    low, high = (
        (bits << torch.tensor(half, device="cpu")).sum(1).int()  # int() wraps: bit 31 is the sign
        for half in (positions[:16], positions[16:])
    )
    return low, high


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a matrix, and where their bytes lie in the packed one, which is cut into groups of four tiles of 16
    rows; the last may have fewer tiles. Within a group the columns lie behind each other.

    Attributes:
        begin, end: the first byte of each row, and the first one behind the columns.
        split: sizes into which these bytes are split.
        order: of the dimensions group, tile, h (row g or g + 8), g and the split ones. The last two are the bytes of a
            word.
    """

    begin: int
    end: int
    split: tuple[int, ...]
    order: tuple[int, ...]


def pack_words(codes_HNB: Tensor, columns: Sequence[Columns], positions: tuple[int, ...]) -> Tensor:
    """Pack the codes of a matrix.

    Args:
        codes_HNB: uint8 [halves, N, bytes], of gate and up or of one projection. Rows g and g + 8 of a tile are the
            same row of gate and up, or of one projection rows that are 8 apart.
        columns: all columns.
        positions: where the bits of each word go.

    Returns:
        uint8 of as many bytes, without dimensions.
    """
    packed = codes_HNB.new_empty(codes_HNB.numel())
    for natural, places in _views(codes_HNB, packed, columns):
        copy_bits(places, natural, positions)
    return packed


def unpack_words(
    packed: Tensor, shape: tuple[int, int, int], columns: Sequence[Columns], positions: tuple[int, ...]
) -> Tensor:
    """Return codes of ``shape`` [halves, N, bytes]: the inverse of :func:`pack_words`."""
    codes_HNB = packed.new_empty(shape)
    for natural, places in _views(codes_HNB, packed, columns):
        copy_bits(natural, places, inverse(positions))
    return codes_HNB


def _views(codes_HNB: Tensor, packed: Tensor, columns: Sequence[Columns]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of the same words in a matrix and in the packed one, each [..., 2, 2]."""
    gated, row_bytes = len(codes_HNB) == 2, codes_HNB.shape[2]
    tiles = codes_HNB.unflatten(1, (-1, 8)).transpose(0, 1) if gated else codes_HNB[0].unflatten(0, (-1, 2, 8))
    whole = len(tiles) // 4 * 4
    for first, last in ((0, whole), (whole, len(tiles))):
        for part in columns:
            if first < last and part.begin < part.end:
                groups = tiles[first:last, :, :, part.begin : part.end].unflatten(0, (-1, min(4, last - first)))
                natural = groups.unflatten(4, part.split).permute(part.order)
                places = packed.view(len(tiles), -1)[first:last].view(len(groups), -1)
                rows = places.shape[1] // row_bytes
                yield natural, places[:, rows * part.begin : rows * part.end].unflatten(1, natural.shape[1:])
