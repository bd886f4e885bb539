"""A second, independent reading of stored expert tensors: numpy, float64, from the file's bytes.

It shares no code with the formats, dialects and file reader of polymoe, so that a mistake there becomes visible as a
difference. It identifies stored tensors by the endings of their names, and follows the specifications.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

_WIDTH = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """The bytes of one tensor in the file, with the header's dtype name and shape."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def item(self, index: int) -> RawTensor:
        """Return item ``index`` of the leading axis."""
        each = self.data.size // self.shape[0]
        return RawTensor(self.dtype, self.shape[1:], self.data[index * each : (index + 1) * each])

    def transposed(self) -> RawTensor:
        """Exchange the last two axes and keep the bytes of an element together."""
        if len(self.shape) < 2:
            return self
        cells = self.data.reshape(*self.shape, _WIDTH[self.dtype])
        turned = np.ascontiguousarray(np.swapaxes(cells, -2, -3))
        return RawTensor(self.dtype, turned.shape[:-1], turned.reshape(-1))

    def numbers(self) -> Float64:
        """Decode the tensor to numbers by the arithmetic of its dtype."""
        bits = self.data
        if self.dtype in ("F32", "F16", "I32", "I64"):
            kind = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8"}[self.dtype]
            values = bits.view(kind).astype(np.float64)
        elif self.dtype == "BF16":
            values = (bits.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        elif self.dtype == "F8_E8M0":
            values = _e8m0(bits)
        elif self.dtype == "F8_E4M3":
            exponent, fraction = (bits >> 3 & 15).astype(np.int64), (bits & 7).astype(np.float64)
            normal = (1 + fraction / 8) * np.exp2(exponent - 7.0)
            magnitude = np.where(exponent == 0, fraction / 8 * 2.0**-6, normal)
            values = np.where(bits & 0x7F == 0x7F, np.nan, np.where(bits & 0x80, -magnitude, magnitude))
        else:
            values = bits.astype(np.float64)
        return values.reshape(self.shape)


def read_raw(path: Path, name: str) -> RawTensor:
    """Map tensor ``name`` of the safetensors file at ``path``: the bytes between the header's offsets."""
    file = path.stat()
    begin, header = _header(path, file.st_mtime_ns, file.st_size)
    start, stop = header[name]["data_offsets"]
    data = np.memmap(path, np.uint8, "r", offset=begin + start, shape=(stop - start,))
    return RawTensor(header[name]["dtype"], tuple(header[name]["shape"]), data)


@lru_cache(maxsize=4)  # every tensor is read on its own, and a header may have megabytes
def _header(path: Path, changed_ns: int, size: int) -> tuple[int, dict[str, Any]]:
    """Return where the data begins, and the entries by name."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return 8 + length, json.loads(file.read(length))


def matrix(stored: Mapping[str, RawTensor], shape: tuple[int, int], *, awq: bool = False) -> Float64:
    """Decode the ``[N, K]`` matrix of ``stored`` tensors (by the endings of their names) to float64.

    Args:
        stored: for example ``{"blocks": ..., "scales": ...}`` or ``{"weight": ..., "weight_scale_inv": ...}``.
        shape: [N, K].
        awq: whether ``qweight`` is from AWQ instead of GPTQ.
    """
    if "blocks" in stored:  # gpt-oss: MXFP4 with 16 bytes per block
        codes = _fp4(stored["blocks"].data.reshape(shape[0], -1))
        return codes * _spread(_e8m0(stored["scales"].data).reshape(shape[0], -1), shape)
    if "qweight" in stored:
        return _gptq_or_awq(stored, shape, awq)
    if "weight_packed" in stored:
        return _compressed_tensors(stored, shape)
    weight = stored["weight"]
    scale = next((stored[s] for s in ("weight_scale_inv", "weight_scale", "scale") if s in stored), None)
    if scale is None:
        return weight.numbers().reshape(shape)
    codes = _fp4(weight.data.reshape(shape[0], -1)) if weight.dtype in ("U8", "I8") else weight.numbers()
    numbers = _e8m0(scale.data).reshape(scale.shape) if scale.dtype == "U8" else scale.numbers()
    numbers = numbers * (stored["weight_scale_2"].numbers().reshape(()) if "weight_scale_2" in stored else 1.0)
    return codes * _spread(numbers if numbers.ndim == 2 else numbers.reshape(1, 1), shape)


def input_scale(stored: Mapping[str, RawTensor]) -> Float64 | None:
    """Return the static scale of the input, a multiplier without dimensions; None if there is none, or if it is zero,
    negative or not finite: then it was never calibrated."""
    name = next((n for n in ("input_scale", "input_global_scale") if n in stored), None)
    if name is None:
        return None
    scale = stored[name].numbers().reshape(())
    if not (np.isfinite(scale) and scale > 0):
        return None
    return scale if name == "input_scale" else 1 / scale  # compressed-tensors stores what it divides by


def _compressed_tensors(stored: Mapping[str, RawTensor], shape: tuple[int, int]) -> Float64:
    packed, scale = stored["weight_packed"], stored["weight_scale"]
    if packed.dtype == "U8":  # NVFP4 divides by its global scale; MXFP4 has none and its scales are exponents
        codes = _fp4(packed.data.reshape(shape[0], -1))
        divisor = stored["weight_global_scale"].numbers().reshape(()) if "weight_global_scale" in stored else 1.0
        numbers = _e8m0(scale.data).reshape(scale.shape) if scale.dtype == "U8" else scale.numbers()
        return codes * _spread(numbers, shape) / divisor
    codes = _nibbles(packed.data.view("<u4").reshape(shape[0], -1))
    zeros: Float64 | float = 8.0
    if "weight_zero_point" in stored:  # packed along the rows
        words = stored["weight_zero_point"]
        zeros = _spread(_nibbles(words.data.view("<u4").reshape(words.shape).T).T[: shape[0]], shape)
    return (codes - zeros) * _spread(scale.numbers(), shape)


def _gptq_or_awq(stored: Mapping[str, RawTensor], shape: tuple[int, int], awq: bool) -> Float64:
    words = stored["qweight"].data.view("<u4").reshape(stored["qweight"].shape)
    zero_words = stored["qzeros"].data.view("<u4").reshape(stored["qzeros"].shape)
    order = (0, 4, 1, 5, 2, 6, 3, 7) if awq else tuple(range(8))
    codes = _nibbles(words, order).T if awq else _nibbles(np.ascontiguousarray(words.T))
    zeros = _nibbles(zero_words, order) + (0 if awq else 1)  # GPTQ stores the zero point minus one
    return (codes - _spread(zeros.T, shape)) * _spread(stored["scales"].numbers().T, shape)


def _nibbles(words: NDArray[Any], order: tuple[int, ...] = tuple(range(8))) -> Float64:
    """Unpack eight numbers from each 32-bit word along the last axis; number i is nibble ``order[i]``."""
    split = np.stack([(words >> (4 * i)) & 15 for i in order], axis=-1)
    return split.reshape(*words.shape[:-1], -1).astype(np.float64)


def _fp4(data: NDArray[np.uint8]) -> Float64:
    """Unpack two E2M1 numbers from each byte, low nibble first: sign, two exponent bits, one fraction bit."""
    codes = np.stack((data & 15, data >> 4), axis=-1).reshape(*data.shape[:-1], -1)
    exponent, fraction = (codes >> 1 & 3).astype(np.float64), (codes & 1).astype(np.float64)
    magnitude = np.where(exponent == 0, fraction / 2, (1 + fraction / 2) * np.exp2(exponent - 1))
    return np.where(codes & 8, -magnitude, magnitude)


def _e8m0(data: NDArray[np.uint8]) -> Float64:
    return np.where(data == 255, np.nan, np.exp2(data.astype(np.float64) - 127.0))


def _spread(scales: Float64, shape: tuple[int, int]) -> Float64:
    """Scales ``[a, b]`` over ``[N, K]``: blocks of 128 where so many cover the axis, the last one partial (192 in two:
    128 and 64), and equal shares otherwise."""
    for axis in (0, 1):
        count, size = scales.shape[axis], shape[axis]
        scales = np.repeat(scales, 128 if -(-size // 128) == count else size // count, axis)
    return scales[: shape[0], : shape[1]]
