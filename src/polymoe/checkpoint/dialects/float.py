"""Dialects of weights with one number for each element: 16-bit floats, and FP8 with all kinds of scales, MXFP8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polymoe.checkpoint.dialects.base import SCALE_NAMES, Dialect, expect, expect_number, headers_of
from polymoe.checkpoint.files import Header
from polymoe.errors import FormatError
from polymoe.formats import FORMATS, Encoding, Granularity, PerChannel, PerGroup, PerTensor, QuantTensor

if TYPE_CHECKING:
    from torch import Tensor

_USUAL_BLOCKS = (128, 64, 32)
_MXFP8 = FORMATS["mxfp8"].encoding


@dataclass(frozen=True, slots=True)
class Plain(Dialect):
    """16-bit floats: ``weight`` [N, K], BF16 or F16."""

    @property
    def required(self) -> tuple[str, ...]:
        return ("weight",)

    def detect(self, headers: Mapping[str, Header], shape: tuple[int, int], hint: Encoding | None = None) -> Encoding:
        note = "a weight of 8 or 4 bits needs its scale, and the checkpoint has no tensor of that name"
        narrow = "weight" in headers and headers["weight"].dtype in ("F8_E4M3", "U8", "I8")
        header = expect(headers, "weight", ("BF16", "F16"), hint=note if narrow else None)
        expect({"weight": header}, "weight", (header.dtype,), shape)
        return Encoding(element="bf16" if header.dtype == "BF16" else "fp16")

    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], hint: Encoding | None = None) -> QuantTensor:
        return QuantTensor(tensors["weight"], self.detect(headers_of(tensors), shape))

    def write(self, matrix: QuantTensor, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        if matrix.scales is not None:
            raise self._refuse(matrix.encoding, "bf16 or fp16")
        return {"weight": matrix.codes}


@dataclass(frozen=True, slots=True)
class Fp8Dialect(Dialect):
    """FP8: ``weight`` F8_E4M3 [N, K] and a scale that multiplies, under one of several names.

    The scale's shape gives its granularity: one number for the tensor, ``[N, 1]`` or ``[N]`` for each row, else a grid
    of blocks (with the config's block size where it fits, since ceil(192 / 128) and ceil(192 / 96) are both 2).

    Attributes:
        scale: suffix of the scale.
        scalar: shape in which a single scale is stored.
        calibrated: whether a static ``input_scale`` may exist.
    """

    scale: str
    scalar: tuple[int, ...] = ()
    calibrated: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        return ("weight", self.scale)

    @property
    def optional(self) -> tuple[str, ...]:
        return ("input_scale",) if self.calibrated else ()

    def detect(self, headers: Mapping[str, Header], shape: tuple[int, int], hint: Encoding | None = None) -> Encoding:
        expect(headers, "weight", ("F8_E4M3",), shape)
        header = expect(headers, self.scale, ("F32", "BF16", "F16", "F8_E8M0"))
        if self.calibrated and "input_scale" in headers:
            expect_number(headers, "input_scale")
        stored = tuple(header.shape)
        grid = (1, 1) if stored in ((), (1,)) else (*stored, 1) if len(stored) == 1 else stored
        blocks = [PerGroup(n, n) for n in _USUAL_BLOCKS]
        known: list[Granularity] = [PerTensor(), PerChannel(), *blocks]
        if hint is not None and hint.element == "e4m3" and hint.granularity is not None:
            known.insert(0, hint.granularity)
        for granularity in known:
            if granularity.scale_shape(*shape) == grid:
                return Encoding(element="e4m3", granularity=granularity, scale_dtype=SCALE_NAMES[header.dtype])
        wanted = {str(g): str(list(g.scale_shape(*shape))) for g in known}
        raise FormatError(
            self.scale,
            expected="shape " + ", ".join(f"{s} ({g})" for g, s in wanted.items()),
            got=str(list(stored)),
        )

    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], hint: Encoding | None = None) -> QuantTensor:
        encoding = self.detect(headers_of(tensors), shape, hint)
        assert encoding.granularity is not None
        scales = tensors[self.scale].reshape(encoding.granularity.scale_shape(*shape))
        return QuantTensor(tensors["weight"], encoding, scales)

    def write(self, matrix: QuantTensor, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        if matrix.encoding.element != "e4m3" or matrix.scales is None:
            raise self._refuse(matrix.encoding, "fp8")
        scales = matrix.scales
        if isinstance(matrix.encoding.granularity, PerTensor):
            scales = scales.reshape(self.scalar)
        stored = {"weight": matrix.codes, self.scale: scales}
        if self.calibrated and input_scale is not None:
            stored["input_scale"] = input_scale.to(torch.float32).reshape(self.scalar)
        return stored

    def input_scale(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        return static_scale(tensors.get("input_scale"))


@dataclass(frozen=True, slots=True)
class Mxfp8Dialect(Dialect):
    """MXFP8: ``weight`` F8_E4M3 [N, K], and [N, K/32] exponents of scales as bytes, under one of several names.

    Attributes:
        scale: suffix of the scale.
    """

    scale: str

    @property
    def required(self) -> tuple[str, ...]:
        return ("weight", self.scale)

    def detect(self, headers: Mapping[str, Header], shape: tuple[int, int], hint: Encoding | None = None) -> Encoding:
        assert _MXFP8.granularity is not None
        expect(headers, "weight", ("F8_E4M3",), shape)
        expect(headers, self.scale, ("U8", "F8_E8M0"), _MXFP8.granularity.scale_shape(*shape))
        return _MXFP8

    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], hint: Encoding | None = None) -> QuantTensor:
        encoding = self.detect(headers_of(tensors), shape, hint)
        return QuantTensor(tensors["weight"], encoding, tensors[self.scale].view(torch.float8_e8m0fnu))

    def write(self, matrix: QuantTensor, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        if matrix.encoding != _MXFP8 or matrix.scales is None:
            raise self._refuse(matrix.encoding, "mxfp8")
        return {"weight": matrix.codes, self.scale: matrix.scales.view(torch.uint8)}


def static_scale(stored: Tensor | None, *, divides: bool = False) -> Tensor | None:
    """Return a stored activation scale as a float32 multiplier without dimensions; None if it was never calibrated."""
    if stored is None:
        return None
    scale = stored.to(torch.float32).reshape(())
    if not bool(torch.isfinite(scale) & (scale > 0)):
        return None
    return scale.reciprocal() if divides else scale
