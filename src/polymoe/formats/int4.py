"""INT4: integers 0 to 15; each group along a row has a scale and a zero point, or the fixed zero point 8."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.formats.base import Format, best_scales, group_reduce
from polymoe.formats.elements import decode_scale, divide, encode_scale, pack_nibbles
from polymoe.formats.tensor import QuantTensor

if TYPE_CHECKING:
    from torch import Tensor


_LARGEST = (7.0, 7.3, 7.6, 8.0, 8.3, 8.6, 9.0, 9.3, 9.7, 10.1, 10.5, 11.0, 11.5, 12.0, 12.6, 13.3)
"""Numbers that the largest weight of a group is tried on. Those beyond 8 clip it. 7 and 8 give weights that are already
INT4 back as they are."""


class Int4(Format):
    """INT4 group-wise: symmetric (-8 to 7, zero 8) or with zero points (``(code - zero) * scale``)."""

    __slots__ = ()
    elements: ClassVar[tuple[str, ...]] = ("int4",)
    scale_dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16", "e8m0")

    def _quantize(self, w_ENK: Tensor, importance_EK: Tensor | None, global_scale_E: Tensor | None) -> QuantTensor:
        # The range always holds 0, so that a zero weight stays exactly zero.
        high = group_reduce(w_ENK, self.encoding).clamp_min(0)
        low = group_reduce(w_ENK, self.encoding, "amin").clamp_max(0)
        dtype = self.encoding.scale_dtype
        assert dtype is not None
        asymmetric = self.encoding.zero_points
        least = divide(high, 15) - divide(low, 15) if asymmetric else torch.maximum(divide(high, 7), -low / 8)
        scales = encode_scale(least, dtype)
        if not asymmetric and dtype != "e8m0":
            scales = self._search(w_ENK, high, low, scales, importance_EK)
        steps = decode_scale(scales)
        zeros = (-low / steps).round().clamp(0, 15) if asymmetric else torch.full_like(low, 8.0)
        codes = (w_ENK / self._expand(steps, w_ENK)).round() + self._expand(zeros, w_ENK)
        codes = pack_nibbles(codes.clamp(0, 15).to(torch.uint8))
        return QuantTensor(codes, self.encoding, scales, zero_points=zeros.to(torch.uint8) if asymmetric else None)

    def _search(self, w_ENK: Tensor, high: Tensor, low: Tensor, scales: Tensor, importance_EK: Tensor | None) -> Tensor:
        """Better scales, if there are, than those that clip nothing.

        The integers reach to -8, but only to 7: a scale with the sign that sends the largest weight to the negative
        side has a finer step.
        """
        assert self.encoding.scale_dtype is not None
        amax, sign = torch.maximum(high, -low), torch.where(high > -low, -1.0, 1.0)
        least = torch.stack([divide(amax, largest) for largest in _LARGEST])
        candidates = [decode_scale(scales), *(sign * decode_scale(encode_scale(least, self.encoding.scale_dtype)))]
        steps = best_scales(w_ENK, self.encoding, candidates, lambda x: x.round_().clamp_(-8, 7), importance_EK)
        return steps.to(scales.dtype)
