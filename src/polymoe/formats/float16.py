"""BF16 and FP16: weights stored as 16-bit floats, no scales."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from polymoe.formats.base import Format
from polymoe.formats.elements import CODE_DTYPES
from polymoe.formats.tensor import QuantTensor

__all__ = ["Float16"]


class Float16(Format):
    """Either 16-bit float."""

    __slots__ = ()
    elements: ClassVar[tuple[str, ...]] = ("bf16", "fp16")

    def _quantize(self, w_NK: Tensor) -> QuantTensor:
        return QuantTensor(w_NK.to(CODE_DTYPES[self.encoding.element]), self.encoding)
