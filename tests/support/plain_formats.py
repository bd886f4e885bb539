"""Weights decoded from their bytes in plain numpy and float64, by the definitions of the number formats.

Shares nothing with the package but the names of the fields.
"""

from __future__ import annotations

import numpy as np
import torch

from polymoe.formats import Encoding, PerChannel, PerGroup, PerTensor, QuantTensor


def small_float(bits: np.ndarray, exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Sign, exponent and mantissa as IEEE 754 combines them, without infinities."""
    bits = bits.astype(np.int64)
    sign = np.where(bits >> (exponent_bits + mantissa_bits) & 1, -1.0, 1.0)
    exponent = bits >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = (bits & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    normal = (1 + fraction) * 2.0 ** (exponent - bias)
    return sign * np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)


def e2m1(bits: np.ndarray) -> np.ndarray:
    return small_float(bits, 2, 1, 1)


def e4m3(bits: np.ndarray) -> np.ndarray:
    return np.where(bits & 0x7F == 0x7F, np.nan, small_float(bits, 4, 3, 7))


def e8m0(bits: np.ndarray) -> np.ndarray:
    return np.where(bits == 255, np.nan, 2.0 ** (bits.astype(np.int64) - 127))


def floats(tensor: torch.Tensor) -> np.ndarray:
    """Any stored float tensor as float64, from its bytes."""
    raw = np.ascontiguousarray(tensor.contiguous().view(torch.uint8).numpy())
    if tensor.dtype == torch.float8_e4m3fn:
        return e4m3(raw)
    if tensor.dtype == torch.float8_e8m0fnu:
        return e8m0(raw)
    if tensor.dtype == torch.bfloat16:  # the upper half of a float32
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            return (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return raw.view({torch.float16: "<f2", torch.float32: "<f4"}[tensor.dtype]).astype(np.float64)


def spread(per_scale: np.ndarray, encoding: Encoding, rows: int, columns: int) -> np.ndarray:
    """One number a weight from one number a scale: row n and column k look up block (n // n_block, k // k_block)."""
    g = encoding.granularity
    n, k = np.arange(rows)[:, None], np.arange(columns)[None, :]
    if isinstance(g, PerTensor):
        n, k = n * 0, k * 0
    elif isinstance(g, PerChannel):
        k = k * 0
    else:
        assert isinstance(g, PerGroup)
        n, k = n // g.n, k // g.k
    return per_scale[..., n, k]


def elements(q: QuantTensor) -> np.ndarray:
    """Elements before scales; int4 less its zero point."""
    if q.encoding.bits != 4:
        return floats(q.codes)
    raw = q.codes.contiguous().numpy()
    codes = np.empty((*raw.shape[:-1], raw.shape[-1] * 2), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = raw & 15, raw >> 4
    if q.encoding.element == "e2m1":
        return e2m1(codes)
    if q.zero_points is None:
        return codes.astype(np.float64) - 8
    return codes.astype(np.float64) - spread(q.zero_points.numpy().astype(np.float64), q.encoding, *codes.shape[-2:])


def steps(q: QuantTensor) -> np.ndarray:
    """What one unit of the element is worth, for each weight: scale times global scale."""
    if q.scales is None:
        return np.ones(tuple(q.shape))
    result = spread(floats(q.scales), q.encoding, *q.shape[-2:])
    if q.global_scale is not None:
        result = result * q.global_scale.double().numpy()[..., None, None]
    return result


def weights(q: QuantTensor) -> np.ndarray:
    """The weights in float64."""
    return elements(q) * steps(q)


GRIDS = {
    "e2m1": np.unique(e2m1(np.arange(16))),
    "e4m3": np.unique(e4m3(np.array([b for b in range(256) if b & 0x7F != 0x7F]))),
    "int4": np.arange(-8.0, 8.0),
}
"""Every value an element can take, in ascending order."""


def distance_to_grid(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """How far the nearest point of an ascending ``grid`` is from each number."""
    upper = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    return np.minimum(np.abs(x - grid[upper - 1]), np.abs(x - grid[upper]))
