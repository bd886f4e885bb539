"""FP8: E4M3 elements with one scale for each tensor, output channel or block (DeepSeek-V3's 128 x 128), or one E8M0
scale for 32 of them along a row (MXFP8, OCP Microscaling specification 1.0).

The scale multiplies: ``w = e4m3 * scale``, even if a checkpoint calls it ``weight_scale_inv``. It is the smallest one
with which no weight is clipped; so is that of NVIDIA Model Optimizer's MXFP8, ``2**ceil(log2(amax / 448))``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from polymoe.formats.base import Format, group_reduce
from polymoe.formats.elements import decode_scale, divide, encode_e4m3, encode_scale
from polymoe.formats.tensor import QuantTensor

if TYPE_CHECKING:
    from torch import Tensor


class Fp8(Format):
    """FP8 E4M3 at any granularity; scales float32, bfloat16, float16 or E8M0."""

    __slots__ = ()
    elements: ClassVar[tuple[str, ...]] = ("e4m3",)
    scale_dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16", "e8m0")

    def _quantize(self, w_ENK: Tensor, importance_EK: Tensor | None, global_scale_E: Tensor | None) -> QuantTensor:
        assert self.encoding.scale_dtype is not None
        scales = encode_scale(divide(group_reduce(w_ENK.abs(), self.encoding), 448.0), self.encoding.scale_dtype)
        codes = encode_e4m3(w_ENK / self._expand(decode_scale(scales), w_ENK))
        return QuantTensor(codes, self.encoding, scales)
