"""Dialects of INT4 in int32 words: compressed-tensors, GPTQ, AWQ.

compressed-tensors packs eight columns of a row into a word, lowest nibble first: read as bytes, these are our codes.
GPTQ and AWQ store the transposed matrix ``[K, N]``, GPTQ with eight rows in a word, AWQ with eight columns in an order
of its own, so both need a copy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.checkpoint.dialects.base import (
    SCALE_NAMES,
    Dialect,
    divided,
    expect,
    headers_of,
    require_whole_groups,
    stored_matrix,
)
from polymoe.checkpoint.files import Header
from polymoe.common.shapes import ceil_div
from polymoe.errors import FormatError
from polymoe.formats import Encoding, Granularity, PerChannel, PerGroup, QuantTensor
from polymoe.formats.elements import pack_nibbles, unpack_nibbles

if TYPE_CHECKING:
    from torch import Tensor

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SCALES = ("BF16", "F16", "F32")
_SYMMETRIC_ZERO = 8


@dataclass(frozen=True, slots=True)
class CompressedInt4(Dialect):
    """compressed-tensors' ``pack-quantized``: ``weight_packed`` I32 [N, K/8], ``weight_scale`` [N, K/g],
    ``weight_shape`` [2]; asymmetric ones also ``weight_zero_point`` I32 [N/8, K/g], packed along N."""

    @property
    def required(self) -> tuple[str, ...]:
        return ("weight_packed", "weight_scale", "weight_shape")

    @property
    def optional(self) -> tuple[str, ...]:
        return ("weight_zero_point", "weight_g_idx")

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, int]:
        rows, words = stored_matrix(headers, "weight_packed")
        return rows, words * 8

    def detect(self, headers: Mapping[str, Header], shape: tuple[int, int], hint: Encoding | None = None) -> Encoding:
        rows, columns = shape
        _refuse_order("weight_g_idx" in headers, "weight_g_idx")
        expect(headers, "weight_packed", ("I32",), (rows, _words(columns, "weight_packed")))
        expect(headers, "weight_shape", ("I32", "I64"), (2,))
        scale = expect(headers, "weight_scale", _SCALES)
        groups = scale.shape[-1] if len(scale.shape) == 2 else 0
        expect(headers, "weight_scale", _SCALES, (rows, groups or columns // 32))
        zeros = "weight_zero_point" in headers
        if zeros:
            expect(headers, "weight_zero_point", ("I32",), (ceil_div(rows, 8), groups))
        return Encoding(
            element="int4",
            granularity=_granularity(columns, groups, "weight_scale", hint),
            scale_dtype=SCALE_NAMES[scale.dtype],
            zero_points=zeros,
        )

    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], hint: Encoding | None = None) -> QuantTensor:
        encoding = self.detect(headers_of(tensors), shape, hint)
        recorded = tuple(tensors["weight_shape"].tolist())
        if recorded != shape:
            raise FormatError("weight_shape", expected=str(list(shape)), got=str(list(recorded)))
        zeros = tensors.get("weight_zero_point")
        if zeros is not None:
            zeros = unpack_words(zeros.T)[:, : shape[0]].T.contiguous()
        # A little-endian word's bytes are its nibble pairs, lowest first.
        codes = tensors["weight_packed"].view(torch.uint8)
        return QuantTensor(codes, encoding, tensors["weight_scale"], zero_points=zeros)

    def write(self, matrix: QuantTensor, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        if matrix.encoding.element != "int4" or matrix.scales is None:
            raise self._refuse(matrix.encoding, "int4")
        require_whole_groups(matrix, "weight_scale")
        _words(matrix.shape[-1], "weight_packed")
        stored = {
            "weight_packed": _view(matrix.codes, torch.int32),
            "weight_scale": matrix.scales,
            "weight_shape": torch.tensor(tuple(matrix.shape), dtype=torch.int64, device="cpu"),
        }
        if matrix.zero_points is not None:
            padded = torch.nn.functional.pad(matrix.zero_points, (0, 0, 0, -matrix.shape[0] % 8))
            stored["weight_zero_point"] = pack_words(padded.T).T.contiguous()
        return stored


@dataclass(frozen=True, slots=True)
class _KFirst(Dialect):
    """The common part of GPTQ and AWQ: ``scales`` [K/g, N], ``qzeros`` I32 [K/g, N/8].

    Both always store zero points; where the config calls the quantization symmetric (``hint`` has no zero points) they
    must all be 8, and are left out.
    """

    k_first: ClassVar[bool] = True

    @property
    def required(self) -> tuple[str, ...]:
        return ("qweight", "qzeros", "scales")

    def detect(self, headers: Mapping[str, Header], shape: tuple[int, int], hint: Encoding | None = None) -> Encoding:
        rows, columns = shape
        expect(headers, "qweight", ("I32",), self._packed_shape(rows, columns))
        scale = expect(headers, "scales", ("F16", "BF16", "F32"))
        groups = scale.shape[0] if len(scale.shape) == 2 else 0
        expect(headers, "scales", (scale.dtype,), (groups or columns // 128, rows))
        expect(headers, "qzeros", ("I32",), (groups, _words(rows, "qzeros")))
        return Encoding(
            element="int4",
            granularity=_granularity(columns, groups, "scales", hint),
            scale_dtype=SCALE_NAMES[scale.dtype],
            zero_points=hint is None or hint.element != "int4" or hint.zero_points,
        )

    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], hint: Encoding | None = None) -> QuantTensor:
        encoding = self.detect(headers_of(tensors), shape, hint)
        zeros = self._read_zeros(tensors["qzeros"])
        if not encoding.zero_points and not bool((zeros == _SYMMETRIC_ZERO).all()):
            raise FormatError(
                "qzeros",
                expected=f"{_SYMMETRIC_ZERO} everywhere, as the config says symmetric",
                got=f"{int(zeros.min())} to {int(zeros.max())}",
            )
        return QuantTensor(
            self._read_codes(tensors["qweight"]),
            encoding,
            tensors["scales"].T.contiguous(),
            zero_points=zeros.T.contiguous() if encoding.zero_points else None,
        )

    def write(self, matrix: QuantTensor, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        if matrix.encoding.element != "int4" or matrix.scales is None:
            raise self._refuse(matrix.encoding, "int4")
        require_whole_groups(matrix, "scales")
        rows, columns = matrix.shape
        self._packed_shape(rows, columns)
        zeros = matrix.zero_points
        if zeros is None:
            zeros = torch.full_like(matrix.scales, _SYMMETRIC_ZERO, dtype=torch.uint8)
        return {
            "qweight": self._write_codes(matrix.codes),
            "qzeros": self._write_zeros(zeros.T),
            "scales": matrix.scales.T.contiguous(),
        }

    @abstractmethod
    def _packed_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of ``qweight``."""

    @abstractmethod
    def _read_codes(self, words: Tensor) -> Tensor:
        """Convert ``qweight`` to our codes."""

    @abstractmethod
    def _write_codes(self, codes: Tensor) -> Tensor:
        """Convert our codes to ``qweight``."""

    @abstractmethod
    def _read_zeros(self, words: Tensor) -> Tensor:
        """Convert ``qzeros`` to zero points uint8 [K/g, N]."""

    @abstractmethod
    def _write_zeros(self, zeros: Tensor) -> Tensor:
        """Convert zero points uint8 [K/g, N] to ``qzeros``."""


@dataclass(frozen=True, slots=True)
class Gptq(_KFirst):
    """GPTQ: ``qweight`` I32 [K/8, N], eight rows of a column in a word; ``qzeros`` hold the zero point minus one.

    ``g_idx`` has each row's group; any order but the natural one (``desc_act``) is refused.

    Attributes:
        subtracted: what is taken from zero points before they are stored: 1, or 0 in GPTQ v2.
    """

    subtracted: int = 1

    @property
    def optional(self) -> tuple[str, ...]:
        return ("g_idx",)

    def detect(self, headers: Mapping[str, Header], shape: tuple[int, int], hint: Encoding | None = None) -> Encoding:
        if "g_idx" in headers:
            expect(headers, "g_idx", ("I32", "I64"), shape[1:])
        return _KFirst.detect(self, headers, shape, hint)

    def read(self, tensors: Mapping[str, Tensor], shape: tuple[int, int], hint: Encoding | None = None) -> QuantTensor:
        matrix = _KFirst.read(self, tensors, shape, hint)
        if "g_idx" in tensors:
            stored = tensors["g_idx"].to(torch.int32)
            _refuse_order(not torch.equal(stored, _natural_order(matrix)), "g_idx")
        return matrix

    def write(self, matrix: QuantTensor, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        return {**_KFirst.write(self, matrix), "g_idx": _natural_order(matrix)}

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, int]:
        words, rows = stored_matrix(headers, "qweight")
        return rows, words * 8

    def _packed_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return (_words(columns, "qweight"), rows)

    def _read_codes(self, words: Tensor) -> Tensor:
        return _view(words.T, torch.uint8)

    def _write_codes(self, codes: Tensor) -> Tensor:
        return _view(codes, torch.int32).T.contiguous()

    def _read_zeros(self, words: Tensor) -> Tensor:
        stored = unpack_words(words)
        if self.subtracted and bool((stored == 15).any()):
            raise FormatError(
                "qzeros",
                expected="zero points minus one, 0 to 14",
                got="15",
                hint="this is another version of GPTQ (gptq_v2), or its packer overflowed on a zero point of 0",
            )
        return stored + self.subtracted

    def _write_zeros(self, zeros: Tensor) -> Tensor:
        if self.subtracted and bool((zeros == 0).any()):
            raise FormatError(
                "qzeros", expected="zero points from 1", got="0", hint="GPTQ stores the zero point minus one"
            )
        return pack_words(zeros - self.subtracted)


@dataclass(frozen=True, slots=True)
class Awq(_KFirst):
    """AWQ: ``qweight`` I32 [K, N/8], eight columns in a word in the order 0, 2, 4, 6, 1, 3, 5, 7; ``qzeros``
    likewise."""

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, int]:
        columns, words = stored_matrix(headers, "qweight")
        return words * 8, columns

    def _packed_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return (columns, _words(rows, "qweight"))

    def _read_codes(self, words: Tensor) -> Tensor:
        return pack_nibbles(self._read_zeros(words).T)

    def _write_codes(self, codes: Tensor) -> Tensor:
        return self._write_zeros(unpack_nibbles(codes).T)

    def _read_zeros(self, words: Tensor) -> Tensor:
        nibbles = unpack_words(words).unflatten(-1, (-1, 8))
        position = [_AWQ_ORDER.index(column) for column in range(8)]
        return nibbles[..., position].flatten(-2)

    def _write_zeros(self, zeros: Tensor) -> Tensor:
        return pack_words(zeros.unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2))


def unpack_words(words: Tensor) -> Tensor:
    """Unpack int32 ``[..., M]`` to uint8 ``[..., 8 M]``, the lowest nibble of a word first."""
    return unpack_nibbles(_view(words, torch.uint8))


def pack_words(values: Tensor) -> Tensor:
    """Pack nibbles into words: the inverse of :func:`unpack_words`."""
    return _view(pack_nibbles(values), torch.int32)


def _view(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View the bytes of the last axis as ``dtype``. The tensor is flattened first, since a contiguous tensor whose last
    axis has size 1 may have any stride there, which views refuse."""
    return tensor.reshape(-1).view(dtype).reshape(*tensor.shape[:-1], -1)


def _granularity(columns: int, groups: int, suffix: str, hint: Encoding | None) -> Granularity:
    """Return the granularity: by group; for one group in a row, what the config calls it."""
    if groups == 1 and hint is not None and isinstance(hint.granularity, PerChannel):
        return PerChannel()
    return PerGroup(1, divided(columns, groups, suffix))


def _natural_order(matrix: QuantTensor) -> Tensor:
    """Return the group of each column without reordering, int32 [K]."""
    assert matrix.scales is not None
    columns = matrix.shape[-1]
    return torch.arange(columns, dtype=torch.int32, device=matrix.codes.device) // (columns // matrix.scales.shape[-1])


def _words(count: int, suffix: str) -> int:
    if count % 8:
        raise FormatError(suffix, expected="a multiple of 8 values, whole int32 words", got=str(count))
    return count // 8


def _refuse_order(reordered: bool, suffix: str) -> None:
    if reordered:
        raise FormatError(
            suffix,
            expected="columns in natural order",
            got="columns reordered by activation (desc_act, actorder)",
            hint="quantize again with desc_act=False",
        )
