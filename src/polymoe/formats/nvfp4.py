"""NVFP4: E2M1 elements, one E4M3 scale for 16 of them along a row, one float32 scale for the matrix.

Source: NVIDIA Model Optimizer's NVFP4 export (``weight_scale_2 = amax / (6 * 448)``, which multiplies).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.formats.base import Format, best_scales, group_reduce
from polymoe.formats.elements import divide, encode_e2m1, encode_e4m3, encode_scale, pack_nibbles, round_e2m1_
from polymoe.formats.tensor import QuantTensor

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 6.0 * 448.0
_STEPS = (0, -1, -2, -3, 1, 2, 3, 4, 5, 6)  # of E4M3, eight to a power of 2: more bring nothing on normal weights


class Nvfp4(Format):
    """NVFP4, global scale per matrix."""

    __slots__ = ()
    elements: ClassVar[tuple[str, ...]] = ("e2m1",)
    scale_dtypes: ClassVar[tuple[str, ...]] = ("e4m3",)

    def _global_scale(self, amax_E: Tensor) -> Tensor:
        return encode_scale(divide(amax_E, _LARGEST), "float32")

    def _quantize(self, w_ENK: Tensor, importance_EK: Tensor | None, global_scale_E: Tensor | None) -> QuantTensor:
        assert global_scale_E is not None
        w = w_ENK / global_scale_E[:, None, None]
        magnitudes = w.abs()
        amax = group_reduce(magnitudes, self.encoding)
        # The smallest E4M3 number keeps a tiny group from dividing by zero; a group of zeros takes 1.
        least = torch.where(amax == 0, torch.ones_like(amax), divide(amax, 6.0).clamp_min(2.0**-9))
        # The scale that puts the largest weight on 6, and its neighbours: it may be clipped, or come to lie on 4.
        near = encode_e4m3(least).view(torch.uint8).int()
        candidates = _e4m3(torch.stack([near + step for step in _STEPS])).float()
        scales = encode_e4m3(best_scales(magnitudes, self.encoding, candidates, round_e2m1_, importance_EK))
        codes = encode_e2m1(w / self._expand(scales.float(), w))
        return QuantTensor(pack_nibbles(codes), self.encoding, scales, global_scale=global_scale_E)


def _e4m3(codes: Tensor) -> Tensor:
    """Positive E4M3 numbers, counted from 2**-9 at 1 to 448 at 126."""
    return codes.clamp(1, 126).to(torch.uint8).view(torch.float8_e4m3fn)
