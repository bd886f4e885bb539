"""Encoding: how a weight matrix is stored: element, scale granularity, scale dtype, zero points, global scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from polymoe.common.shapes import ceil_div
from polymoe.errors import FormatError

Element = Literal["e2m1", "e4m3", "int4", "bf16", "fp16"]
"""Element types: OCP FP4 and FP8, an unsigned 4-bit integer, or a 16-bit float."""

ScaleDtype = Literal["float32", "bfloat16", "float16", "e8m0", "e4m3"]
"""Dtypes of stored scales; e8m0 is a power of two in a byte (OCP MX)."""

ELEMENT_BITS: dict[str, int] = {"e2m1": 4, "int4": 4, "e4m3": 8, "bf16": 16, "fp16": 16}
SCALE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True, slots=True)
class PerTensor:
    """One scale for the whole matrix; scales have shape ``[1, 1]``."""

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a ``[rows, columns]`` matrix."""
        return (1, 1)

    def __str__(self) -> str:
        return "tensor"


@dataclass(frozen=True, slots=True)
class PerChannel:
    """One scale for each output row; scales have shape ``[N, 1]``."""

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a ``[rows, columns]`` matrix."""
        return (rows, 1)

    def __str__(self) -> str:
        return "channel"


@dataclass(frozen=True, slots=True)
class PerGroup:
    """One scale for each block of ``n`` rows by ``k`` columns; scales have shape ``[ceil(N/n), ceil(K/k)]``.

    The last block of a row or column may be partial: 320 rows in blocks of 128 have three scale rows.
    """

    n: int
    k: int

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1:
            raise FormatError("PerGroup", expected="positive block sizes", got=f"{self.n} x {self.k}")

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a ``[rows, columns]`` matrix."""
        return (ceil_div(rows, self.n), ceil_div(columns, self.k))

    def __str__(self) -> str:
        return f"group {self.n}x{self.k}"


Granularity = PerTensor | PerChannel | PerGroup
"""Which weights share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How a ``[N, K]`` weight matrix is stored.

    Attributes:
        element: type of a code: ``e2m1`` (FP4), ``e4m3`` (FP8), ``int4``, or a 16-bit float.
        granularity: which weights share one scale; None for 16-bit floats, which have no scales.
        scale_dtype: dtype of the stored scales.
        zero_points: int4 only: each group has an integer zero point; otherwise it is 8.
        global_scale: whether one float32 multiplies the whole matrix as well (NVFP4).

    A weight is ``(element - zero) * scale * global_scale``. Two encodings that differ only in the scale dtype have
    the same :attr:`name`, but for ``mxfp8``: E4M3 in groups of 32 has that name only with E8M0 scales.
    """

    element: Element
    granularity: Granularity | None = None
    scale_dtype: ScaleDtype | None = None
    zero_points: bool = False
    global_scale: bool = False

    def __post_init__(self) -> None:
        if self.element not in ELEMENT_BITS:
            raise FormatError("Encoding.element", expected=f"one of {', '.join(ELEMENT_BITS)}", got=repr(self.element))
        if (self.granularity is None) != (self.scale_dtype is None):
            got = f"{self.granularity}, {self.scale_dtype}"
            raise FormatError("Encoding", expected="granularity and scale_dtype together", got=got)
        if self.scale_dtype is not None and self.scale_dtype not in SCALE_BYTES:
            known = ", ".join(SCALE_BYTES)
            raise FormatError("Encoding.scale_dtype", expected=f"one of {known}", got=repr(self.scale_dtype))
        if (self.element in ("bf16", "fp16")) != (self.granularity is None):
            expected = "scales for elements of 8 bits or less, and only for those"
            raise FormatError("Encoding", expected=expected, got=f"{self.element} with {self.granularity}")
        if self.zero_points and self.element != "int4":
            raise FormatError("Encoding.zero_points", expected="int4 elements", got=self.element)
        if self.global_scale and self.element != "e2m1":
            raise FormatError("Encoding.global_scale", expected="e2m1 elements", got=self.element)

    @property
    def bits(self) -> int:
        """Bits of one code, without scales."""
        return ELEMENT_BITS[self.element]

    @property
    def name(self) -> str:
        """The name in ``FORMATS``, or a name of the same style for a variant without a row there (``int4_g64_zp``)."""
        g = self.granularity
        if g is None:
            return self.element
        if self.element == "int4":
            k = str(g) if not isinstance(g, PerGroup) else f"g{g.k}" if g.n == 1 else f"g{g.n}x{g.k}"
            return f"int4_{k}" + ("_zp" if self.zero_points else "")
        if self.element == "e2m1":
            base = "nvfp4" if self.global_scale else "mxfp4"
            usual = PerGroup(1, 16 if self.global_scale else 32)
            return base if g == usual else f"{base}_{g.n}x{g.k}" if isinstance(g, PerGroup) else f"{base}_{g}"
        if g == PerGroup(1, 32) and self.scale_dtype == "e8m0":
            return "mxfp8"
        if isinstance(g, PerGroup):
            return f"fp8_block{g.n}" if g.n == g.k else f"fp8_block{g.n}x{g.k}"
        return f"fp8_{g}"

    def codes_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of a ``[rows, columns]`` matrix's codes: ``[N, K/2]`` bytes for 4-bit elements, else ``[N, K]``."""
        if self.bits != 4:
            return rows, columns
        if columns % 2:
            raise FormatError(f"{self.name} matrix", expected="an even number of columns", got=f"[{rows}, {columns}]")
        return rows, columns // 2

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a ``[rows, columns]`` matrix: codes, scales, zero points (4 bits each), global scale."""
        total = rows * columns * self.bits // 8
        if self.granularity is not None and self.scale_dtype is not None:
            g_rows, g_columns = self.granularity.scale_shape(rows, columns)
            total += g_rows * g_columns * SCALE_BYTES[self.scale_dtype]
            total += ceil_div(g_rows * g_columns, 2) if self.zero_points else 0
        return total + (4 if self.global_scale else 0)

    @property
    def group_columns(self) -> int:
        """Columns that share one scale; 1 if scales do not restrict slices of columns."""
        return self.granularity.k if isinstance(self.granularity, PerGroup) else 1

    def grain(self, axis: int) -> int:
        """Rows (``axis`` -2) or columns (-1) that slices do not separate: those of one block, and of one byte."""
        if axis == -2:
            return self.granularity.n if isinstance(self.granularity, PerGroup) else 1
        return math.lcm(self.group_columns, 2 if self.bits == 4 else 1)

    def __str__(self) -> str:
        return self.name
