"""Checksums of experts, computed on their device: a few launches for each expert, and no waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from polymoe.tensors import Expert

__all__ = ["Checksums"]

_LARGE_BYTES = 1 << 20
"""Tensors of at least this size have a checksum of their own. Smaller ones are joined first, since on a GPU a launch
takes longer than to copy them."""

# Of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), as signed integers.
_INCREMENT, _MIX = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


class Checksums:
    """Computes checksums of experts on one device.

    A checksum is the sum of a tensor's 64-bit words, modulo 2**64, each times a pseudorandom odd number that belongs to
    its position. One changed word always changes it. So do several, and words in another order, unless by a chance of
    about 2**-64, or of 2**(n - 64) if all differences are multiples of 2**n.
    """

    def __init__(self, device: torch.device) -> None:
        self._multipliers = torch.empty(0, dtype=torch.int64, device=device)

    def of(self, expert: Expert) -> list[Tensor]:
        """Return the checksums of an expert's parts in their order: int64 scalars, those of small parts first."""
        large, small, size = [], [], 0
        for part in expert.parts().values():
            flat = part.contiguous().view(-1).view(torch.uint8)
            if flat.numel() >= _LARGE_BYTES and not flat.numel() % 8 and not flat.storage_offset() % 8:
                large.append(flat)
            else:
                small.append(flat)
                size += flat.numel()
        if size % 8:
            small.append(small[0].new_zeros(-size % 8))
        joined = [torch.cat(small)] if small else []
        return [self._sum(flat.view(torch.int64)) for flat in joined + large]

    def _sum(self, words: Tensor) -> Tensor:
        if len(self._multipliers) < len(words):
            self._multipliers = _multipliers(len(words), words.device)
        multipliers = self._multipliers[: len(words)]
        if words.is_cpu:
            return torch.dot(words, multipliers)  # not on GPUs, whose dot takes no integers
        return (words * multipliers).sum()


def _multipliers(count: int, device: torch.device) -> Tensor:
    """Return pseudorandom odd numbers, int64 [count]."""
    x = torch.arange(1, count + 1, device=device) * _INCREMENT
    x = (x ^ (x >> 30)) * _MIX
    return (x ^ (x >> 27)) | 1
