"""Rules that quantize floats, one for each kind of encoding: :data:`RULES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from polymoe.common.shapes import ceil_div
from polymoe.errors import FormatError
from polymoe.formats.elements import (
    CODE_DTYPES,
    decode_scale,
    divide,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    encode_scale,
    pack_nibbles,
    round_e2m1_,
)
from polymoe.formats.encoding import Encoding, PerGroup
from polymoe.formats.tensor import QuantTensor, expand_groups

if TYPE_CHECKING:
    from torch import Tensor

_INT4_TARGETS = (7.0, 7.3, 7.6, 8.0, 8.3, 8.6, 9.0, 9.3, 9.7, 10.1, 10.5, 11.0, 11.5, 12.0, 12.6, 13.3)
"""Numbers that the largest weight of a group is tried on. Those beyond 8 clip it. 7 and 8 give weights that are already
INT4 back as they are."""

_NVFP4_STEPS = (0, -1, -2, -3, 1, 2, 3, 4, 5, 6)
"""Of E4M3, eight to a power of 2: more bring nothing on normal weights."""


class Rule(NamedTuple):
    """How one kind of encoding is quantized to.

    Attributes:
        name: in errors.
        quantize: of matrices, or whole groups of them: the weights, [E, N, K], finite and contiguous, float32; their
            encoding; how much the squared error of each column counts, [E, K] float32, or None for all alike; and the
            global scale of each matrix, [E], if the encoding has one.
        scale_dtypes: dtypes of scales that are quantized to; other ones are only read.
    """

    name: str
    quantize: Callable[[Tensor, Encoding, Tensor | None, Tensor | None], QuantTensor]
    scale_dtypes: tuple[str | None, ...]


def global_scale(amax_E: Tensor) -> Tensor:
    """Return the scale of each NVFP4 matrix, float32 like the largest magnitude in it.

    Source: NVIDIA Model Optimizer's NVFP4 export (``weight_scale_2 = amax / (6 * 448)``, which multiplies).
    """
    return encode_scale(divide(amax_E, 6.0 * 448.0), "float32")


def _float16(w_ENK: Tensor, encoding: Encoding, importance_EK: Tensor | None, _: Tensor | None) -> QuantTensor:
    """Weights stored as 16-bit floats, no scales."""
    codes = w_ENK.to(CODE_DTYPES[encoding.element])
    if not bool(torch.isfinite(codes).all()):
        expected = f"weights up to {torch.finfo(codes.dtype).max:g}"
        raise FormatError(f"{encoding.name}.quantize", expected=expected, got=f"{w_ENK.abs().max():g}")
    return QuantTensor(codes, encoding)


def _fp8(w_ENK: Tensor, encoding: Encoding, importance_EK: Tensor | None, _: Tensor | None) -> QuantTensor:
    """E4M3 elements with one scale for each tensor, output channel or block (DeepSeek-V3's 128 x 128), or one E8M0
    scale for 32 of them along a row (MXFP8, OCP Microscaling specification 1.0).

    The scale multiplies: ``w = e4m3 * scale``, even if a checkpoint calls it ``weight_scale_inv``. It is the smallest
    one with which no weight is clipped; so is that of NVIDIA Model Optimizer's MXFP8, ``2**ceil(log2(amax / 448))``.
    """
    scales = encode_scale(divide(group_reduce(w_ENK.abs(), encoding), 448.0), encoding.scale_dtype or "")
    codes = encode_e4m3(w_ENK / expand_groups(decode_scale(scales), encoding, w_ENK.shape))
    return QuantTensor(codes, encoding, scales)


def _int4(w_ENK: Tensor, encoding: Encoding, importance_EK: Tensor | None, _: Tensor | None) -> QuantTensor:
    """Integers 0 to 15; each group along a row has a scale, and a zero point or the fixed zero point 8:
    ``(code - zero) * scale``."""
    # The range always holds 0, so that a zero weight stays exactly zero.
    high = group_reduce(w_ENK, encoding).clamp_min(0)
    low = group_reduce(w_ENK, encoding, "amin").clamp_max(0)
    dtype, asymmetric = encoding.scale_dtype or "", encoding.zero_points
    least = divide(high, 15) - divide(low, 15) if asymmetric else torch.maximum(divide(high, 7), -low / 8)
    scales = encode_scale(least, dtype)
    if not asymmetric and dtype != "e8m0":
        # Better scales, if there are, than those that clip nothing. The integers reach to -8, but only to 7: a scale
        # with the sign that sends the largest weight to the negative side has a finer step.
        amax, sign = torch.maximum(high, -low), torch.where(high > -low, -1.0, 1.0)
        finer = encode_scale(torch.stack([divide(amax, target) for target in _INT4_TARGETS]), dtype)
        candidates = [decode_scale(scales), *(sign * decode_scale(finer))]
        steps = best_scales(w_ENK, encoding, candidates, lambda x: x.round_().clamp_(-8, 7), importance_EK)
        scales = steps.to(scales.dtype)
    steps = decode_scale(scales)
    zeros = (-low / steps).round().clamp(0, 15) if asymmetric else torch.full_like(low, 8.0)
    steps_ENK, zeros_ENK = (expand_groups(x, encoding, w_ENK.shape) for x in (steps, zeros))
    codes = pack_nibbles(((w_ENK / steps_ENK).round() + zeros_ENK).clamp(0, 15).to(torch.uint8))
    return QuantTensor(codes, encoding, scales, zero_points=zeros.to(torch.uint8) if asymmetric else None)


def _mxfp4(w_ENK: Tensor, encoding: Encoding, importance_EK: Tensor | None, _: Tensor | None) -> QuantTensor:
    """E2M1 elements, one E8M0 scale for 32 of them along a row (OCP Microscaling specification 1.0)."""
    magnitudes = w_ENK.abs()
    amax = group_reduce(magnitudes, encoding)
    # amax = m * 2**exponent with 0.5 <= m < 1. The specification's scale 2**(exponent - 3) puts amax in [4, 8) and
    # clips what is above 6; the next larger one clips nothing. Each group takes whichever errs less.
    exponent = torch.frexp(amax).exponent
    exponent = torch.where(amax == 0, torch.full_like(exponent, 3), exponent)
    candidates = [decode_scale(encode_e8m0(exponent - shift)) for shift in (3, 2)]
    steps = best_scales(magnitudes, encoding, candidates, round_e2m1_, importance_EK)
    codes = pack_nibbles(encode_e2m1(w_ENK / expand_groups(steps, encoding, w_ENK.shape)))
    scales = encode_e8m0(torch.where(steps == candidates[0], exponent - 3, exponent - 2))
    return QuantTensor(codes, encoding, scales)


def _nvfp4(
    w_ENK: Tensor, encoding: Encoding, importance_EK: Tensor | None, global_scale_E: Tensor | None
) -> QuantTensor:
    """E2M1 elements, one E4M3 scale for 16 of them along a row, one float32 scale for the matrix."""
    assert global_scale_E is not None
    w_ENK = w_ENK / global_scale_E[:, None, None]
    magnitudes = w_ENK.abs()
    amax = group_reduce(magnitudes, encoding)
    # The smallest E4M3 number keeps a tiny group from dividing by zero; a group of zeros takes 1.
    least = torch.where(amax == 0, torch.ones_like(amax), divide(amax, 6.0).clamp_min(2.0**-9))
    # The scale that puts the largest weight on 6, and its neighbours: it may be clipped, or come to lie on 4. Positive
    # E4M3 numbers are counted from 2**-9 at 1 to 448 at 126.
    near = encode_e4m3(least).view(torch.uint8).int()
    bytes_ = torch.stack([near + step for step in _NVFP4_STEPS]).clamp(1, 126).to(torch.uint8)
    candidates = bytes_.view(torch.float8_e4m3fn).float()
    scales = encode_e4m3(best_scales(magnitudes, encoding, candidates, round_e2m1_, importance_EK))
    codes = encode_e2m1(w_ENK / expand_groups(scales.float(), encoding, w_ENK.shape))
    return QuantTensor(pack_nibbles(codes), encoding, scales, global_scale=global_scale_E)


_ANY_SCALES = ("float32", "bfloat16", "float16", "e8m0")

RULES: Mapping[str, Rule] = {
    "bf16": Rule("Float16", _float16, (None,)),
    "fp16": Rule("Float16", _float16, (None,)),
    "e4m3": Rule("Fp8", _fp8, _ANY_SCALES),
    "int4": Rule("Int4", _int4, _ANY_SCALES),
    "e2m1": Rule("Mxfp4", _mxfp4, ("e8m0",)),
}
"""By element, of encodings without a global scale."""

NVFP4_RULE = Rule("Nvfp4", _nvfp4, ("e4m3",))
"""Of E2M1 with a global scale."""


def group_reduce(w_NK: Tensor, encoding: Encoding, reduce: Literal["amax", "amin"] = "amax") -> Tensor:
    """Largest or smallest of the weights that share one scale, in the shape of the scales.

    Partial blocks at the end count what they have.
    """
    blocks = _blocks(w_NK, encoding, -torch.inf if reduce == "amax" else torch.inf)
    return getattr(torch, reduce)(blocks, -1)


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
