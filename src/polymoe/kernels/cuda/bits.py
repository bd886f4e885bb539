"""Launches that copy words with their bits moved: see ``bits.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING

import torch

from polymoe.kernels.cuda import modules
from polymoe.kernels.cuda.targets import Target, target_for

if TYPE_CHECKING:
    from torch import Tensor

_DIMS, _BITS = 7, 32
_THREADS = 512
_CTAS = 1024  # several for each SM; a thread that copies some words computes its place once


class MoveBitsArgs(ctypes.Structure):
    """Arguments of ``move_bits``; the source documents the fields."""

    _fields_ = (
        ("from_", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("from_strides", ctypes.c_longlong * (_DIMS + 2)),
        ("to_strides", ctypes.c_longlong * (_DIMS + 2)),
        ("sizes", ctypes.c_int * _DIMS),
        ("from_words", ctypes.c_int),
        ("to_words", ctypes.c_int),
        ("turns", ctypes.c_int),
        ("by", ctypes.c_int * _BITS),
        ("masks", ctypes.c_uint * _BITS),
    )


@cache
def target_with_bits(device: torch.device) -> Target | None:
    """Return the cubins that move bits on a device, or None if there are none for it."""
    try:
        target = target_for(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None
    except LookupError:
        return None
    return target if target is not None and "bits" in target.units else None


def copy_bits(to: Tensor, words: Tensor, positions: tuple[int, ...], target: Target, stream: int) -> None:
    """Copy words, with bit b of each at bit ``positions[b]``.

    Args:
        to, words: uint8 of one shape, on torch's current device: up to seven dimensions, and [2, 2] bytes of a word.
        positions: a permutation of 0 to 31.
        target: the set of cubins.
        stream: of the device.
    """
    ones = _DIMS + 2 - words.dim()
    sizes = (*(1,) * ones, *words.shape[:-2])
    turns = _turns(positions)
    args = MoveBitsArgs(
        from_=words.data_ptr(),
        to=to.data_ptr(),
        from_strides=(0,) * ones + words.stride(),
        to_strides=(0,) * ones + to.stride(),
        sizes=sizes,
        from_words=_whole(words),
        to_words=_whole(to),
        turns=len(turns),
        by=tuple(turns),
        masks=tuple(turns.values()),
    )
    launch = modules.kernel("bits", "move_bits", target).prepare(args, _THREADS)
    across = -(-prod(sizes[2:]) // _THREADS)
    launch.set_grid(across, max(1, min(sizes[0] * sizes[1], _CTAS // across)))
    launch(stream)


@cache
def _turns(positions: Sequence[int]) -> dict[int, int]:
    """Return by how many bits to the left words are rotated, and which bits of the result are in place then."""
    masks: dict[int, int] = {}
    for bit, position in enumerate(positions):
        by = (position - bit) % _BITS
        masks[by] = masks.get(by, 0) | 1 << position
    return masks


def _whole(words: Tensor) -> bool:
    """Whether the four bytes of each word lie behind each other, aligned."""
    places = (words.data_ptr(), *words.stride()[:-2])
    return words.stride()[-2:] == (2, 1) and all(place % 4 == 0 for place in places)
