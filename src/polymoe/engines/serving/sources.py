"""Reads experts from the stacked tensors into which a serving engine loads them.

An engine's quantization method creates, for each layer, ``w13_*`` (gate and up) and ``w2_*`` (down) tensors whose first
axis counts this rank's experts. They hold the checkpoint's bytes, sliced for the rank. :data:`VLLM` says for each
method of vLLM, and :data:`SGLANG` for each of SGLang, by the name of its class, which dialect these bytes are in. Other
methods are refused. Shapes are checked, but they never choose a dialect.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from polymoe.checkpoint.dialects import DIALECTS, Dialect, headers_of
from polymoe.checkpoint.dialects.float import Fp8Dialect
from polymoe.checkpoint.dialects.fp4 import ByWeight, Fp4
from polymoe.errors import CheckpointError, FormatError, renamed
from polymoe.formats import FORMATS, Encoding, PerGroup
from polymoe.problem.activation_quantization import (
    FP8_GROUP128,
    FP8_STATIC,
    FP8_TOKEN,
    UNQUANTIZED,
    ActivationQuantization,
)
from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights

_SHAPE = "weight_shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedSource:
    """What one method of an engine stores.

    Attributes:
        dialects: how a matrix is stored; the suffixes of a dialect are those of the tensors (``w13_weight_scale``). The
            first whose required tensors exist is used.
        loads: the dialects of checkpoints of which the engine loads the experts with this method; DeepSeek-V4's by its
            format.
        interleaved: whether rows of gate and up alternate in ``w13_*``; otherwise all gate rows come first. None if
            the method stores either, and the layer's activation says which.
        multiple: the engine fills the intermediate size up to a multiple of this with zeros.
        bias: suffix of the biases.
        plain_k_first: whether the engine's loader hands over matrices in 16 bits of all experts at once, [E, K, N], as
            views of other shapes. Otherwise they come one by one.
    """

    dialects: tuple[Dialect, ...]
    loads: tuple[str, ...]
    interleaved: bool | None = False
    multiple: int = 1
    bias: str = "bias"
    plain_k_first: bool = False

    def dialect(self, names: Collection[str]) -> Dialect:
        """Return the dialect of tensors with these ``names``.

        Raises:
            FormatError: if a required tensor of every dialect is missing.
        """
        for dialect in self.dialects:
            required = [s for s in dialect.required if s != _SHAPE]
            if all(f"{prefix}_{suffix}" in names for prefix in ("w13", "w2") for suffix in required):
                return dialect
        wanted = " or ".join(f"{', '.join(d.required)}" for d in self.dialects)
        raise FormatError("tensors of the layer", expected=f"w13_* and w2_* with {wanted}", got=", ".join(names))


def _source(*dialects: str | Dialect, **other: Any) -> StackedSource:
    """A method that loads what has the same dialects, unless ``loads`` says otherwise."""
    found = tuple(DIALECTS[d] if isinstance(d, str) else d for d in dialects)
    return StackedSource(**{"dialects": found, "loads": tuple(d.name for d in found), **other})


_MXFP4 = Fp4("stacked_mxfp4", scale_dtype="U8")

VLLM: Mapping[str, StackedSource] = MappingProxyType(
    {
        "AutoAWQMoEMethod": _source("awq"),
        "AutoGPTQMoEMethod": _source("gptq"),
        "CompressedTensorsW4A4Mxfp4MoEMethod": _source("ct_mxfp4"),
        "CompressedTensorsW4A4Nvfp4MoEMethod": _source("ct_nvfp4"),
        "CompressedTensorsW8A8Fp8MoEMethod": _source("ct_float"),
        "CompressedTensorsW8A8Mxfp8MoEMethod": _source("ct_mxfp8"),
        "CompressedTensorsWNA16MarlinMoEMethod": _source("ct_int4", loads=()),
        "CompressedTensorsWNA16MoEMethod": _source("ct_int4"),
        "Fp8MoEMethod": _source("deepseek", "modelopt_fp8", loads=("deepseek", "deepseek_v4 fp8_block128")),
        # The loader gives each tensor-parallel rank whole groups of 32 columns, the last rank fewer.
        "GptOssMxfp4MoEMethod": _source(_MXFP4, loads=("gpt_oss",), interleaved=True, multiple=32, plain_k_first=True),
        "ModelOptFp8MoEMethod": _source("modelopt_fp8"),
        # vLLM's MiniMax-M3 loads weight_scale_inv under this name.
        "ModelOptMxFp8FusedMoE": _source("modelopt_mxfp8", loads=("minimax_mxfp8", "modelopt_mxfp8")),
        "ModelOptNvFp4FusedMoE": _source("modelopt_nvfp4"),
        "Mxfp4MoEMethod": _source(_MXFP4, loads=("deepseek_v4 mxfp4",)),
        "UnquantizedFusedMoEMethod": _source("plain"),
    }
)
"""vLLM's methods, by the name of their class (vLLM 0.24 to 0.33)."""

_BIAS = "weight_bias"
# The method that loads DeepSeek's FP8 loads DeepSeek-V4's MXFP4 too, under the same names.
_FP8_OR_MXFP4 = ByWeight(
    "stacked_deepseek",
    Fp8Dialect("stacked_fp8", "weight_scale_inv"),
    Fp4("stacked_fp4", scale="weight_scale_inv", code_dtype="I8", scale_dtype="F8_E8M0"),
)

SGLANG: Mapping[str, StackedSource] = MappingProxyType(
    {
        "AWQMoEScheme": _source("awq"),
        "CompressedTensorsW4A4Nvfp4MoE": _source("ct_nvfp4"),
        "CompressedTensorsW8A8Fp8MoE": _source("ct_float"),
        "CompressedTensorsWNA16MoE": _source("ct_int4"),
        "CompressedTensorsWNA16TritonMoE": _source("ct_int4", loads=()),
        "Fp8MoEMethod": _source(
            _FP8_OR_MXFP4,
            "modelopt_fp8",
            loads=("deepseek", "deepseek_v4 fp8_block128", "deepseek_v4 mxfp4"),
            bias=_BIAS,
        ),
        "GPTQMarlinMoEScheme": _source("gptq"),
        "ModelOptFp8MoEMethod": _source("modelopt_fp8"),
        "ModelOptNvFp4FusedMoEMethod": _source("modelopt_nvfp4"),
        # gpt-oss alternates rows of gate and up, compressed-tensors does not.
        "Mxfp4MoEMethod": _source(
            _MXFP4, loads=("ct_mxfp4", "gpt_oss"), interleaved=None, multiple=64, bias=_BIAS, plain_k_first=True
        ),
        "UnquantizedFusedMoEMethod": _source("plain", bias=_BIAS),
    }
)
"""SGLang's methods, or the schemes that store their tensors, by the name of their class (SGLang 0.5.17 to 0.5.23)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StackedExperts:
    """The experts of one layer in stacked tensors, which may be on the meta device as long as none is read.

    Attributes:
        where: the layer's name, for messages.
        source: how its method stores them.
        tensors: by name: ``w13_weight`` [E, 2 F, K], ``w2_weight`` [E, N, F], and their scales, zero points and biases;
            ``w13_*`` are [E, F, K] for experts without a gate. Others are ignored.
        hidden, intermediate: H, and F on this rank, with padding.
        gated: whether the experts have a gate projection.
        bias: whether the projections have biases.
        k_first: whether matrices are stored transposed, [E, K, N].
        symmetric: whether zero points that are stored must all be 8, and are left out (GPTQ).
        static: whether the static scales of the inputs are read.
    """

    where: str
    source: StackedSource
    tensors: Mapping[str, Tensor]
    hidden: int
    intermediate: int
    gated: bool = True
    bias: bool = False
    k_first: bool = False
    symmetric: bool = False
    static: bool = False
    dialect: Dialect = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dialect", self.source.dialect(self.tensors))
        if self.dialect.k_first and not self.k_first:
            raise FormatError(self.where, expected=f"{self.dialect.name} tensors with K first", got="N first")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that are read; each must be loaded, completely."""
        kept = [s for s in self.dialect.required if s != _SHAPE]
        kept += [s for s in self.dialect.optional if s.endswith("zero_point")]
        kept += [s for s in self.dialect.optional if s.startswith("input") and self.static]
        kept += [self.source.bias] if self.bias else []
        return tuple(name for p in ("w13", "w2") for s in kept if (name := f"{p}_{s}") in self.tensors)

    @property
    def biases(self) -> tuple[str, ...]:
        """Names of the biases' tensors."""
        return tuple(f"{prefix}_{self.source.bias}" for prefix in ("w13", "w2")) if self.bias else ()

    def encodings(self) -> tuple[Encoding, Encoding]:
        """Return the encodings of gate and up, and of down, from names, dtypes and shapes.

        Raises:
            FormatError: for a tensor whose dtype or shape does not fit; the message names it.
        """
        for name in self.names:
            if not self.tensors[name].dim() or self.tensors[name].shape[0] != self.count:
                raise FormatError(
                    f"{self.where}.{name}",
                    expected=f"a first axis for the {self.count} experts on this rank",
                    got=str(list(self.tensors[name].shape)),
                )
        return self._detect("w13"), self._detect("w2")

    def spec(self, experts: int, first_expert: int = 0) -> ExpertsSpec:
        """Return sizes and encodings of this rank's experts, out of ``experts`` from ``first_expert`` on.

        Raises:
            FormatError: as :meth:`encodings`.
            ArgumentError: for a range outside the layer's experts.
        """
        gate_up, down = self.encodings()
        return ExpertsSpec(
            hidden=self.hidden,
            intermediate=self.intermediate,
            experts=experts,
            gate=gate_up if self.gated else None,
            up=gate_up,
            down=down,
            bias=self.bias,
            first_expert=first_expert,
            local_experts=self.count,
        )

    def recipe(self) -> ActivationQuantization:
        """Return how the engine's own method holds the inputs of these experts.

        The methods that store E4M3 weights multiply them by E4M3 inputs. Their scales are the checkpoint's where the
        method has tensors for them, of groups of 128 columns where weights have blocks, else of tokens. For MXFP8 the
        methods choose 16 bits on GPUs before SM100, and so it is here on all: no kernel multiplies MXFP8 as it is.

        Raises:
            FormatError: as :meth:`encodings`.
        """
        up = self.encodings()[0]
        if up.element != "e4m3" or up == FORMATS["mxfp8"].encoding:
            return UNQUANTIZED
        if any(f"w13_{s}" in self.tensors for s in self.dialect.optional if s.startswith("input")):
            return FP8_STATIC
        blocks = isinstance(up.granularity, PerGroup) and up.granularity.n > 1
        return FP8_GROUP128 if blocks else FP8_TOKEN

    @property
    def count(self) -> int:
        """Number of experts on this rank."""
        return self.tensors[self.names[0]].shape[0]

    def weights(self, spec: ExpertsSpec) -> ExpertWeights:
        """Return the experts, read one at a time; views of the tensors unless the dialect must be rearranged."""
        return ExpertWeights(spec, self._read, lambda e: self._read(e, check=False), stacks=self._stacks())

    def _stacks(self) -> dict[str, Tensor] | None:
        """Return the experts' parts, each [E, ...], as views of the tensors; None if a part is computed from them."""
        if any(tensor.is_meta for tensor in self.tensors.values()):
            return None
        memory = {tensor.untyped_storage().data_ptr() for tensor in self.tensors.values()}
        places = sorted({0, min(1, self.count - 1), self.count - 1})
        experts = [self._read(e, check=False).parts() for e in places]
        found = {}
        for name, part in experts[0].items():
            offsets = [int(expert[name].storage_offset()) for expert in experts]
            step = (offsets[-1] - offsets[0]) // max(1, places[-1])
            even = offsets == [offsets[0] + e * step for e in places]
            owners = {expert[name].untyped_storage().data_ptr() for expert in experts}
            if not even or len(owners) > 1 or not owners <= memory:
                return None
            found[name] = part.as_strided((self.count, *part.shape), (step, *part.stride()))
        return found

    def plain_parts(self, name: str, tensor: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        """Yield the matrices, or biases, of a tensor in 16 bits that has those of all experts: the part of an expert
        (gate, or gate_bias), the expert's place, and the matrix [N, K] or bias [N].

        Args:
            name: of the stacked tensor for which the engine hands it over.
            tensor: biases [E, N]; or matrices, if the source is ``plain_k_first``.

        Raises:
            FormatError: for another number of experts or elements.
        """
        prefix, bias = name.partition("_")[0], name in self.biases
        columns_first = self._shape(prefix)[::-1]
        if prefix == "w13" and self.gated:
            columns_first = columns_first[0], 2 * columns_first[1]
        shape = columns_first[1:] if bias else columns_first
        if len(tensor) != self.count or tensor.numel() != self.count * math.prod(shape):
            raise FormatError(
                f"{self.where}.{name}",
                expected=f"as many elements as {[self.count, *shape]} has",
                got=str(list(tensor.shape)),
            )
        for e, part in enumerate(tensor):
            one = part if bias else part.reshape(shape).T
            for projection, (its_prefix, half) in self._projections.items():
                if its_prefix == prefix:
                    yield f"{projection}_bias" if bias else projection, e, self._half(name, one, half)

    @property
    def _projections(self) -> dict[str, tuple[str, int]]:
        """For each projection, the prefix of its stacked tensors, and which half of their rows it has."""
        first: dict[str, tuple[str, int]] = {"gate": ("w13", 0), "up": ("w13", 1)} if self.gated else {"up": ("w13", 0)}
        return first | {"down": ("w2", 0)}

    def _read(self, e: int, check: bool = True) -> Expert:
        matrices, biases, scales = {}, {}, {}
        for name, (prefix, half) in self._projections.items():
            parts = self._parts(prefix, half, e)
            with renamed(lambda suffix, of=prefix: f"{self.where}.{of}_{suffix}[{e}]"):
                matrices[name] = self.dialect.read(parts, self._shape(prefix), self._hint())
                scales[name] = self.dialect.input_scale(parts) if self.static else None
            if check:
                matrices[name].validate(f"{self.where} {name}[{e}]")
            if self.bias:
                biases[f"{name}_bias"] = self._bias(prefix, half, e, check)
        both = [s for s in (scales.get("gate"), scales["up"]) if s is not None]
        return Expert(
            gate=matrices.get("gate"),
            up=matrices["up"],
            down=matrices["down"],
            gate_up_input_scale=torch.stack(both).amax() if both else None,
            down_input_scale=scales["down"],
            **biases,
        )

    def _detect(self, prefix: str) -> Encoding:
        with renamed(lambda suffix: f"{self.where}.{prefix}_{suffix}"):
            return self.dialect.detect(headers_of(self._parts(prefix, 0, 0)), self._shape(prefix), self._hint())

    def _shape(self, prefix: str) -> tuple[int, int]:
        return (self.intermediate, self.hidden) if prefix == "w13" else (self.hidden, self.intermediate)

    def _hint(self) -> Encoding | None:
        """What names and shapes leave open: that stored zero points say nothing."""
        return Encoding(element="int4", granularity=PerGroup(1, 1), scale_dtype="bfloat16") if self.symmetric else None

    def _parts(self, prefix: str, half: int, e: int) -> dict[str, Tensor]:
        """Return one expert's tensors of one projection, by suffix, as the dialect expects them."""
        parts = {}
        for suffix in self.dialect.suffixes:
            name = f"{prefix}_{suffix}"
            if suffix == _SHAPE:
                parts[suffix] = torch.tensor(self._shape(prefix))
            elif name in self.names:
                parts[suffix] = self._half(name, self.tensors[name][e], half)
        return parts

    def _half(self, name: str, tensor: Tensor, half: int) -> Tensor:
        """Return the rows of gate (``half`` 0) or up (1) of a tensor of ``w13``, and all rows of ``w2``."""
        matrix = tensor.dim() == 2
        if self.gated and name.startswith("w13") and tensor.dim():
            axis = 1 if self.k_first and matrix else 0
            size = tensor.shape[axis]
            if size % 2:
                raise FormatError(
                    f"{self.where}.{name}", expected="rows of gate and of up", got=str(list(tensor.shape))
                )
            rows = range(size)[half::2] if self.source.interleaved else range(size // 2 * half, size // 2 * (half + 1))
            index = slice(rows.start, rows.stop, rows.step)
            tensor = tensor[:, index] if axis else tensor[index]
        if not matrix:
            return tensor.reshape(()) if tensor.numel() == 1 else tensor
        return tensor.T.contiguous() if self.k_first and not self.dialect.k_first else tensor

    def _bias(self, prefix: str, half: int, e: int, check: bool) -> Tensor:
        name = f"{prefix}_{self.source.bias}"
        if name not in self.tensors:
            raise CheckpointError(f"{self.where}.{name}", expected="this bias, as the experts have biases", got="none")
        bias = self._half(name, self.tensors[name][e], half)
        if check and not bool(torch.isfinite(bias).all()):
            raise FormatError(f"{self.where}.{name}[{e}]", expected="finite numbers", got="NaN or infinity")
        return bias
