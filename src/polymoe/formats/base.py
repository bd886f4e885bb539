"""Format: an encoding and the rule that quantizes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from polymoe.common.shapes import ceil_div
from polymoe.errors import FormatError
from polymoe.formats.encoding import Encoding, PerGroup
from polymoe.formats.tensor import QuantTensor, expand_groups

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Format", "best_scales", "group_reduce"]

_CHUNK = 1 << 14
"""Weights that a CPU core keeps in its cache with a search's temporaries, and that torch leaves to one thread: threads
that share chunks wait for each other after each of hundreds of operations."""


@dataclass(frozen=True, slots=True)
class Format:
    """Base of the format classes; :data:`polymoe.formats.FORMATS` names the usual ones.

    A subclass implements :meth:`_quantize`, which gets finite, contiguous float32 weights, and how much the squared
    error of each column counts, float32 ``[..., K]``, or None for all alike. Decoding needs no subclass: the encoding
    says it all.
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

    def quantize(self, w_NK: Tensor, importance_K: Tensor | None = None) -> QuantTensor:
        """Round float weights ``[..., N, K]`` (any float dtype, finite) to this format, by way of float32.

        MXFP4, NVFP4 and symmetric INT4 search the scale of each group that has the least squared error.

        Args:
            w_NK: the weights.
            importance_K: ``[..., K]``, 0 or more: how much the squared error of each column counts in that search, as
                the mean square of each input; None for all alike.

        Raises:
            FormatError: for weights that are not floating point or have no rows or columns, for NaN and infinity, for
                an odd K where two codes share a byte, and for weights too large for the element or its scale; for an
                importance of another shape, or one that is negative or not finite.
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
        if importance_K is not None:
            wanted = [*w_NK.shape[:-2], w_NK.shape[-1]]
            importance_K = importance_K.detach().to(w_NK.device, torch.float32)
            if list(importance_K.shape) != wanted or not bool(((importance_K >= 0) & importance_K.isfinite()).all()):
                got = f"shape {list(importance_K.shape)}, {importance_K.min():g} to {importance_K.max():g}"
                raise FormatError(f"{self.name}.quantize importance", expected=f"shape {wanted}, 0 or more", got=got)
        found = self._quantize(w_NK, importance_K)
        # Rounded up, a code times its scale may be beyond the largest number.
        largest = float(w_NK.abs().amax()) if w_NK.numel() else 0.0
        if largest > torch.finfo(torch.float32).max / 16 and not torch.isfinite(found.dequantize()).all():
            raise FormatError(
                f"{self.name}.quantize", expected="weights that are finite when rounded", got=f"{largest:g}"
            )
        return found

    def dequantize(self, tensor: QuantTensor, dtype: torch.dtype | None = None) -> Tensor:
        """``tensor.dequantize(dtype)``, after checking that it is of this format."""
        if tensor.encoding != self.encoding:
            raise FormatError(f"{self.name}.dequantize", expected=repr(self.encoding), got=repr(tensor.encoding))
        return tensor.dequantize(dtype)

    def _quantize(self, w_NK: Tensor, importance_K: Tensor | None) -> QuantTensor:
        raise AssertionError(f"{type(self).__name__} does not quantize")

    def _expand(self, scales: Tensor, w_NK: Tensor) -> Tensor:
        return expand_groups(scales, self.encoding, w_NK.shape)


def group_reduce(w_NK: Tensor, encoding: Encoding, reduce: Literal["amax", "amin", "sum"] = "amax") -> Tensor:
    """Largest, smallest or sum of the weights that share one scale, in the shape of the scales.

    Partial blocks at the end count what they have.
    """
    neutral = {"amax": float("-inf"), "amin": float("inf"), "sum": 0.0}[reduce]
    return getattr(torch, reduce)(_blocks(w_NK, encoding, neutral), -1)


def best_scales(
    w_NK: Tensor,
    encoding: Encoding,
    candidates: Iterable[Tensor],
    rounded: Callable[[Tensor], Tensor],
    importance_K: Tensor | None = None,
) -> Tensor:
    """Of candidate scales, those with the least squared error in each group; the first of equals.

    Args:
        w_NK: float32 ``[..., N, K]``.
        encoding: has the groups.
        candidates: float32 scales, not 0, each in the shape that ``encoding`` gives scales.
        rounded: quotients to the nearest numbers of the element; it may overwrite them.
        importance_K: ``[..., K]``, what the squared error of a column counts.
    """

    def by_row(values: Tensor) -> Tensor:
        blocks = _blocks(values, encoding, 0.0)
        return blocks.reshape(-1, *blocks.shape[-2:])

    blocks = by_row(w_NK)
    weights = None
    if importance_K is not None:
        weights = by_row(importance_K[..., None, :].expand_as(w_NK))
    # Groups are brought to [0.5, 1) by a power of 2, so that no square overflows or vanishes.
    amax = blocks.abs().amax(-1)
    unit = torch.ldexp(torch.ones_like(amax), torch.frexp(amax).exponent)
    candidates = list(candidates)
    steps = torch.stack([c.reshape(unit.shape) for c in candidates])

    def search(first: int) -> Tensor:
        part = slice(first, first + rows)
        scaled, least, best = blocks[part] / unit[part, ..., None], None, steps[0, part]
        for step in steps[:, part]:
            spread = (step / unit[part])[..., None]
            error = rounded(scaled / spread).mul_(spread).sub_(scaled).square_()
            if weights is not None:
                error *= weights[part]
            error = error.sum(-1)
            if least is None:
                least = error
                continue
            best = torch.where(error < least, step, best)
            least = torch.minimum(error, least)
        return best

    rows = max(1, _CHUNK // blocks.shape[1:].numel() if w_NK.device.type == "cpu" else len(blocks))
    firsts = range(0, len(blocks), rows)
    if len(firsts) < 2:
        return torch.cat([search(first) for first in firsts] or [unit]).view(candidates[0].shape)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return torch.cat(list(pool.map(search, firsts))).view(candidates[0].shape)


def _blocks(w_NK: Tensor, encoding: Encoding, padding: float) -> Tensor:
    """The weights by scale: ``[..., *scale_shape, weights of one scale]``, a view where groups are parts of rows."""
    *lead, rows, columns = w_NK.shape
    g = encoding.granularity
    assert g is not None
    grid_rows, grid_columns = g.scale_shape(rows, columns)
    n, k = (g.n, g.k) if isinstance(g, PerGroup) else (ceil_div(rows, grid_rows), columns)
    if grid_columns * k != columns or grid_rows * n != rows:
        size = (0, grid_columns * k - columns, 0, grid_rows * n - rows)
        w_NK = torch.nn.functional.pad(w_NK, size, value=padding)
    return w_NK.reshape(*lead, grid_rows, n, grid_columns, k).transpose(-3, -2).flatten(-2)
