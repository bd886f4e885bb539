"""The tensors of a call besides its arguments: allocated, or as parts of the caller's workspace."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from polymoe.common.shapes import round_up

_ALIGNMENT = 256
"""Bytes at a multiple of which each tensor in a workspace begins; Triton compiles for multiples of 16 or for none."""

Buffers = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of tensors, by name."""


def allocate(buffers: Buffers, device: torch.device) -> dict[str, Tensor]:
    """Return new tensors on ``device``."""
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in buffers.items()}


def within(workspace: Tensor, buffers: Buffers) -> dict[str, Tensor]:
    """Return the tensors as parts of the workspace, one behind the other."""
    found, end = {}, 0
    for name, (shape, dtype) in buffers.items():
        part = workspace[end : end + prod(shape) * dtype.itemsize]
        found[name] = part.view(dtype).view(shape)
        end += aligned_bytes(shape, dtype)
    return found


def aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor in the workspace, rounded up so that the next one is aligned as a fresh one is."""
    return round_up(prod(shape) * dtype.itemsize, _ALIGNMENT)
