"""Weights that are hard to quantize, and quantized tensors compared by their bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from polymoe.formats import QuantTensor


def rough_weights(*shape: int, seed: int = 0, scale: float = 0.05) -> Tensor:
    """Normal weights whose rows and columns differ in size, with outliers, zeros of both signs and a row of zeros."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=g) * scale
    w *= torch.exp2(torch.randint(-6, 6, (*shape[:-1], 1), generator=g))
    w *= torch.exp2(torch.randint(-2, 3, (shape[-1],), generator=g))
    w[torch.rand(shape, generator=g) < 0.02] = 0.0
    w[torch.rand(shape, generator=g) < 0.02] = -0.0
    w[..., -1, :] = 0.0
    return w


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(a: QuantTensor, b: QuantTensor) -> None:
    """Equal to the bit."""
    assert a.encoding == b.encoding
    assert a.shape == b.shape
    for name, part in a.parts().items():
        assert torch.equal(bits(part), bits(b.parts()[name])), name
