"""Expert and ExpertWeights: the experts of one layer, read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from polymoe.errors import ArgumentError, FormatError, nearest
from polymoe.formats import FORMATS, Encoding, Format, QuantTensor
from polymoe.formats.extremes import extremes, is_finite

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Sizes and encodings of this rank's part of a layer's experts.

    Attributes:
        hidden: H, the experts' own input and output width (Nemotron-3: the latent width).
        intermediate: F on this rank, after tensor parallelism.
        experts: E in the whole layer.
        up, down: encodings of the up and down projections.
        gate: encoding of the gate projection, or None for experts without one.
        bias: whether the projections have biases.
        first_expert, local_experts: the contiguous range of experts on this rank (expert parallelism).
    """

    hidden: int
    intermediate: int
    experts: int
    up: Encoding
    down: Encoding
    gate: Encoding | None
    bias: bool = False
    first_expert: int = 0
    local_experts: int = -1

    def __post_init__(self) -> None:
        if self.local_experts < 0:
            object.__setattr__(self, "local_experts", self.experts - self.first_expert)
        for name in ("hidden", "intermediate", "experts", "local_experts"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"ExpertsSpec.{name}", expected="at least 1", got=str(getattr(self, name)))
        if not 0 <= self.first_expert <= self.experts - self.local_experts:
            raise ArgumentError(
                "ExpertsSpec",
                expected=f"local experts within 0 to {self.experts}",
                got=f"{self.local_experts} from {self.first_expert}",
            )

    @property
    def gated(self) -> bool:
        """Whether experts have a gate projection."""
        return self.gate is not None

    @property
    def local_range(self) -> range:
        """The experts on this rank, as the router counts them."""
        return range(self.first_expert, self.first_expert + self.local_experts)

    @property
    def encodings(self) -> dict[str, Encoding]:
        """Encoding of each existing projection: gate, up, down."""
        gate = {"gate": self.gate} if self.gate is not None else {}
        return {**gate, "up": self.up, "down": self.down}

    def matrix_shape(self, projection: str) -> tuple[int, int]:
        """``[N, K]`` of one expert's projection: ``[F, H]`` for gate and up, ``[H, F]`` for down."""
        return (self.hidden, self.intermediate) if projection == "down" else (self.intermediate, self.hidden)

    @property
    def bias_elements(self) -> int:
        """Elements of one expert's biases together; 0 without biases."""
        return sum(self.matrix_shape(p)[0] for p in self.encodings) if self.bias else 0

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in its encodings, including biases (2 bytes each)."""
        return sum(e.nbytes(*self.matrix_shape(p)) for p, e in self.encodings.items()) + 2 * self.bias_elements

    @property
    def local_bytes(self) -> int:
        """Bytes of this rank's experts in their encodings, including biases."""
        return self.local_experts * self.expert_bytes

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of this rank's experts as 16-bit floats, without biases."""
        return self.local_experts * 2 * sum(n * k for n, k in map(self.matrix_shape, self.encodings))

    @property
    def format(self) -> str:
        """Name of the encodings: one name if all projections share it, else ``up/down`` or ``gate+up/down``."""
        up, down = self.up.name, self.down.name
        if self.gate is not None and self.gate.name != up:
            return f"{self.gate.name}+{up}/{down}"
        return up if up == down else f"{up}/{down}"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Expert:
    """One expert: ``gate`` and ``up`` are [F, H], ``down`` is [H, F]; biases [F], [F], [H] in a float dtype or None.

    ``gate_up_input_scale`` and ``down_input_scale`` are the checkpoint's static activation scales (float32, no
    dimensions; they multiply: ``x ~ x_quantized * scale``), or None where it has none.

    Raises:
        FormatError: if the shapes do not fit together.
    """

    gate: QuantTensor | None
    up: QuantTensor
    down: QuantTensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_up_input_scale: Tensor | None = None
    down_input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        intermediate, hidden = self.up.shape[-2:]
        wanted = {"gate": [intermediate, hidden], "up": [intermediate, hidden], "down": [hidden, intermediate]}
        wanted |= {"gate_bias": [intermediate], "up_bias": [intermediate], "down_bias": [hidden]}
        for name, part in {**self.projections, **self.vectors}.items():
            if list(part.shape) != wanted.get(name, []):
                raise FormatError(name, expected=f"shape {wanted.get(name, [])}", got=str(list(part.shape)))

    @classmethod
    def quantize(
        cls,
        formats: Mapping[str, Format],
        gate_up_FH: Tensor,
        down_HF: Tensor,
        gate_up_bias_F: Tensor | None = None,
        down_bias_H: Tensor | None = None,
    ) -> Expert:
        """Quantize float weights in natural order: all gate rows, then all up rows, or up rows only.

        Args:
            formats: of each existing projection, by name.
            gate_up_FH, down_HF: the weights.
            gate_up_bias_F, down_bias_H: biases, which stay as they are, or None.
        """
        names = [name for name in ("gate", "up") if name in formats]
        rows = dict(zip(names, gate_up_FH.chunk(len(names)), strict=True))
        matrices = {name: formats[name].quantize(w_NK) for name, w_NK in {**rows, "down": down_HF}.items()}
        biases = {} if gate_up_bias_F is None else dict(zip(names, gate_up_bias_F.chunk(len(names)), strict=True))
        return cls(
            gate=matrices.get("gate"),
            up=matrices["up"],
            down=matrices["down"],
            gate_bias=biases.get("gate"),
            up_bias=biases.get("up"),
            down_bias=down_bias_H,
        )

    @property
    def projections(self) -> dict[str, QuantTensor]:
        """The existing projections: gate, up, down."""
        gate = {"gate": self.gate} if self.gate is not None else {}
        return {**gate, "up": self.up, "down": self.down}

    @property
    def vectors(self) -> dict[str, Tensor]:
        """The existing biases and input scales, by field name."""
        names = ("gate_bias", "up_bias", "down_bias", "gate_up_input_scale", "down_input_scale")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self.parts().values())

    def parts(self) -> dict[str, Tensor]:
        """Return all tensors, in a fixed order, by names like ``gate.codes`` and ``up_bias``."""
        matrices = {f"{p}.{n}": part for p, q in self.projections.items() for n, part in q.parts().items()}
        return {**matrices, **self.vectors}

    def validate(self, where: str) -> None:
        """Check the numbers of every projection, and that biases are finite; reads everything but 4-bit codes.

        Raises:
            FormatError: with ``where``, the projection and the part.
        """
        for name, q in self.projections.items():
            q.validate(f"{where} {name}")
        for name, vector in self.vectors.items():
            if name.endswith("_bias") and not is_finite(vector.dtype, *(float(x) for x in extremes(vector))):
                raise FormatError(f"{where} {name}", expected="finite numbers", got="NaN or infinity")

    def to(self, device: torch.device | str) -> Expert:
        """Return the same expert on ``device``."""
        return self.map(lambda part: part.to(device))

    def map(self, function: Callable[[Tensor], Tensor]) -> Expert:
        """Return the expert with ``function`` applied to every tensor."""
        mapped = {n: p.map(function) for n, p in self.projections.items()}
        return replace(self, **mapped, **{n: function(v) for n, v in self.vectors.items()})


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The experts of a layer, read lazily: ``expert(e)`` reads one from files, or from a packed layer by its layout.

    ``e`` counts this rank's experts from 0; its id in the router is ``spec.first_expert + e``.
    """

    spec: ExpertsSpec
    read: Callable[[int], Expert]
    read_unchecked: Callable[[int], Expert] | None = None
    """As ``read``, without a check of the numbers, so that views of files are read only when they are used."""
    read_stacked: Callable[[int, int], Mapping[str, Tensor]] | None = None
    """``read_stacked(first, last)`` returns the tensors of experts ``first`` to ``last - 1`` by the names of
    :meth:`Expert.parts`, each [experts, ...]; None where that takes as many operations as reading one by one. Input
    scales that an expert lacks are NaN."""
    stacks: Mapping[str, Tensor] | None = None
    """What ``read_unchecked`` gives of all experts, by the names of :meth:`Expert.parts`, each [local_experts, ...], as
    views of memory; None where it is not there so."""

    def peek(self, e: int) -> Expert:
        """Return expert ``e`` without any check, for callers that need only a part of it."""
        return (self.read_unchecked or self.read)(e)

    def expert(self, e: int) -> Expert:
        """Read expert ``e`` of ``spec.local_experts`` and check it against the spec.

        Raises:
            ArgumentError: for ``e`` out of range.
            FormatError: if the expert does not match the spec.
        """
        if not 0 <= e < self.spec.local_experts:
            raise ArgumentError("expert", expected=f"0 to {self.spec.local_experts - 1}", got=str(e))
        expert = self.read(e)
        found = {name: (p.encoding, tuple(p.shape)) for name, p in expert.projections.items()}
        wanted = {name: (enc, self.spec.matrix_shape(name)) for name, enc in self.spec.encodings.items()}
        if found != wanted:
            bad = sorted(set(found.items()) ^ set(wanted.items()), key=str)[0][0]
            expected, got = (
                f"{x[0]} ({x[0].scale_dtype} scales) {list(x[1])}" if x else "none"
                for x in (wanted.get(bad), found.get(bad))
            )
            raise FormatError(f"expert {e} {bad}", expected=expected, got=got)
        return expert

    def __iter__(self) -> Iterator[Expert]:
        return (self.expert(e) for e in range(self.spec.local_experts))

    def dequantize(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """``(gate_up_EFH [E, 2F, H], down_EHF [E, H, F])`` in natural order: all gate rows, then all up rows.

        Experts without a gate give ``[E, F, H]``. Biases are not included. ``dtype`` is float32 by default.
        """
        gate_up, down = torch.empty(0), torch.empty(0)
        for e, x in enumerate(self):
            halves = [p.dequantize(dtype) for p in (x.gate, x.up) if p is not None]
            if e == 0:  # the first expert determines the device
                sizes = (len(halves) * self.spec.intermediate, self.spec.hidden)
                gate_up = halves[0].new_empty(self.spec.local_experts, *sizes)
                down = halves[0].new_empty(self.spec.local_experts, self.spec.hidden, self.spec.intermediate)
            torch.cat(halves, out=gate_up[e])
            down[e] = x.down.dequantize(dtype)
        return gate_up, down

    @classmethod
    def of(cls, experts: Sequence[Expert], *, total: int | None = None, first_expert: int = 0) -> ExpertWeights:
        """Wrap experts in memory, all of the same shape and encoding; ``total`` is E of the whole layer.

        Raises:
            ArgumentError: without experts, or for a range outside ``total``.
        """
        if not experts:
            raise ArgumentError("experts", expected="at least one", got="none")
        x = experts[0]
        intermediate, hidden = x.up.shape
        spec = ExpertsSpec(
            hidden=hidden,
            intermediate=intermediate,
            experts=len(experts) if total is None else total,
            gate=x.gate.encoding if x.gate is not None else None,
            up=x.up.encoding,
            down=x.down.encoding,
            bias=any(name.endswith("_bias") for name in x.vectors),
            first_expert=first_expert,
            local_experts=len(experts),
        )
        return cls(spec, list(experts).__getitem__)

    @classmethod
    def quantize(
        cls,
        gate_up_EFH: Tensor,
        down_EHF: Tensor,
        format: str | Format = "bf16",
        *,
        gated: bool = True,
        gate_up_bias_EF: Tensor | None = None,
        down_bias_EH: Tensor | None = None,
    ) -> ExpertWeights:
        """Quantize float weights in natural order: ``[E, 2F, H]`` (gate rows, then up rows), or ``[E, F, H]`` if
        not ``gated``, and ``[E, H, F]``; biases ``[E, 2F]`` or ``[E, F]``, and ``[E, H]``.

        Raises:
            ArgumentError: for an unknown format name, shapes that do not fit together, or one bias without the other.
        """
        if isinstance(format, str) and format not in FORMATS:
            raise ArgumentError("format", got=repr(format), hint=nearest(format, FORMATS))
        f = FORMATS[format] if isinstance(format, str) else format
        if down_EHF.dim() != 3:
            raise ArgumentError("down_EHF", expected="shape [E, H, F]", got=str(list(down_EHF.shape)))
        count, hidden, intermediate = down_EHF.shape
        rows = (2 if gated else 1) * intermediate
        for name, tensor, shape in (
            ("gate_up_EFH", gate_up_EFH, [count, rows, hidden]),
            ("gate_up_bias_EF", gate_up_bias_EF, [count, rows]),
            ("down_bias_EH", down_bias_EH, [count, hidden]),
        ):
            if tensor is not None and list(tensor.shape) != shape:
                raise ArgumentError(name, expected=f"shape {shape}", got=str(list(tensor.shape)))
        if (gate_up_bias_EF is None) != (down_bias_EH is None):
            raise ArgumentError("bias", expected="both gate_up_bias_EF and down_bias_EH, or neither", got="one")

        formats: dict[str, Format] = dict.fromkeys(("gate", "up", "down") if gated else ("up", "down"), f)
        floats = [t for t in (gate_up_EFH, down_EHF, gate_up_bias_EF, down_bias_EH) if t is not None]
        return cls.of([Expert.quantize(formats, *(t[e] for t in floats)) for e in range(count)])
