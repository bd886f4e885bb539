"""Format: an encoding and the rule that quantizes to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch

from polymoe.common.threads import threads_of
from polymoe.errors import FormatError
from polymoe.formats.encoding import Encoding, PerChannel, PerGroup
from polymoe.formats.rules import NVFP4_RULE, RULES, Rule, global_scale
from polymoe.formats.tensor import QuantTensor

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
    """An encoding to which floats are quantized; :data:`polymoe.formats.FORMATS` names the usual ones.

    Raises:
        FormatError: for scales of a dtype that is only read.
    """

    encoding: Encoding

    def __post_init__(self) -> None:
        rule, dtype = self._rule, self.encoding.scale_dtype
        if dtype not in rule.scale_dtypes:
            known = " or ".join(map(str, rule.scale_dtypes))
            raise FormatError(rule.name, expected=f"scales in {known}", got=str(dtype))

    @property
    def _rule(self) -> Rule:
        return NVFP4_RULE if self.encoding.global_scale else RULES[self.encoding.element]

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
        where = f"{self.name}.quantize"
        if w_NK.dim() < 2 or not w_NK.is_floating_point():
            raise FormatError(where, expected="float [..., N, K]", got=f"{w_NK.dtype} {list(w_NK.shape)}")
        if 0 in w_NK.shape[-2:]:
            raise FormatError(where, expected="rows and columns", got=str(list(w_NK.shape)))
        self.encoding.codes_shape(*w_NK.shape[-2:])
        # Stacks are [E, N, K] from here on.
        lead, w_NK = w_NK.shape[:-2], w_NK.detach().reshape(-1, *w_NK.shape[-2:])
        if importance_K is not None:
            wanted = [*lead, w_NK.shape[-1]]
            importance_K = importance_K.detach().to(w_NK.device, torch.float32)
            if list(importance_K.shape) != wanted or not bool(((importance_K >= 0) & importance_K.isfinite()).all()):
                got = f"shape {list(importance_K.shape)}, {importance_K.min():g} to {importance_K.max():g}"
                raise FormatError(f"{where} importance", expected=f"shape {wanted}, 0 or more", got=got)
            importance_K = importance_K.reshape(len(w_NK), -1)
        amax = w_NK.new_zeros(len(w_NK), dtype=torch.float32)
        magnitudes = map_tiles(lambda tile: w_NK[tile].float().abs().amax((-2, -1)), w_NK, self.encoding)
        for (matrices, _, _), most in magnitudes:
            amax[matrices] = torch.maximum(amax[matrices], most)
        largest = float(amax.max()) if len(amax) else 0.0  # the one wait for a GPU
        if not math.isfinite(largest):  # the maximum of NaN and a number is NaN
            raise FormatError(where, expected="finite float32 weights", got="NaN or infinity")
        scale_E = global_scale(amax) if self.encoding.global_scale else None
        stack, rows, columns = w_NK.shape
        found = QuantTensor.empty(self.encoding, rows, columns, w_NK.device, stack=stack)

        def quantize(tile: MatrixTile) -> None:
            matrices, rows, columns = tile
            part = self._rule.quantize(
                w_NK[tile].float().contiguous(),
                self.encoding,
                None if importance_K is None else importance_K[matrices, columns],
                None if scale_E is None else scale_E[matrices],
            )
            place = found.rows(rows.start, rows.stop).columns(columns.start, columns.stop)
            for name, into in place.parts().items():
                into[matrices].copy_(part.parts()[name])

        map_tiles(quantize, w_NK, self.encoding)
        # Rounded up, a code times its scale may be beyond the largest number.
        if largest > torch.finfo(torch.float32).max / 16 and not torch.isfinite(found.dequantize()).all():
            raise FormatError(where, expected="weights that are finite when rounded", got=f"{largest:g}")
        return found.map(lambda part: part.reshape([*lead, *part.shape[1:]]))

    def dequantize(self, tensor: QuantTensor, dtype: torch.dtype | None = None) -> Tensor:
        """``tensor.dequantize(dtype)``, after checking that it is of this format."""
        if tensor.encoding != self.encoding:
            raise FormatError(f"{self.name}.dequantize", expected=repr(self.encoding), got=repr(tensor.encoding))
        return tensor.dequantize(dtype)


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
    n, k = (g.n, encoding.grain(-1)) if isinstance(g, PerGroup) else (1, columns)
    width = min(columns, max(_TILE // n // k, 1) * k)
    height = max(_TILE // width // n, 1) * n
    return [
        (slice(e, e + 1), slice(top, min(top + height, rows)), slice(left, min(left + width, columns)))
        for e in range(stack)
        for top in range(0, rows, height)
        for left in range(0, columns, width)
    ]
