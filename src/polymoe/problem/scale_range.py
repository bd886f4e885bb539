"""The range of the scales of a layer's 4-bit and MXFP8 weights. Some kernels decode only scales within a range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polymoe.formats import Encoding, PerGroup, QuantTensor
from polymoe.problem.tensors import ExpertWeights

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_EXPONENT, _LARGEST_SPREAD = 25, 14
_E8M0_BIAS, _E8M0_NAN = 127, 255
_LAST_E4M3 = 126  # the byte of 448; larger bytes are NaN and negative numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRange:
    """Bounds of the scales of MXFP4, NVFP4 and MXFP8 weights. Every kernel decodes scales within the defaults.

    Attributes:
        largest_exponent: each E8M0 scale is at most 2**largest_exponent.
        negative: whether an E4M3 scale is negative.
        spread: within each row, the largest E8M0 scale of 4-bit weights is at most 2**spread times the smallest.
            Groups of zeros do not count.
    """

    largest_exponent: int = _LARGEST_EXPONENT
    negative: bool = False
    spread: int = _LARGEST_SPREAD

    @property
    def ordinary(self) -> bool:
        """Whether every kernel decodes scales in this range."""
        return not self.outside_bfloat16 and self.spread <= _LARGEST_SPREAD

    @property
    def outside_bfloat16(self) -> bool:
        """Whether some scales are outside the range that kernels decode by multiplying in bfloat16."""
        return self.negative or self.largest_exponent > _LARGEST_EXPONENT

    def covers(self, other: ScaleRange) -> bool:
        """Return whether all scales within ``other`` are within this range."""
        return (
            other.largest_exponent <= self.largest_exponent
            and other.negative <= self.negative
            and other.spread <= self.spread
        )

    def __str__(self) -> str:
        parts = []
        if self.largest_exponent > _LARGEST_EXPONENT:
            parts.append(f"up to 2**{self.largest_exponent}")
        parts += ["negative"] if self.negative else []
        parts += [f"2**{self.spread} apart"] if self.spread > _LARGEST_SPREAD else []
        return "scales " + (", ".join(parts) or "of ordinary range")


def measure_scales(
    weights: ExpertWeights, device: torch.device | str = "cpu", where: str = "experts"
) -> ScaleRange | None:
    """Return the range of the scales of all local experts, or None if it is ordinary.

    All scales are read once. Codes are read only of matrices with a large spread, to find groups of zeros.

    Args:
        weights: the experts; they are read without the checks of :meth:`ExpertWeights.expert`.
        device: where the spread within rows is computed.
        where: the layer's name for messages.

    Raises:
        FormatError: for a scale that is NaN.
    """
    limited = {e for e in weights.spec.encodings.values() if _is_limited(e)}
    if not limited:
        return None
    exponent, spread, negative = _LARGEST_EXPONENT, _LARGEST_SPREAD, False
    for e, projection, low, high in _extremes(weights, limited):
        encoding = weights.spec.encodings[projection]
        if high > _LAST_E4M3 if encoding.scale_dtype == "e4m3" else high == _E8M0_NAN:
            name = f"{where}, expert {weights.spec.first_expert + e} {projection}"
            weights.peek(e).projections[projection].validate(name)
        if encoding.scale_dtype == "e4m3":
            negative |= high > _LAST_E4M3
        else:
            exponent = max(exponent, high - _E8M0_BIAS)
            if encoding.bits == 4 and high - low > spread:
                spread = max(spread, _spread(weights.peek(e).projections[projection], torch.device(device)))
    found = ScaleRange(largest_exponent=exponent, negative=negative, spread=spread)
    return None if found.ordinary else found


def _extremes(weights: ExpertWeights, limited: set[Encoding]) -> list[tuple[int, str, int, int]]:
    """Return the smallest and largest byte of the scales of each expert's projections; a GPU is waited for once."""
    if weights.stacks is not None:
        names = [projection for projection, encoding in weights.spec.encodings.items() if encoding in limited]
        stacks = [weights.stacks[f"{name}.scales"].view(torch.uint8).flatten(1) for name in names]
        pairs = [torch.stack(torch.aminmax(scales_EG, dim=1), 1) for scales_EG in stacks]
        each = zip(names, torch.stack(pairs).tolist(), strict=True)
        return [(e, name, low, high) for name, experts in each for e, (low, high) in enumerate(experts)]
    found: list[tuple[int, str, int, int]] = []
    there: list[Tensor] = []
    for e in range(weights.spec.local_experts):
        for projection, q in weights.peek(e).projections.items():
            if q.encoding in limited and q.scales is not None and not q.scales.is_meta and q.scales.numel():
                pair = torch.stack(torch.aminmax(q.scales.view(torch.uint8)))
                there += [pair] if pair.is_cuda else []
                low, high = (0, 0) if pair.is_cuda else pair.tolist()
                found.append((e, projection, low, high))
    values = iter(torch.stack(there).tolist() if there else [])
    return [(*one[:2], *next(values)) for one in found] if there else found


def _is_limited(encoding: Encoding) -> bool:
    """Whether kernels multiply codes by these scales in bfloat16, rather than sums in float32."""
    by_row = isinstance(encoding.granularity, PerGroup) and encoding.granularity.n == 1
    return encoding.scale_dtype in ("e4m3", "e8m0") and (encoding.bits == 4 or by_row)


def _spread(q: QuantTensor, device: torch.device) -> int:
    """Return the largest spread of a row, in powers of two; groups of zeros do not count."""
    assert q.scales is not None
    scales_NG = q.scales.view(torch.uint8).to(device).short()
    assert isinstance(q.encoding.granularity, PerGroup)
    zeros_NG = _all_zeros(q.codes.to(device), scales_NG.shape[-1], q.encoding.granularity.k)
    largest = scales_NG.masked_fill(zeros_NG, 0).amax(-1)
    smallest = scales_NG.masked_fill(zeros_NG, 255).amin(-1)
    return max(0, int((largest - smallest).max()))


def _all_zeros(codes_NB: Tensor, groups: int, size: int) -> Tensor:
    """Return which groups of ``size`` E2M1 codes, two per byte, contain only zeros of either sign: bool [N, G]. The
    last group may be partial."""
    codes_NB = torch.nn.functional.pad(codes_NB, (0, groups * size // 2 - codes_NB.shape[-1]))
    return (codes_NB & 0x77).unflatten(-1, (groups, -1)).amax(-1) == 0
