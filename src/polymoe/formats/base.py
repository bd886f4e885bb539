"""What a format is: an encoding and the rule that quantizes to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from polymoe.errors import FormatError
from polymoe.formats.encoding import Encoding, PerGroup
from polymoe.formats.tensor import QuantTensor, expand_groups
from polymoe.shapes import ceil_div

__all__ = ["Format", "group_reduce"]


@dataclass(frozen=True, slots=True)
class Format:
    """Base of the format classes; :data:`polymoe.formats.FORMATS` names the usual ones.

    A subclass implements :meth:`_quantize`. Decoding needs no subclass: the encoding says it all.
    """

    encoding: Encoding

    elements: ClassVar[tuple[str, ...]] = ()
    """Elements this class quantizes to."""

    def __post_init__(self) -> None:
        if self.encoding.element not in self.elements:
            raise FormatError(type(self).__name__, expected=" or ".join(self.elements), got=self.encoding.element)

    @property
    def name(self) -> str:
        """The encoding's name."""
        return self.encoding.name

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight, scales counted, on a large matrix: 4.25 for MXFP4."""
        return 8 * self.encoding.nbytes(4096, 4096) / 4096**2

    def quantize(self, w_NK: Tensor) -> QuantTensor:
        """Round float weights ``[..., N, K]`` (any float dtype, finite) to this format.

        Raises:
            FormatError: for weights that are not floating point, hold NaN or infinity, or whose K does not fit.
        """
        if w_NK.dim() < 2 or not w_NK.is_floating_point():
            raise FormatError(
                f"{self.name}.quantize", expected="float [..., N, K]", got=f"{w_NK.dtype} {list(w_NK.shape)}"
            )
        if not bool(torch.isfinite(w_NK).all()):
            raise FormatError(f"{self.name}.quantize", expected="finite weights", got="NaN or infinity")
        self.encoding.codes_shape(*w_NK.shape[-2:])
        return self._quantize(w_NK)

    def dequantize(self, tensor: QuantTensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """``tensor.dequantize(dtype)``, after checking that it is of this format."""
        if tensor.encoding != self.encoding:
            raise FormatError(f"{self.name}.dequantize", expected=repr(self.encoding), got=repr(tensor.encoding))
        return tensor.dequantize(dtype)

    def _quantize(self, w_NK: Tensor) -> QuantTensor:
        raise AssertionError(f"{type(self).__name__} does not quantize")

    def _expand(self, scales: Tensor, w_NK: Tensor) -> Tensor:
        return expand_groups(scales, self.encoding, w_NK.shape)


def group_reduce(w_NK: Tensor, encoding: Encoding, reduce: Literal["amax", "amin", "sum"] = "amax") -> Tensor:
    """Largest, smallest or sum of the weights that share one scale, in the shape of the scales.

    Partial blocks at the end count what they have.
    """
    *lead, rows, columns = w_NK.shape
    assert encoding.granularity is not None
    grid_rows, grid_columns = encoding.granularity.scale_shape(rows, columns)
    g = encoding.granularity
    n, k = (g.n, g.k) if isinstance(g, PerGroup) else (ceil_div(rows, grid_rows), columns)
    neutral = {"amax": float("-inf"), "amin": float("inf"), "sum": 0.0}[reduce]
    padded = torch.nn.functional.pad(w_NK, (0, grid_columns * k - columns, 0, grid_rows * n - rows), value=neutral)
    blocks = padded.reshape(*lead, grid_rows, n, grid_columns, k)
    return getattr(torch, reduce)(blocks, (-3, -1))
