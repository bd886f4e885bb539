"""NVFP4: E2M1 elements, one E4M3 scale for 16 of them along a row, one float32 scale for the matrix.

Source: NVIDIA Model Optimizer's NVFP4 export (``weight_scale_2 = amax / (6 * 448)``, which multiplies).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.formats.base import Format, group_reduce
from polymoe.formats.elements import divide, encode_e2m1, encode_e4m3, encode_scale, pack_nibbles
from polymoe.formats.tensor import QuantTensor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Nvfp4"]

_LARGEST = 6.0 * 448.0


class Nvfp4(Format):
    """NVFP4, global scale per matrix."""

    __slots__ = ()
    elements: ClassVar[tuple[str, ...]] = ("e2m1",)
    scale_dtypes: ClassVar[tuple[str, ...]] = ("e4m3",)

    def _quantize(self, w_NK: Tensor) -> QuantTensor:
        global_scale = encode_scale(divide(w_NK.abs().amax((-2, -1)), _LARGEST), "float32")
        w = w_NK / global_scale[..., None, None]
        amax = group_reduce(w.abs(), self.encoding)
        # The smallest E4M3 number keeps a tiny group from dividing by zero; a group of zeros takes 1.
        least = torch.where(amax == 0, torch.ones_like(amax), divide(amax, 6.0).clamp_min(2.0**-9))
        scales = encode_e4m3(least)
        codes = encode_e2m1(w / self._expand(scales.float(), w))
        return QuantTensor(pack_nibbles(codes), self.encoding, scales, global_scale=global_scale)
