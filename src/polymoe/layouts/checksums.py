"""Checksums of experts, computed on their device: a few launches for each expert, and no waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polymoe.layouts.staging import INPUT_SCALES, PartOffsets

# Of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), as signed integers.
_INCREMENT, _MIX = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


class Checksums:
    """Computes checksums of the experts of a layer on one device.

    A checksum is the sum of an expert's 64-bit words, modulo 2**64, each times a pseudorandom odd number that belongs
    to its position. One changed word always changes it. So do several, and words in another order, unless by a chance
    of about 2**-64, or of 2**(n - 64) if all differences are multiples of 2**n.

    Args:
        device: where the experts are.
        offsets: the positions of an expert's parts.
    """

    def __init__(self, device: torch.device, offsets: PartOffsets) -> None:
        self._offsets = offsets
        self._multipliers = torch.empty(0, dtype=torch.int64, device=device)

    def of_buffer(self, buffer: Tensor) -> Tensor:
        """Return the checksum, int64 [1], of an expert whose parts are at their offsets in ``buffer``, uint8, and zeros
        between them; or those of n experts, [n], whose buffers are [n, bytes]."""
        words = buffer.view(-1, buffer.shape[-1]).view(torch.int64)
        return _sums(words, self._at(0, words.shape[1]))

    def of(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the checksums, int64 [n], of the experts whose parts are [n, ...]. Input scales that are NaN count as
        missing, and missing parts as zeros."""
        words = {name: _words(part.nan_to_num() if name in INPUT_SCALES else part) for name, part in parts.items()}
        first = {name: self._offsets.of(name, 8 * x.shape[1]) // 8 for name, x in words.items()}
        self._at(0, self._offsets.nbytes // 8)  # all at once
        return torch.stack([_sums(x, self._at(first[name], x.shape[1])) for name, x in words.items()]).sum(0)

    def _at(self, first: int, count: int) -> Tensor:
        """Return the multipliers, int64 [count], of the words from ``first`` on."""
        if len(self._multipliers) < first + count:
            self._multipliers = _multipliers(first + count, self._multipliers.device)
        return self._multipliers[first : first + count]


def _words(part: Tensor) -> Tensor:
    """Return the bytes of tensors [n, ...] as int64 [n, words], padded with zeros."""
    flat = part.contiguous().view(len(part), -1).view(torch.uint8)
    if flat.shape[1] % 8 or flat.storage_offset() % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 8)).clone()
    return flat.view(torch.int64)


def _sums(words: Tensor, multipliers: Tensor) -> Tensor:
    """Return the checksum of each row of ``words``."""
    if words.is_cpu:
        return torch.stack([torch.dot(row, multipliers) for row in words])  # not on GPUs, whose dot takes no integers
    return (words * multipliers).sum(1)


def _multipliers(count: int, device: torch.device) -> Tensor:
    """Return pseudorandom odd numbers, int64 [count]."""
    x = torch.arange(1, count + 1, device=device) * _INCREMENT
    x = (x ^ (x >> 30)) * _MIX
    return (x ^ (x >> 27)) | 1
