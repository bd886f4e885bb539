"""Format: an encoding and the rule that quantizes to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from polymoe.common.shapes import ceil_div
from polymoe.errors import FormatError
from polymoe.formats.encoding import Encoding, PerGroup
from polymoe.formats.tensor import QuantTensor, expand_groups

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Format", "group_reduce"]


@dataclass(frozen=True, slots=True)
class Format:
    """Base of the format classes; :data:`polymoe.formats.FORMATS` names the usual ones.

    A subclass implements :meth:`_quantize`, which gets finite, contiguous float32 weights. Decoding needs no subclass:
    the encoding says it all.
    """

    encoding: Encoding

    elements: ClassVar[tuple[str, ...]] = ()
    """Elements this class quantizes to."""

    scale_dtypes: ClassVar[tuple[str | None, ...]] = (None,)
    """Scale dtypes this class quantizes to; other ones are only read."""

    def __post_init__(self) -> None:
        kind, e = type(self).__name__, self.encoding
        if e.element not in self.elements:
            raise FormatError(kind, expected=f"elements {' or '.join(self.elements)}", got=e.element)
        if e.scale_dtype not in self.scale_dtypes:
            known = " or ".join(map(str, self.scale_dtypes))
            raise FormatError(kind, expected=f"scales in {known}", got=str(e.scale_dtype))

    @property
    def name(self) -> str:
        """The encoding's name."""
        return self.encoding.name

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight, scales counted, on a large matrix: 4.25 for MXFP4."""
        return 8 * self.encoding.nbytes(4096, 4096) / 4096**2

    def quantize(self, w_NK: Tensor) -> QuantTensor:
        """Round float weights ``[..., N, K]`` (any float dtype, finite) to this format, by way of float32.

        Raises:
            FormatError: for weights that are not floating point or have no rows or columns, for NaN and infinity, for
                an odd K where two codes share a byte, and for weights too large for the element or its scale.
        """
        if w_NK.dim() < 2 or not w_NK.is_floating_point():
            raise FormatError(
                f"{self.name}.quantize", expected="float [..., N, K]", got=f"{w_NK.dtype} {list(w_NK.shape)}"
            )
        if 0 in w_NK.shape[-2:]:
            raise FormatError(f"{self.name}.quantize", expected="rows and columns", got=str(list(w_NK.shape)))
        self.encoding.codes_shape(*w_NK.shape[-2:])
        w_NK = w_NK.detach().float().contiguous()
        if not bool(torch.isfinite(w_NK).all()):
            raise FormatError(f"{self.name}.quantize", expected="finite float32 weights", got="NaN or infinity")
        found = self._quantize(w_NK)
        # Rounded up, a code times its scale may be beyond the largest number.
        if w_NK.abs().amax() > torch.finfo(torch.float32).max / 16 and not torch.isfinite(found.dequantize()).all():
            largest = f"{float(w_NK.abs().amax()):g}"
            raise FormatError(f"{self.name}.quantize", expected="weights that are finite when rounded", got=largest)
        return found

    def dequantize(self, tensor: QuantTensor, dtype: torch.dtype | None = None) -> Tensor:
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
