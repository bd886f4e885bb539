"""How the inputs of an expert's projections are held: :class:`ActivationQuantization`, and the table of known ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from polymoe.common.shapes import ceil_div
from polymoe.errors import ArgumentError, nearest
from polymoe.formats import Granularity, PerChannel, PerGroup, PerTensor
from polymoe.problem.numerics import TOLERANCE, TOLERANCE_E2M1, TOLERANCE_FAST_ACCUMULATION


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationQuantization:
    """How x and h, the inputs of gate and up and of down, are held while they are multiplied.

    Attributes:
        name: on the command line, in records and in keys of measured times; ``str()`` gives it.
        element: what a number is rounded to: E4M3, E2M1, or None for the 16 bits of the operands.
        granularity: which numbers of ``[T, K]`` share one scale: a token's row (``PerChannel``), ``k`` columns of a row
            (``PerGroup``), or all that one expert gets (``PerTensor``); None without scales.
        static: whether the scales are the checkpoint's own, one an expert, rather than ``amax / 448`` of the numbers.
        scale_dtype: what a scale is held in; None without scales. An E8M0 scale is the smallest power of two that
            is not below ``amax / 448``. An E4M3 scale is the nearest to ``amax / 6`` over the global scale.
        global_scale: whether a float32 scale multiplies all numbers as well: the largest input scale that the
            checkpoint has for this rank's experts, or 1 where it has none.
        fast_accumulation: whether FP8 tensor cores, which keep 14 bits, may add up all columns: faster where experts
            have many rows, with twice to three times the error. Otherwise sums of a part of them are added in float32.

    Example::

        ACTIVATIONS["fp8_group128"].scales_per_row(2880)   # 23
    """

    name: str
    element: Literal["e4m3", "e2m1"] | None = None
    granularity: Granularity | None = None
    static: bool = False
    scale_dtype: Literal["float32", "e8m0", "e4m3"] | None = None
    global_scale: bool = False
    fast_accumulation: bool = False

    def __post_init__(self) -> None:
        scaled = (self.element is not None, self.granularity is not None, self.scale_dtype is not None)
        if any(scaled) != all(scaled):
            raise ArgumentError(
                "ActivationQuantization",
                expected="an element, a granularity and a scale dtype together",
                got=repr(self),
            )
        if self.static != isinstance(self.granularity, PerTensor):
            raise ArgumentError("ActivationQuantization.static", expected="scales for a whole expert", got=repr(self))
        if self.fast_accumulation and (self.element != "e4m3" or isinstance(self.granularity, PerGroup)):
            raise ArgumentError(
                "ActivationQuantization.fast_accumulation", expected="E4M3 with one scale for a row", got=repr(self)
            )

    @property
    def quantized(self) -> bool:
        """Whether numbers are rounded to fewer than 16 bits."""
        return self.element is not None

    @property
    def tolerance(self) -> float:
        """Largest relative error of a correct backend against the reference that emulates this quantization."""
        if self.fast_accumulation:
            return TOLERANCE_FAST_ACCUMULATION
        return TOLERANCE_E2M1 if self.element == "e2m1" else TOLERANCE

    @property
    def promoted(self) -> ActivationQuantization:
        """The same without ``fast_accumulation``."""
        if not self.fast_accumulation:
            return self
        return replace(self, name=self.name.removesuffix(_FAST), fast_accumulation=False)

    @property
    def group_columns(self) -> int | None:
        """Columns of a row that share a scale; None where whole rows do, or none."""
        return self.granularity.k if isinstance(self.granularity, PerGroup) else None

    def scales_per_row(self, columns: int) -> int | None:
        """Scales of one row of ``columns`` that a caller may give with quantized x; None where scales are static, or
        none, or where there is a global scale too."""
        if not self.quantized or self.static or self.global_scale:
            return None
        return ceil_div(columns, self.group_columns or columns)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def of(cls, value: ActivationQuantization | str) -> ActivationQuantization:
        """The value itself, or the known one of this name.

        Raises:
            ArgumentError: for an unknown name.
        """
        if isinstance(value, cls):
            return value
        if value not in ACTIVATIONS:
            raise ArgumentError("activations", got=repr(value), hint=nearest(str(value), ACTIVATIONS))
        return ACTIVATIONS[str(value)]


_FAST = "_fast_accumulation"
"""How names of quantizations with fast accumulation end."""

UNQUANTIZED = ActivationQuantization(name="16bit")
"""As they are, in 16 bits."""

FP8_TOKEN = ActivationQuantization(name="fp8_token", element="e4m3", granularity=PerChannel(), scale_dtype="float32")
"""E4M3 with one scale per token."""

FP8_GROUP128 = ActivationQuantization(
    name="fp8_group128", element="e4m3", granularity=PerGroup(1, 128), scale_dtype="float32"
)
"""E4M3 with one scale for 128 columns of a token (DeepSeek-V3)."""

FP8_GROUP128_UE8M0 = ActivationQuantization(
    name="fp8_group128_ue8m0", element="e4m3", granularity=PerGroup(1, 128), scale_dtype="e8m0"
)
"""The same with power-of-two scales (``"scale_fmt": "ue8m0"`` of DeepSeek-V3.1 and V4). For MMAs that take one E8M0
scale for 32 columns these are four equal ones."""

FP8_STATIC = ActivationQuantization(
    name="fp8_static", element="e4m3", granularity=PerTensor(), static=True, scale_dtype="float32"
)
"""E4M3 with the checkpoint's scale for all inputs of an expert."""

FP8_TOKEN_FAST, FP8_STATIC_FAST = (
    replace(known, name=f"{known.name}{_FAST}", fast_accumulation=True) for known in (FP8_TOKEN, FP8_STATIC)
)
"""The same with fast accumulation: never a default. A backend may keep exact sums where a call has few tokens, and says
so in its plan (``Config.fast_accumulation``)."""

MXFP8 = ActivationQuantization(name="mxfp8", element="e4m3", granularity=PerGroup(1, 32), scale_dtype="e8m0")
"""E4M3 with one E8M0 scale for 32 columns of a token (OCP Microscaling)."""

NVFP4 = ActivationQuantization(
    name="nvfp4", element="e2m1", granularity=PerGroup(1, 16), scale_dtype="e4m3", global_scale=True
)
"""E2M1 with one E4M3 scale for 16 columns of a token, and a global scale. A backend may keep 16 bits where a call has
few tokens, and says so in its plan (``Config.keeps_16_bits``)."""

ACTIVATIONS: dict[str, ActivationQuantization] = {
    known.name: known
    for known in (
        *(UNQUANTIZED, FP8_TOKEN, FP8_GROUP128, FP8_GROUP128_UE8M0, FP8_STATIC, MXFP8, NVFP4),
        *(FP8_TOKEN_FAST, FP8_STATIC_FAST),
    )
}
"""Known ones, by name."""
