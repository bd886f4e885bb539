"""BF16 and FP16: weights stored as 16-bit floats, no scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.errors import FormatError
from polymoe.formats.base import Format
from polymoe.formats.elements import CODE_DTYPES
from polymoe.formats.tensor import QuantTensor

if TYPE_CHECKING:
    from torch import Tensor


class Float16(Format):
    """Either 16-bit float."""

    __slots__ = ()
    elements: ClassVar[tuple[str, ...]] = ("bf16", "fp16")

    def _quantize(self, w_ENK: Tensor, importance_EK: Tensor | None, global_scale_E: Tensor | None) -> QuantTensor:
        codes = w_ENK.to(CODE_DTYPES[self.encoding.element])
        if not bool(torch.isfinite(codes).all()):
            largest = torch.finfo(codes.dtype).max
            raise FormatError(
                f"{self.name}.quantize", expected=f"weights up to {largest:g}", got=f"{w_ENK.abs().max():g}"
            )
        return QuantTensor(codes, self.encoding)
