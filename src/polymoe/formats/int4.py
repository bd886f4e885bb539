"""INT4: integers 0 to 15; each group along a row has a scale and a zero point, or the fixed zero point 8."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.formats.base import Format, group_reduce
from polymoe.formats.elements import decode_scale, divide, encode_scale, pack_nibbles
from polymoe.formats.tensor import QuantTensor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Int4"]


class Int4(Format):
    """INT4 group-wise: symmetric (-8 to 7, zero 8) or with zero points (``(code - zero) * scale``)."""

    __slots__ = ()
    elements: ClassVar[tuple[str, ...]] = ("int4",)
    scale_dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16", "e8m0")

    def _quantize(self, w_NK: Tensor) -> QuantTensor:
        # The range always holds 0, so that a zero weight stays exactly zero.
        high = group_reduce(w_NK, self.encoding).clamp_min(0)
        low = group_reduce(w_NK, self.encoding, "amin").clamp_max(0)
        asymmetric = self.encoding.zero_points
        least = divide(high, 15) - divide(low, 15) if asymmetric else torch.maximum(divide(high, 7), -low / 8)
        assert self.encoding.scale_dtype is not None
        scales = encode_scale(least, self.encoding.scale_dtype)
        steps = decode_scale(scales)
        zeros = (-low / steps).round().clamp(0, 15) if asymmetric else torch.full_like(low, 8.0)
        codes = (w_NK / self._expand(steps, w_NK)).round() + self._expand(zeros, w_NK)
        codes = pack_nibbles(codes.clamp(0, 15).to(torch.uint8))
        return QuantTensor(codes, self.encoding, scales, zero_points=zeros.to(torch.uint8) if asymmetric else None)
