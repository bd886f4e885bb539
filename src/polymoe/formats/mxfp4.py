"""MXFP4: E2M1 elements, one E8M0 scale for 32 of them along a row (OCP Microscaling specification 1.0)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.formats.base import Format, group_reduce
from polymoe.formats.elements import decode, decode_scale, encode_e2m1, encode_e8m0, pack_nibbles
from polymoe.formats.tensor import QuantTensor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Mxfp4"]


class Mxfp4(Format):
    """MXFP4 and its variants with another group size."""

    __slots__ = ()
    elements: ClassVar[tuple[str, ...]] = ("e2m1",)
    scale_dtypes: ClassVar[tuple[str, ...]] = ("e8m0",)

    def _quantize(self, w_NK: Tensor) -> QuantTensor:
        amax = group_reduce(w_NK.abs(), self.encoding)
        # amax = m * 2**exponent with 0.5 <= m < 1. The specification's scale 2**(exponent - 3) puts amax in [4, 8) and
        # clips what is above 6; the next larger one clips nothing. Each group takes whichever errs less.
        exponent = torch.frexp(amax).exponent
        exponent = torch.where(amax == 0, torch.full_like(exponent, 3), exponent)
        # Errors are compared in units of the smaller scale: squares of the weights would overflow or vanish.
        unit = self._expand(decode_scale(encode_e8m0(exponent - 3)), w_NK)

        def attempt(shift: int) -> tuple[Tensor, Tensor, Tensor]:
            scales = encode_e8m0(exponent - shift)
            spread = self._expand(decode_scale(scales), w_NK)
            codes = pack_nibbles(encode_e2m1(w_NK / spread))
            error = (decode(codes, "e2m1") * spread - w_NK) / unit
            return codes, scales.view(torch.uint8), group_reduce(error.square(), self.encoding, "sum")

        (codes, scales, error), (wide_codes, wide_scales, wide_error) = attempt(3), attempt(2)
        wider = wide_error < error
        codes = torch.where(self._expand(wider, w_NK)[..., ::2], wide_codes, codes)
        scales = torch.where(wider, wide_scales, scales).view(torch.float8_e8m0fnu)
        return QuantTensor(codes, self.encoding, scales)
