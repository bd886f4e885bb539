"""Format: an encoding and the rule that quantizes to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, TypeVar

import torch

from polymoe.common.shapes import ceil_div
from polymoe.common.threads import threads_of
from polymoe.errors import FormatError
from polymoe.formats.encoding import Encoding, PerChannel, PerGroup
from polymoe.formats.tensor import QuantTensor, expand_groups

if TYPE_CHECKING:
    from torch import Tensor

_TILE = 1 << 17
"""Weights that one thread quantizes at a time on a CPU: few enough for its cache, and so many that calls of torch cost
little beside the work."""

MatrixTile: TypeAlias = "tuple[slice, slice, slice]"
"""Matrices of a stack, rows, columns."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Format:
    """Base of the format classes; :data:`polymoe.formats.FORMATS` names the usual ones.

    A subclass implements :meth:`_quantize`. Decoding needs no subclass: the encoding says it all.
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
        # Stacks are [E, N, K] from here on.
        lead, w_NK = w_NK.shape[:-2], w_NK.detach().reshape(-1, *w_NK.shape[-2:])
        if importance_K is not None:
            wanted = [*lead, w_NK.shape[-1]]
            importance_K = importance_K.detach().to(w_NK.device, torch.float32)
            if list(importance_K.shape) != wanted or not bool(((importance_K >= 0) & importance_K.isfinite()).all()):
                got = f"shape {list(importance_K.shape)}, {importance_K.min():g} to {importance_K.max():g}"
                raise FormatError(f"{self.name}.quantize importance", expected=f"shape {wanted}, 0 or more", got=got)
            importance_K = importance_K.reshape(len(w_NK), -1)
        amax = w_NK.new_zeros(len(w_NK), dtype=torch.float32)
        for (matrices, _, _), most in map_tiles(lambda tile: _largest(w_NK[tile]), w_NK, self.encoding):
            amax[matrices] = torch.maximum(amax[matrices], most)
        largest = float(amax.max()) if len(amax) else 0.0  # the one wait for a GPU
        if not math.isfinite(largest):  # the maximum of NaN and a number is NaN
            raise FormatError(f"{self.name}.quantize", expected="finite float32 weights", got="NaN or infinity")
        global_scale = self._global_scale(amax)
        stack, rows, columns = w_NK.shape
        found = QuantTensor.empty(self.encoding, rows, columns, w_NK.device, stack=stack)

        def quantize(tile: MatrixTile) -> None:
            matrices, rows, columns = tile
            part = self._quantize(
                w_NK[tile].float().contiguous(),
                None if importance_K is None else importance_K[matrices, columns],
                None if global_scale is None else global_scale[matrices],
            )
            place = found.rows(rows.start, rows.stop).columns(columns.start, columns.stop)
            for name, into in place.parts().items():
                into[matrices].copy_(part.parts()[name])

        map_tiles(quantize, w_NK, self.encoding)
        # Rounded up, a code times its scale may be beyond the largest number.
        if largest > torch.finfo(torch.float32).max / 16 and not torch.isfinite(found.dequantize()).all():
            raise FormatError(
                f"{self.name}.quantize", expected="weights that are finite when rounded", got=f"{largest:g}"
            )
        return found.map(lambda part: part.reshape([*lead, *part.shape[1:]]))

    def dequantize(self, tensor: QuantTensor, dtype: torch.dtype | None = None) -> Tensor:
        """``tensor.dequantize(dtype)``, after checking that it is of this format."""
        if tensor.encoding != self.encoding:
            raise FormatError(f"{self.name}.dequantize", expected=repr(self.encoding), got=repr(tensor.encoding))
        return tensor.dequantize(dtype)

    def _global_scale(self, amax_E: Tensor) -> Tensor | None:
        """The scale of each matrix, float32 like the largest magnitude in it; None if the encoding has none."""
        return None

    def _quantize(self, w_ENK: Tensor, importance_EK: Tensor | None, global_scale_E: Tensor | None) -> QuantTensor:
        """Quantize matrices, or whole groups of them.

        Args:
            w_ENK: the weights, finite and contiguous, float32.
            importance_EK: how much the squared error of each column counts, float32; None for all alike.
            global_scale_E: what :meth:`_global_scale` returned.
        """
        raise AssertionError(f"{type(self).__name__} does not quantize")

    def _expand(self, scales: Tensor, w_NK: Tensor) -> Tensor:
        return expand_groups(scales, self.encoding, w_NK.shape)


def map_tiles(function: Callable[[MatrixTile], T], w_ENK: Tensor, encoding: Encoding) -> list[tuple[MatrixTile, T]]:
    """Call a function for each tile of matrices, side by side on the cores of a CPU; elsewhere for all of them at once.

    Args:
        function: gets slices of ``w_ENK``, which cut no group and no byte. To torch it is one thread: threads that
            share operations would wait for each other after each of hundreds.
        w_ENK: the matrices, or others of their shape.
        encoding: how they are stored.

    Returns:
        Each tile with the result.
    """
    tiles = _tiles(w_ENK, encoding)
    threads = torch.get_num_threads()
    if min(threads, len(tiles)) < 2:
        return [(tile, function(tile)) for tile in tiles]

    inference = torch.is_inference_mode_enabled()

    def in_the_callers_mode(tile: MatrixTile) -> T:
        with torch.inference_mode(inference):
            return function(tile)

    return [*zip(tiles, threads_of(threads).map(in_the_callers_mode, tiles), strict=True)]


def _tiles(w_ENK: Tensor, encoding: Encoding) -> list[MatrixTile]:
    stack, rows, columns = w_ENK.shape
    g = encoding.granularity
    if w_ENK.device.type != "cpu" or not isinstance(g, PerGroup | PerChannel) or w_ENK.numel() <= _TILE:
        return [(slice(0, stack), slice(0, rows), slice(0, columns))]
    n, k = (g.n, math.lcm(g.k, 2)) if isinstance(g, PerGroup) else (1, columns)
    width = min(columns, max(_TILE // n // k, 1) * k)
    height = max(_TILE // width // n, 1) * n
    return [
        (slice(e, e + 1), slice(top, min(top + height, rows)), slice(left, min(left + width, columns)))
        for e in range(stack)
        for top in range(0, rows, height)
        for left in range(0, columns, width)
    ]


def group_reduce(w_NK: Tensor, encoding: Encoding, reduce: Literal["amax", "amin", "sum"] = "amax") -> Tensor:
    """Largest, smallest or sum of the weights that share one scale, in the shape of the scales.

    Partial blocks at the end count what they have.
    """
    neutral = {"amax": float("-inf"), "amin": float("inf"), "sum": 0.0}[reduce]
    return getattr(torch, reduce)(_blocks(w_NK, encoding, neutral), -1)


def best_scales(
    w_NK: Tensor,
    encoding: Encoding,
    candidates: Sequence[Tensor] | Tensor,
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
    blocks = _blocks(w_NK, encoding, 0.0)
    weights = None if importance_K is None else _blocks(importance_K[..., None, :].expand_as(w_NK), encoding, 0.0)
    # Groups are brought to [0.5, 1) by a power of 2, so that no square overflows or vanishes.
    amax = blocks.abs().amax(-1)
    unit = torch.ldexp(torch.ones_like(amax), torch.frexp(amax).exponent)
    scaled, quotients = blocks / unit[..., None], torch.empty_like(blocks)
    least, best = torch.full_like(amax, torch.inf), candidates[0]
    for step in candidates:
        spread = (step / unit)[..., None]
        error = rounded(torch.div(scaled, spread, out=quotients)).mul_(spread).sub_(scaled).square_()
        if weights is not None:
            error *= weights
        error = error.sum(-1)
        best = torch.where(error < least, step, best)
        least = torch.minimum(error, least)
    return best


def _largest(w_ENK: Tensor) -> Tensor:
    """The largest magnitude in each matrix, as float32; NaN if there is one."""
    return w_ENK.float().abs().amax((-2, -1))


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
