"""Dialects of FP4: two E2M1 codes in a byte, with E8M0 scales (MXFP4) or E4M3 scales and a global scale (NVFP4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polymoe.checkpoint.dialects.base import (
    SCALE_NAMES,
    STORED_DTYPES,
    Dialect,
    divided,
    expect,
    expect_number,
    headers_of,
    reciprocal,
    require_whole_groups,
    stored_matrix,
)
from polymoe.checkpoint.dialects.float import Fp8Dialect, static_scale
from polymoe.checkpoint.files import Header
from polymoe.errors import FormatError
from polymoe.formats import Encoding, PerGroup, QuantTensor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fp4(Dialect):
    """E2M1: codes as bytes [N, K/2], scales [N, K/g]; the shapes give the group size g.

    Attributes:
        codes, scale: suffixes.
        code_dtype, scale_dtype: their usual stored dtypes, of ``STORED_DTYPES``; bytes are reinterpreted, never cast.
        blocked: codes are stored [N, K/g, g/2], a group's bytes as one more axis (gpt-oss).
        global_scale: suffix of the float32 scale of the whole matrix (NVFP4), or None (MXFP4).
        input: suffix of the static activation scale, or None.
        divides: global and input scales are stored as divisors (compressed-tensors), and single numbers as [1].
    """

    codes: str = "weight"
    scale: str = "weight_scale"
    code_dtype: str = "U8"
    scale_dtype: str = "F8_E4M3"
    blocked: bool = False
    global_scale: str | None = None
    input: str | None = None
    divides: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        return (self.codes, self.scale) + ((self.global_scale,) if self.global_scale else ())

    @property
    def optional(self) -> tuple[str, ...]:
        return (self.input,) if self.input else ()

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, int]:
        if self.blocked:
            shape = expect(headers, self.codes, ("U8", "I8")).shape
            if len(shape) != 3:
                raise FormatError(self.codes, expected="three axes", got=f"shape {list(shape)}")
            return shape[0], shape[1] * shape[2] * 2
        rows, columns = stored_matrix(headers, self.codes)
        return rows, columns * 2

    def detect(self, headers: Mapping[str, Header], shape: tuple[int, int], hint: Encoding | None = None) -> Encoding:
        rows, columns = shape
        dtypes = ("F8_E4M3",) if self.global_scale else ("U8", "F8_E8M0")
        scale = expect(headers, self.scale, dtypes)
        codes = expect(headers, self.codes, ("U8", "I8")).shape
        groups = scale.shape[-1] if len(scale.shape) == 2 else 0
        if self.blocked and len(codes) == 3 and 2 * codes[1] * codes[2] == columns:
            groups = codes[1]
        expect(headers, self.scale, dtypes, (rows, groups or columns // 32))
        size = divided(columns, groups, self.scale)
        stored = (rows, groups, size // 2) if self.blocked else (rows, columns // 2)
        expect(headers, self.codes, ("U8", "I8"), stored)
        if self.global_scale:
            expect(headers, self.global_scale, ("F32",), (), (1,))
        if self.input is not None and self.input in headers:
            expect_number(headers, self.input)
        return Encoding(
            element="e2m1",
            granularity=PerGroup(1, size),
            scale_dtype=SCALE_NAMES[scale.dtype],
            global_scale=self.global_scale is not None,
        )

    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], hint: Encoding | None = None) -> QuantTensor:
        encoding = self.detect(headers_of(tensors), shape, hint)
        codes = tensors[self.codes].view(torch.uint8)
        scales = tensors[self.scale]
        if not self.global_scale:
            return QuantTensor(codes.flatten(1), encoding, scales.view(torch.float8_e8m0fnu))
        factor = tensors[self.global_scale].reshape(())
        if self.divides:
            if not bool(torch.isfinite(factor) & (factor != 0)):
                raise FormatError(self.global_scale, expected="a finite divisor, not 0", got=str(factor.item()))
            factor = factor.reciprocal()
        return QuantTensor(codes, encoding, scales, global_scale=factor)

    def write(self, matrix: QuantTensor, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        e = matrix.encoding
        if e.element != "e2m1" or e.global_scale != (self.global_scale is not None) or matrix.scales is None:
            raise self._refuse(e, "nvfp4" if self.global_scale else "mxfp4")
        require_whole_groups(matrix, self.scale)
        codes = matrix.codes.view(STORED_DTYPES[self.code_dtype])
        if self.blocked:
            codes = codes.unflatten(-1, (matrix.scales.shape[-1], -1))
        stored = {self.codes: codes, self.scale: matrix.scales.view(STORED_DTYPES[self.scale_dtype])}
        if self.global_scale and matrix.global_scale is not None:
            stored[self.global_scale] = self._single(matrix.global_scale)
        if self.input and input_scale is not None:
            stored[self.input] = self._single(input_scale.to(torch.float32))
        return stored

    def input_scale(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        return static_scale(tensors.get(self.input), divides=self.divides) if self.input else None

    def rewrite(self, matrix: QuantTensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Write as the base class does; of several divisors with the same reciprocal, take the one in ``tensors``."""
        again = Dialect.rewrite(self, matrix, tensors)
        for suffix in (self.global_scale, self.input):
            if self.divides and suffix is not None and suffix in tensors:
                theirs = tensors[suffix]
                if torch.equal(again[suffix].reciprocal(), theirs.reciprocal()):
                    again[suffix] = theirs
        return again

    def _single(self, factor: Tensor) -> Tensor:
        return reciprocal(factor).reshape(1) if self.divides else factor.reshape(())


@dataclass(frozen=True, slots=True)
class ByWeight(Dialect):
    """DeepSeek-V4: ``weight`` and ``scale``, FP8 or MXFP4 by the weight's dtype (both occur under one config)."""

    fp8: Fp8Dialect
    fp4: Fp4

    @property
    def required(self) -> tuple[str, ...]:
        return self.fp8.required

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, int]:
        return self._part(headers).shape(headers)

    def detect(self, headers: Mapping[str, Header], shape: tuple[int, int], hint: Encoding | None = None) -> Encoding:
        return self._part(headers).detect(headers, shape, hint)

    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], hint: Encoding | None = None) -> QuantTensor:
        part = self.fp8 if tensors["weight"].dtype == torch.float8_e4m3fn else self.fp4
        return part.read(tensors, shape, hint)

    def write(self, matrix: QuantTensor, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        return (self.fp4 if matrix.encoding.element == "e2m1" else self.fp8).write(matrix)

    def _part(self, headers: Mapping[str, Header]) -> Dialect:
        header = expect(headers, "weight", ("I8", "U8", "F8_E4M3"))
        return self.fp8 if header.dtype == "F8_E4M3" else self.fp4
