"""FP8: E4M3 elements with one scale a tensor, an output channel, or a block (DeepSeek-V3's 128 x 128).

The scale multiplies: ``w = e4m3 * scale``, also where a checkpoint calls it ``weight_scale_inv``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polymoe.formats.base import Format, group_reduce
from polymoe.formats.elements import SCALE_DTYPES, decode_scale, encode_e4m3, encode_e8m0
from polymoe.formats.tensor import QuantTensor

__all__ = ["Fp8"]


class Fp8(Format):
    """FP8 E4M3 at any granularity; scales float32, bfloat16, float16 or E8M0."""

    __slots__ = ()
    elements: ClassVar[tuple[str, ...]] = ("e4m3",)

    def _quantize(self, w_NK: Tensor) -> QuantTensor:
        w = w_NK.float()
        amax = group_reduce(w.abs(), self.encoding)
        wanted = torch.where(amax == 0, torch.ones_like(amax), amax / 448.0)
        assert self.encoding.scale_dtype is not None
        if self.encoding.scale_dtype == "e8m0":
            mantissa, exponent = torch.frexp(wanted)  # wanted = mantissa * 2**exponent, 0.5 <= mantissa < 1
            scales = encode_e8m0(torch.where(mantissa == 0.5, exponent - 1, exponent))  # rounded up: nothing clips
        else:
            scales = wanted.to(SCALE_DTYPES[self.encoding.scale_dtype])
        codes = encode_e4m3(w / self._expand(decode_scale(scales), w))
        return QuantTensor(codes, self.encoding, scales)
