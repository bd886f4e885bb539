"""MXFP4: E2M1 elements, one E8M0 scale for 32 of them along a row (OCP Microscaling specification 1.0)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.formats.base import Format, best_scales, group_reduce
from polymoe.formats.elements import decode_scale, encode_e2m1, encode_e8m0, pack_nibbles, round_e2m1_
from polymoe.formats.tensor import QuantTensor

if TYPE_CHECKING:
    from torch import Tensor


class Mxfp4(Format):
    """MXFP4 and its variants with another group size."""

    __slots__ = ()
    elements: ClassVar[tuple[str, ...]] = ("e2m1",)
    scale_dtypes: ClassVar[tuple[str, ...]] = ("e8m0",)

    def _quantize(self, w_ENK: Tensor, importance_EK: Tensor | None, global_scale_E: Tensor | None) -> QuantTensor:
        magnitudes = w_ENK.abs()
        amax = group_reduce(magnitudes, self.encoding)
        # amax = m * 2**exponent with 0.5 <= m < 1. The specification's scale 2**(exponent - 3) puts amax in [4, 8) and
        # clips what is above 6; the next larger one clips nothing. Each group takes whichever errs less.
        exponent = torch.frexp(amax).exponent
        exponent = torch.where(amax == 0, torch.full_like(exponent, 3), exponent)
        candidates = [decode_scale(encode_e8m0(exponent - shift)) for shift in (3, 2)]
        steps = best_scales(magnitudes, self.encoding, candidates, round_e2m1_, importance_EK)
        codes = pack_nibbles(encode_e2m1(w_ENK / self._expand(steps, w_ENK)))
        scales = encode_e8m0(torch.where(steps == candidates[0], exponent - 3, exponent - 2))
        return QuantTensor(codes, self.encoding, scales)
