"""DenseTensors: the tensors of a checkpoint outside its experts, as if nothing were quantized.

Code that runs the rest of a model does not need to know about quantization: every quantized matrix appears as one
tensor ``{module}.weight`` and is dequantized when it is read. All other tensors are as in the files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polymoe.checkpoint.dialects import DIALECTS, SUFFIXES, Dialect, choose
from polymoe.checkpoint.files import CheckpointFiles, Header
from polymoe.checkpoint.scheme import QuantizationConfig, Scheme
from polymoe.errors import CheckpointError, FormatError, renamed
from polymoe.formats import Encoding, QuantTensor

if TYPE_CHECKING:
    from torch import Tensor

CODES = ("weight", "weight_packed", "qweight", "blocks")
QUANTIZED_DTYPES = ("F8_E4M3", "F8_E5M2", "U8", "I8", "I32")
MOST_MATRICES = 20_000
"""Quantized matrices outside the experts: several times as many as any release has, with its layers for multi-token
prediction. Each is compared with the config's patterns of modules."""
CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale")  # scales of a quantized KV cache; 16-bit caches do not use them


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A tensor as stored, with the interface of a safetensors slice: ``get_dtype()``, ``get_shape()``, ``[...]``.

    Attributes:
        name: its full name.
        codes: whether a weight may be read as codes, by a caller that knows the scales.
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
            FormatError: for a weight of 8 or 4 bits without its scale.
        """
        if not self.codes and self.name.endswith(".weight") and (dtype := self.get_dtype()) in QUANTIZED_DTYPES:
            raise FormatError(
                self.name,
                expected="a scale beside a weight of 8 or 4 bits",
                got=f"{dtype} alone",
                hint="weights mean nothing without all their parts: fetch the missing tensor or shard",
            )
        return self.files.get(self.name)[index]


@dataclass(frozen=True, slots=True)
class MatrixRead:
    """What was found while reading a quantized matrix.

    Attributes:
        module: the module of the weight.
        encoding: according to its tensors.
        configured: according to the config, as text.
        as_configured: whether both agree, as far as the config is supported.
        nbytes: bytes as stored.
        numel: number of elements.
    """

    module: str
    encoding: Encoding
    configured: str
    as_configured: bool
    nbytes: int
    numel: int


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """A quantized matrix with the interface of :class:`DenseTensor`, which reads as float32.

    Attributes:
        module: the module of the weight.
        names: its tensors by suffix.
        scheme: according to the config, or None if the config's scheme is not supported.
        log: a list to which each reading is appended.
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
        """``[N, K]``, from the headers; raises like :meth:`read`."""
        dialect, _, headers = self._stored()
        return list(dialect.shape(headers))

    def __getitem__(self, index: Any) -> Tensor:
        """Return the dequantized matrix, or a part of it; raises like :meth:`read`."""
        return self.read().dequantize()[index]

    def read(self) -> QuantTensor:
        """Return the matrix as stored; the tensors take precedence over the config.

        Raises:
            CheckpointError: if one of its tensors is missing.
            FormatError: if a tensor has a wrong dtype, shape or value.
        """
        dialect, encoding, headers = self._stored()
        with renamed(self._full_name):
            tensors = {suffix: self.files.get(name) for suffix, name in self.names.items()}
            matrix = dialect.read(tensors, dialect.shape(headers), encoding)
        matrix.validate(self.module)
        as_configured = self.scheme is None or self.scheme.describes(dialect.name, encoding)
        text, numel = str(self.scheme or "unknown"), math.prod(matrix.shape)
        self.log[self.module] = MatrixRead(self.module, encoding, text, as_configured, matrix.nbytes, numel)
        return matrix

    def _stored(self) -> tuple[Dialect, Encoding, dict[str, Header]]:
        """Return dialect and encoding according to the headers, and the headers by suffix."""
        headers = {suffix: self.files.header(name) for suffix, name in self.names.items()}
        configured, hint = (self.scheme.dialect, self.scheme.encoding) if self.scheme else ("plain", None)
        with renamed(self._full_name):
            dialect, encoding = choose(headers, None, configured, hint)
        return dialect, encoding, headers

    def _full_name(self, where: str) -> str:
        """The tensor that an error of a dialect is about: it names a suffix."""
        return f"{self.module}.{where}" if where in SUFFIXES else f"{self.module}: {where}"


class DenseTensors(Mapping[str, DenseTensor | DenseMatrix]):
    """Tensors outside the experts by name; see the module's docstring.

    Args:
        files: the checkpoint's files.
        quantization: according to its config.
        is_expert: whether a tensor of this name belongs to routed experts, and is left out.
        as_stored: do not merge the stored tensors of quantized matrices.

    Raises:
        CheckpointError: for too many quantized matrices.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        quantization: QuantizationConfig,
        is_expert: Callable[[str], bool] = lambda name: False,
        *,
        as_stored: bool = False,
    ) -> None:
        self._files = files
        modules: dict[str, dict[str, str]] = {}
        self._tensors: dict[str, DenseTensor | DenseMatrix] = {}
        self._log: dict[str, MatrixRead] = {}
        for name in sorted(files.names):
            if is_expert(name) or name.endswith(CACHE_SCALES):
                continue
            module, _, suffix = name.rpartition(".")
            if as_stored:
                self._tensors[name] = DenseTensor(files, name, codes=True)
            elif suffix in SUFFIXES:
                modules.setdefault(module, {})[suffix] = name
            else:
                self._tensors[name] = DenseTensor(files, name)
        quantized = {module for module, names in modules.items() if _is_quantized(names)}
        if len(quantized) > MOST_MATRICES:
            raise CheckpointError(
                str(files.path),
                expected=f"at most {MOST_MATRICES} quantized matrices outside the experts",
                got=str(len(quantized)),
            )
        for module, names in modules.items():
            if module in quantized:
                scheme = _scheme(quantization, module)
                self._tensors[f"{module}.weight"] = DenseMatrix(files, module, names, scheme, self._log)
            else:
                self._tensors |= {name: DenseTensor(files, name) for name in names.values()}

    @property
    def where(self) -> str:
        """The checkpoint, for errors."""
        return str(self._files.path)

    @property
    def matrices_read(self) -> tuple[MatrixRead, ...]:
        """The quantized matrices that were read so far, ordered by module."""
        return tuple(self._log[module] for module in sorted(self._log))

    def __getitem__(self, name: str) -> DenseTensor | DenseMatrix:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _is_quantized(names: Mapping[str, str]) -> bool:
    """Whether there are codes together with scales or other tensors that give them a meaning."""
    codes = [suffix for suffix in CODES if suffix in names]
    if codes and codes != ["weight"]:
        return True
    return any("weight" in d.required and set(d.required) <= set(names) for d in DIALECTS.values() if d.name != "plain")


def _scheme(quantization: QuantizationConfig, module: str) -> Scheme | None:
    try:
        return quantization.scheme(module)
    except CheckpointError:  # the config's scheme is not supported; the tensors may still be
        return None
