"""OtherTensors: a checkpoint without its experts, as if nothing in it were quantized.

What runs the rest of a model need not know quantization: every matrix, however it is stored, is one tensor called
``{module}.weight`` here, and becomes numbers when it is read. All others are what they are in the files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polymoe.checkpoint.dialects import DIALECTS, SUFFIXES, choose
from polymoe.checkpoint.files import CheckpointFiles
from polymoe.checkpoint.scheme import Quantization, Scheme
from polymoe.errors import CheckpointError, FormatError
from polymoe.formats import Encoding, QuantTensor

__all__ = ["MatrixRead", "OtherMatrix", "OtherTensor", "OtherTensors"]

CODES = ("weight", "weight_packed", "qweight", "blocks")
CODE_DTYPES = ("F8_E4M3", "F8_E5M2", "U8", "I8", "I32")
CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale")  # of a quantized KV cache, which 16-bit caches have no use for


@dataclass(frozen=True, slots=True)
class OtherTensor:
    """A tensor as it is stored; answers as safetensors' slices do: ``get_dtype()``, ``get_shape()``, ``[...]``.

    Attributes:
        name: its own.
        codes: whether a weight may be codes, for someone who knows the scales that go with them.
    """

    files: CheckpointFiles
    name: str
    codes: bool = False

    def get_dtype(self) -> str:
        """Safetensors' name of the dtype."""
        return self.files.header(self.name).dtype

    def get_shape(self) -> list[int]:
        """The shape."""
        return list(self.files.header(self.name).shape)

    def __getitem__(self, index: Any) -> Tensor:
        """The tensor, or a part of it.

        Raises:
            FormatError: for a weight in 8 or 4 bits, which means nothing without the scale that should lie beside it.
        """
        if not self.codes and self.name.endswith(".weight") and (dtype := self.get_dtype()) in CODE_DTYPES:
            raise FormatError(
                self.name,
                expected="a scale beside a weight of 8 or 4 bits",
                got=f"{dtype} alone",
                hint="weights mean nothing without all their parts: fetch the missing tensor or shard",
            )
        return self.files.get(self.name)[index]


@dataclass(frozen=True, slots=True)
class MatrixRead:
    """What was found when a quantized matrix was read.

    Attributes:
        module: whose weight it is.
        encoding: what its tensors say.
        configured: what the config says, as text.
        as_configured: whether both agree, as far as the config can be understood.
        nbytes: bytes as stored.
        numel: how many numbers they stand for.
    """

    module: str
    encoding: Encoding
    configured: str
    as_configured: bool
    nbytes: int
    numel: int


@dataclass(frozen=True, slots=True)
class OtherMatrix:
    """A quantized matrix; answers as :class:`OtherTensor` does, with float32 numbers.

    Attributes:
        module: whose weight it is.
        names: its tensors by suffix.
        scheme: what the config says of it, or None if what it says is not supported.
        log: where readings are written down.
    """

    files: CheckpointFiles
    module: str
    names: Mapping[str, str]
    scheme: Scheme | None
    log: dict[str, MatrixRead]

    def get_dtype(self) -> str:
        """F32."""
        return "F32"

    def get_shape(self) -> list[int]:
        """``[N, K]``."""
        return list(self.read().shape)

    def __getitem__(self, index: Any) -> Tensor:
        """The matrix as numbers, or a part of it; raises as :meth:`read`."""
        return self.read().dequantize()[index]

    def read(self) -> QuantTensor:
        """The matrix as it is stored; the tensors count more than the config.

        Raises:
            CheckpointError: one of its tensors is missing.
            FormatError: one is not what it must be; it is named.
        """
        headers = {suffix: self.files.header(name) for suffix, name in self.names.items()}
        configured = self.scheme.dialect if self.scheme else "plain"
        try:
            hint = self.scheme.encoding if self.scheme else None
            dialect, encoding = choose(headers, None, configured, hint)
            tensors = {suffix: self.files.get(name) for suffix, name in self.names.items()}
            matrix = dialect.read(tensors, dialect.shape(headers), encoding)
        except (CheckpointError, FormatError) as error:
            where = f"{self.module}.{error.where}" if error.where in SUFFIXES else f"{self.module}: {error.where}"
            raise type(error)(where, expected=error.expected, got=error.got, hint=error.hint) from error
        matrix.validate(self.module)
        as_configured = self.scheme is None or (
            self.scheme.dialect == dialect.name and self.scheme.encoding.name == encoding.name
        )
        text = f"{self.scheme.encoding.name}, {self.scheme.dialect}" if self.scheme else "unknown"
        numel = math.prod(matrix.shape)
        self.log[self.module] = MatrixRead(self.module, encoding, text, as_configured, matrix.nbytes, numel)
        return matrix


class OtherTensors(Mapping[str, OtherTensor | OtherMatrix]):
    """Tensors outside the experts by name; see the module.

    Args:
        files: the checkpoint's.
        quantization: what its config says.
        experts: full names of the modules that hold experts, whose tensors are left out.
        as_stored: leave quantized matrices as the several tensors they are stored as.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        quantization: Quantization,
        experts: tuple[str, ...],
        *,
        as_stored: bool = False,
    ) -> None:
        modules: dict[str, dict[str, str]] = {}
        self._tensors: dict[str, OtherTensor | OtherMatrix] = {}
        self._log: dict[str, MatrixRead] = {}
        under = tuple(f"{container}." for container in experts)
        for name in sorted(files.names):
            if name.startswith(under) or name.endswith(CACHE_SCALES):
                continue
            module, _, suffix = name.rpartition(".")
            if as_stored:
                self._tensors[name] = OtherTensor(files, name, codes=True)
            elif suffix in SUFFIXES:
                modules.setdefault(module, {})[suffix] = name
            else:
                self._tensors[name] = OtherTensor(files, name)
        for module, names in modules.items():
            if _is_quantized(names):
                scheme = _scheme(quantization, module)
                self._tensors[f"{module}.weight"] = OtherMatrix(files, module, names, scheme, self._log)
            else:
                self._tensors |= {name: OtherTensor(files, name) for name in names.values()}

    @property
    def matrices_read(self) -> tuple[MatrixRead, ...]:
        """The quantized matrices that have been read, by module."""
        return tuple(self._log[module] for module in sorted(self._log))

    def __getitem__(self, name: str) -> OtherTensor | OtherMatrix:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _is_quantized(names: Mapping[str, str]) -> bool:
    """Whether there are codes, and something beside them that says what they mean."""
    codes = [suffix for suffix in CODES if suffix in names]
    if codes and codes != ["weight"]:
        return True
    return any("weight" in d.required and set(d.required) <= set(names) for d in DIALECTS.values() if d.name != "plain")


def _scheme(quantization: Quantization, module: str) -> Scheme | None:
    try:
        return quantization.scheme(module)
    except CheckpointError:  # what the config says of it is not supported; what the tensors say may be
        return None
