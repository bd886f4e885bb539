"""Extremes of stored numbers: two reductions that tell NaN, infinity and tensors of zeros, at the speed of memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def has_numbers(part: Tensor) -> bool:
    """Return whether a tensor can hold NaN: 4-bit codes and zero points cannot, as each of their bytes is valid."""
    return part.dtype != torch.uint8


def extremes(part: Tensor, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Return two scalars of a tensor, or of each slice along ``dim``, on its device and without synchronizing it.

    Of floats: the smallest and the largest number; both are NaN if one is. Of E8M0: the smallest and the largest byte.
    Of E4M3: the largest byte as a signed and as an unsigned integer. E4M3 has no infinity, and its two NaN bytes 0x7f
    and 0xff are the largest of each.
    """
    if part.dtype == torch.float8_e4m3fn:
        axes = () if dim is None else (dim,)
        return part.view(torch.int8).amax(axes), part.view(torch.uint8).amax(axes)
    low, high = torch.aminmax(part.view(torch.uint8) if part.dtype == torch.float8_e8m0fnu else part, dim=dim)
    return low, high


def is_finite(dtype: torch.dtype, first: float, second: float) -> bool:
    """Return whether a tensor of ``dtype`` with these :func:`extremes` has neither NaN nor infinity."""
    if dtype == torch.float8_e4m3fn:
        return first < 0x7F and second < 0xFF
    if dtype == torch.float8_e8m0fnu:
        return second < 0xFF
    return math.isfinite(first) and math.isfinite(second)


def is_zero(dtype: torch.dtype, first: float, second: float) -> bool:
    """Return whether a tensor of ``dtype`` with these :func:`extremes` holds zeros only, of either sign.

    E8M0 has no zero. Its smallest number, 2**-127, counts as one: with it everywhere, a matrix is a page of zero bytes.
    """
    if dtype == torch.float8_e4m3fn:
        return first <= 0 and second <= 0x80
    return first == second == 0
