"""QuantTensor: codes, scales and their encoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from polymoe.common.shapes import ceil_div
from polymoe.errors import FormatError
from polymoe.formats.elements import CODE_DTYPES, SCALE_DTYPES, decode, decode_scale
from polymoe.formats.encoding import Encoding, PerChannel, PerGroup
from polymoe.formats.extremes import extremes, has_numbers, is_finite, is_zero

if TYPE_CHECKING:
    from torch import Tensor

DAMAGED = "the file is damaged or was never written completely: fetch or convert it again"
"""The hint for numbers that no complete file has."""

_PARTS = ("codes", "scales", "zero_points", "global_scale")


@dataclass(frozen=True, slots=True, eq=False)
class QuantTensor:
    """A weight ``[..., N, K]`` (or a stack of them) in its stored encoding.

    Attributes:
        codes: ``[..., N, K/2]`` uint8 for 4-bit elements (low nibble = even column, int4 unsigned), else
            ``[..., N, K]`` in the element's own dtype.
        encoding: meaning of the codes and scales.
        scales: ``[..., *granularity.scale_shape(N, K)]`` in the stored dtype, or None for 16-bit floats.
        zero_points: uint8, one for each scale, or None if the zero point is fixed.
        global_scale: float32 of the leading shape ``[...]``, a multiplier, or None.

    One 2 x 32 MXFP4 matrix: ``codes`` [2, 16] uint8, ``scales`` [2, 1] float8_e8m0fnu. Byte 0x21 in ``codes[0, 0]``
    holds the weights 0.5 (column 0) and 1.0 (column 1), times ``scales[0, 0]``.

    It is not a tensor: torch operations on it raise TypeError, so that nobody computes with codes by mistake.
    """

    codes: Tensor
    encoding: Encoding
    scales: Tensor | None = None
    zero_points: Tensor | None = None
    global_scale: Tensor | None = None

    def __post_init__(self) -> None:
        name = self.encoding.name
        if self.codes.dim() < 2:
            raise FormatError(f"{name} codes", expected="[..., N, K]", got=str(list(self.codes.shape)))
        *lead, rows, columns = self.shape
        wanted = _kinds(self.encoding, lead, rows, columns)
        for part in _PARTS:
            if (getattr(self, part) is not None) != (part in wanted):
                expected = "a tensor" if part in wanted else "None"
                raise FormatError(f"{name} {part}", expected=expected, got=str(type(getattr(self, part))))
        for part, (dtype, shape) in wanted.items():
            where, tensor = f"{name} {part.replace('_', ' ')}", getattr(self, part)
            if tensor.dtype != dtype:
                hint = "view raw bytes, do not cast them"
                raise FormatError(where, expected=str(dtype), got=str(tensor.dtype), hint=hint)
            if list(tensor.shape) != shape:
                raise FormatError(where, expected=f"shape {shape}", got=str(list(tensor.shape)))

    @property
    def shape(self) -> torch.Size:
        """Logical shape ``[..., N, K]``, as if the weights were numbers."""
        *lead, columns = self.codes.shape
        return torch.Size([*lead, columns * 2 if self.encoding.bits == 4 else columns])

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts().values())

    def parts(self) -> dict[str, Tensor]:
        """Return the existing tensors by field name, in a fixed order."""
        return {name: part for name in _PARTS if (part := getattr(self, name)) is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> QuantTensor:
        """Return the tensor with ``function`` applied to every part."""
        return replace(self, **{name: function(part) for name, part in self.parts().items()})

    def to(self, device: torch.device | str) -> QuantTensor:
        """Return the same weights on ``device``."""
        return self.map(lambda part: part.to(device))

    def contiguous(self) -> QuantTensor:
        """Return the same weights with every part contiguous in memory."""
        return self.map(lambda part: part.contiguous())

    def __getitem__(self, index: int) -> QuantTensor:
        """Return matrix ``index`` of a stack ``[E, N, K]``, as views."""
        if self.codes.dim() < 3:
            raise FormatError("QuantTensor[index]", expected="a stack [E, N, K]", got=str(list(self.shape)))
        return self.map(lambda part: part[index])

    def rows(self, start: int, stop: int, *, step: int = 1) -> QuantTensor:
        """Return rows ``start`` to ``stop`` (views). With block scales, they must begin and end at a block.

        Raises:
            FormatError: if the slice splits a block or is out of range.
        """
        return self._slice(-2, start, stop, step)

    def columns(self, start: int, stop: int) -> QuantTensor:
        """Return columns ``start`` to ``stop`` (views), at group boundaries.

        Raises:
            FormatError: if the slice splits a group or a byte, or is out of range.
        """
        return self._slice(-1, start, stop, 1)

    def _slice(self, axis: int, start: int, stop: int, step: int) -> QuantTensor:
        g, size = self.encoding.granularity, self.shape[axis]
        per_byte = 2 if axis == -1 and self.encoding.bits == 4 else 1
        block = (g.n if axis == -2 else g.k) if isinstance(g, PerGroup) else 1
        grain = self.encoding.grain(axis)
        where = f"{self.encoding.name} {'rows' if axis == -2 else 'columns'} {start}:{stop}"
        if not 0 <= start <= stop <= size:
            raise FormatError(where, expected=f"a range within 0 to {size}")
        if step != 1 and block != 1:
            raise FormatError(where, expected="step 1 across blocks", got=f"step {step}")
        if start % grain or (stop % grain and stop != size):
            raise FormatError(where, expected=f"multiples of {grain}, or the end at {size}", got="a cut block")
        scale_unit = block if isinstance(g, PerGroup) else 1 if isinstance(g, PerChannel) and axis == -2 else None
        units = {"codes": per_byte, "scales": scale_unit, "zero_points": scale_unit, "global_scale": None}

        def cut(part: Tensor, unit: int | None) -> Tensor:
            if unit is None:
                return part
            span = slice(start // unit, ceil_div(stop, unit), step)
            return part[..., span, :] if axis == -2 else part[..., span]

        return replace(self, **{name: cut(part, units[name]) for name, part in self.parts().items()})

    def refine(self, n: int, k: int) -> QuantTensor:
        """Return the same weights with block scales repeated onto a finer grid of ``n`` by ``k``, without loss.

        Raises:
            FormatError: if the present blocks are not multiples of the new ones.
        """
        g, fine = self.encoding.granularity, PerGroup(n, k)
        if not isinstance(g, PerGroup) or g.n % n or g.k % k or self.encoding.zero_points:
            raise FormatError(f"refine {self.encoding.name}", expected=f"divisors of {g}", got=f"{n} x {k}")
        rows, columns = fine.scale_shape(*self.shape[-2:])
        assert self.scales is not None
        # Repeated as bytes: float8 dtypes have no repeat_interleave.
        plain = self.scales.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[self.scales.element_size()])
        scales = plain.repeat_interleave(g.n // n, -2).repeat_interleave(g.k // k, -1)
        scales = scales[..., :rows, :columns].contiguous().view(self.scales.dtype)
        return replace(self, scales=scales, encoding=replace(self.encoding, granularity=fine))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weights as numbers, ``[..., N, K]`` in ``dtype``: ``(element - zero) * scale * global_scale``.

        They are computed in ``dtype`` (float32 unless given, or float64 for the oracle); for lower dtypes in float32,
        then rounded.
        """
        dtype = dtype or torch.float32
        work = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        e = self.encoding
        values = decode(self.codes, e.element, work)
        if e.element == "int4":
            values -= 8 if self.zero_points is None else expand_groups(self.zero_points.to(work), e, self.shape)
        if self.scales is not None:
            values *= expand_groups(decode_scale(self.scales, work), e, self.shape)
        if self.global_scale is not None:
            values *= self.global_scale.to(work)[..., None, None]
        return values.to(dtype)

    def validate(self, where: str) -> None:
        """Check that codes and scales are finite (also E8M0 byte 0xFF), and that not all scales are zero.

        This reads all codes but 4-bit ones, in which every byte is valid, and waits for the device.

        Raises:
            FormatError: with ``where``, the part, and the first bad position.
        """
        for name, part in self.parts().items():
            if not has_numbers(part):
                continue
            found = part.dtype, *(float(x) for x in extremes(part))
            if not is_finite(*found):
                position = [int(i) for i in (~torch.isfinite(decode_scale(part))).nonzero()[0]]
                expected, got = "finite numbers", "NaN or infinity" + (f" at {position}" if position else "")
            elif name != "codes" and is_zero(*found):
                expected, got = "a scale other than 0", "only zeros"
            else:
                continue
            raise FormatError(f"{where} {name.replace('_', ' ')}", expected=expected, got=got, hint=DAMAGED)

    @classmethod
    def empty(
        cls, encoding: Encoding, rows: int, columns: int, device: torch.device | str, *, stack: int | None = None
    ) -> QuantTensor:
        """Return a matrix ``[rows, columns]`` on ``device`` whose parts hold anything, or a stack of them."""
        kinds = _kinds(encoding, [] if stack is None else [stack], rows, columns)
        return cls(encoding=encoding, **{n: torch.empty(s, dtype=d, device=device) for n, (d, s) in kinds.items()})

    @staticmethod
    def stack(tensors: Sequence[QuantTensor]) -> QuantTensor:
        """Stack E matrices of the same encoding to one ``[E, N, K]`` tensor.

        Raises:
            FormatError: without matrices, or if they differ in encoding or shape.
        """
        kinds = {(t.encoding, t.shape) for t in tensors}
        if len(kinds) != 1:
            got = ", ".join(sorted(f"{encoding!r} {list(shape)}" for encoding, shape in kinds))
            raise FormatError("QuantTensor.stack", expected="matrices of one encoding and shape", got=got or "none")
        first = tensors[0]
        return replace(first, **{n: torch.stack([t.parts()[n] for t in tensors]) for n in first.parts()})

    def __repr__(self) -> str:
        return f"QuantTensor({self.encoding.name}, {list(self.shape)}, {self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(
            f"{getattr(func, '__name__', func)} got a QuantTensor: call .dequantize() for numbers, .codes for bytes"
        )


def expand_groups(scales: Tensor, encoding: Encoding, shape: Sequence[int]) -> Tensor:
    """Expand scales so that they broadcast to ``shape`` ``[..., N, K]``."""
    g = encoding.granularity
    if not isinstance(g, PerGroup):
        return scales
    for axis, size in ((-2, g.n), (-1, g.k)):
        if size > 1:
            scales = scales.repeat_interleave(size, axis).narrow(axis, 0, shape[axis])
    return scales


def _kinds(
    encoding: Encoding, lead: Sequence[int], rows: int, columns: int
) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Return dtype and shape of each part of a stack ``lead`` of matrices ``[rows, columns]``."""
    kinds = {"codes": (CODE_DTYPES[encoding.element], [*lead, *encoding.codes_shape(rows, columns)])}
    if encoding.granularity is not None and encoding.scale_dtype is not None:
        grid = [*lead, *encoding.granularity.scale_shape(rows, columns)]
        kinds["scales"] = SCALE_DTYPES[encoding.scale_dtype], grid
        if encoding.zero_points:
            kinds["zero_points"] = torch.uint8, grid
    if encoding.global_scale:
        kinds["global_scale"] = torch.float32, [*lead]
    return kinds
