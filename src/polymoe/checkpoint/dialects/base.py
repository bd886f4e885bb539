"""Dialect: an exact pair of reader and writer for one stored matrix.

A dialect sees the tensors of one projection by suffix (``{"weight": ..., "weight_scale": ...}``), natural order
``[N, K]``, one expert. Errors name the suffix; the checkpoint puts the tensor's full name there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.checkpoint.files import Header
from polymoe.common.lazy_torch import Dtypes
from polymoe.errors import FormatError
from polymoe.formats import Encoding, PerGroup, QuantTensor
from polymoe.formats.encoding import ScaleDtype

if TYPE_CHECKING:
    from torch import Tensor

STORED_DTYPES = Dtypes(
    U8="uint8", I8="int8", I32="int32", I64="int64",
    F8_E4M3="float8_e4m3fn", F8_E8M0="float8_e8m0fnu", F16="float16", BF16="bfloat16", F32="float32",
)  # fmt: skip
"""Safetensors' dtype names that expert tensors use."""

SCALE_NAMES: dict[str, ScaleDtype] = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E8M0": "e8m0",
    "F8_E4M3": "e4m3",
    "U8": "e8m0",
}
"""Scale dtype for each stored dtype; plain bytes are E8M0 exponents."""


@dataclass(frozen=True, slots=True)
class Dialect(ABC):
    """One way to store a matrix as named tensors.

    ``write`` undoes ``read`` to the byte, in the dialect's usual dtypes and shapes (:meth:`rewrite` gives back unusual
    ones); only a global scale that is stored as a divisor may differ in its last bit, since float32 reciprocals are not
    one to one. The number that it stands for does not.
    """

    name: str

    k_first: ClassVar[bool] = False
    """Whether the tensors are stored transposed: K along the first axis, N along the last."""

    @property
    @abstractmethod
    def required(self) -> tuple[str, ...]:
        """Suffixes without which the matrix cannot be read."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Suffixes that may exist as well."""
        return ()

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Required and optional ones."""
        return self.required + self.optional

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, int]:
        """Return ``[N, K]`` of the matrix stored under ``headers``, if it is not known otherwise: that of ``weight``.

        Raises:
            FormatError: if its codes are no matrix.
        """
        return stored_matrix(headers, "weight")

    @abstractmethod
    def detect(self, headers: Mapping[str, Header], shape: tuple[int, int], hint: Encoding | None = None) -> Encoding:
        """Return the encoding of the ``[N, K]`` matrix stored under ``headers``. Dtypes and shapes decide; ``hint``
        (from the config) only where they are ambiguous.

        Raises:
            FormatError: for a dtype or shape that does not fit; it names the suffix.
        """

    @abstractmethod
    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], hint: Encoding | None = None) -> QuantTensor:
        """Return the matrix, as views of the stored tensors where the bytes are already in our order.

        Raises:
            FormatError: like :meth:`detect`, and for values that contradict the shape or encoding.
        """

    @abstractmethod
    def write(self, matrix: QuantTensor, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        """Return the tensors to store.

        Raises:
            FormatError: if this dialect cannot store the encoding of the matrix.
        """

    def input_scale(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Return the stored static activation scale (float32, no dimensions, a multiplier), or None.

        Also None for a scale that is zero, negative or not finite: it was never calibrated (an expert without tokens).
        """
        return None

    def rewrite(self, matrix: QuantTensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Write a ``matrix`` that was read from ``tensors`` with their dtypes and shapes: the same bytes, unless
        reading lost something. Values that a matrix does not hold, such as an uncalibrated input scale, are copied."""
        written = self.write(matrix, self.input_scale(tensors))
        return stored_as({s: written.get(s, t) for s, t in tensors.items()}, headers_of(tensors))

    def _refuse(self, encoding: Encoding, stores: str) -> FormatError:
        return FormatError(f"dialect {self.name}", expected=stores, got=repr(encoding))


def headers_of(tensors: Mapping[str, Tensor]) -> dict[str, Header]:
    """Return the header of each tensor as safetensors would store it."""
    return {
        suffix: Header(STORED_DTYPES.name_of(t.dtype) or str(t.dtype), tuple(t.shape)) for suffix, t in tensors.items()
    }


def expect(
    headers: Mapping[str, Header],
    suffix: str,
    dtypes: tuple[str, ...],
    *shapes: tuple[int, ...],
    hint: str | None = None,
) -> Header:
    """Return the suffix's header after checking that it exists with one of ``dtypes`` and one of ``shapes`` (if
    any)."""
    if suffix not in headers:
        raise FormatError(suffix, expected="a tensor", got="none", hint=hint)
    header = headers[suffix]
    if header.dtype not in dtypes:
        raise FormatError(suffix, expected=f"dtype {' or '.join(dtypes)}", got=header.dtype, hint=hint)
    if shapes and tuple(header.shape) not in shapes:
        wanted = " or ".join(str(list(s)) for s in shapes)
        raise FormatError(suffix, expected=f"shape {wanted}", got=str(list(header.shape)), hint=hint)
    return header


def expect_number(headers: Mapping[str, Header], suffix: str) -> Header:
    """Return the suffix's header after checking that it is one float, with any number of axes."""
    header = expect(headers, suffix, ("F32", "BF16", "F16"))
    if math.prod(header.shape) != 1:
        raise FormatError(suffix, expected="one number", got=f"shape {list(header.shape)}")
    return header


def stored_matrix(headers: Mapping[str, Header], suffix: str) -> tuple[int, int]:
    """Return the suffix's shape, which must have two axes."""
    shape = expect(headers, suffix, tuple(STORED_DTYPES)).shape
    if len(shape) != 2:
        raise FormatError(suffix, expected="a matrix", got=f"shape {list(shape)}")
    return shape[0], shape[1]


def divided(columns: int, groups: int, suffix: str) -> int:
    """Return the columns of a group, from the number of stored scales along a row and never from the config."""
    if groups < 1 or columns % groups:
        expected, hint = f"a number of groups that divides {columns} columns", "are config and tensors of one model?"
        raise FormatError(suffix, expected=expected, got=str(groups), hint=hint)
    return columns // groups


def require_whole_groups(matrix: QuantTensor, suffix: str) -> None:
    """Refuse to write a matrix whose last group is partial: whoever reads it divides its columns by its scales.

    Raises:
        FormatError: naming the scales' suffix.
    """
    g, columns = matrix.encoding.granularity, matrix.shape[-1]
    if isinstance(g, PerGroup) and columns % g.k:
        raise FormatError(suffix, expected=f"columns in whole groups of {g.k}", got=f"{columns} columns")


def reciprocal(scale: Tensor) -> Tensor:
    """Return the float32 divisor whose reciprocal is ``scale``, or the nearest one if none exists."""
    guess = scale.float().reciprocal()
    up, down = (torch.nextafter(guess, torch.full_like(guess, limit)) for limit in (torch.inf, 0.0))
    for other in (up, down):
        exact = (guess.reciprocal() != scale) & (other.reciprocal() == scale)
        guess = torch.where(exact, other, guess)
    return guess


def stored_as(tensors: Mapping[str, Tensor], headers: Mapping[str, Header]) -> dict[str, Tensor]:
    """Return the same bytes with the dtypes and shapes of ``headers``: U8 for I8, ``[1]`` for ``[]``; shape records as
    I32.

    Raises:
        FormatError: if a tensor has another number of bytes than its header.
    """
    result = {}
    for suffix, tensor in tensors.items():
        header = headers.get(suffix)
        if header is None:
            result[suffix] = tensor
            continue
        dtype = STORED_DTYPES[header.dtype]
        if suffix == "weight_shape":
            tensor = tensor.to(dtype)
        elif dtype.itemsize == tensor.dtype.itemsize and dtype != tensor.dtype:
            tensor = tensor.view(dtype)
        if tensor.dtype != dtype or tensor.numel() != torch.Size(header.shape).numel():
            raise FormatError(
                suffix,
                expected=f"{header.dtype} {list(header.shape)}",
                got=f"{STORED_DTYPES.name_of(tensor.dtype)} {list(tensor.shape)}",
            )
        result[suffix] = tensor.reshape(header.shape)
    return result
