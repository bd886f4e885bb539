"""What the layouts of the CUDA kernels share: two packed matrices a layer, with gate and up interleaved.

``up`` holds gate and up where there is a gate: rows 8i to 8i + 7 of the gate, then the same rows of up. One thread then
holds both inputs of the activation, because an MMA's accumulator gives it rows g and g + 8. ``down`` is on its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polymoe.errors import FormatError, PlanError
from polymoe.formats import Encoding, QuantTensor
from polymoe.layouts.base import Packed
from polymoe.layouts.staging import drop_absent, store, uploaded
from polymoe.scale_range import ScaleRange
from polymoe.tensors import Expert, ExpertsSpec, ExpertWeights
from polymoe.verdict import Reason, Reasons

__all__ = [
    "MatrixLayout", "ScaleLimit", "as_bytes", "deinterleave_gate_up", "exchange_rows", "interleave_gate_up",
]  # fmt: skip

_MATRICES = ("up", "down")


@dataclass(frozen=True, slots=True)
class ScaleLimit:
    """The largest byte (or step between two) of a scale that the kernels decode, and the words of the error.

    Attributes:
        most: what is larger is refused.
        expected: the range in words.
        got: a template of what was found: ``{byte}``, ``{exponent}`` (the byte less 127) or ``{step}``.
    """

    most: int
    expected: str
    got: str

    def describe(self, value: int) -> str:
        """The template with the value filled in."""
        return self.got.format(byte=value, exponent=value - 127, step=value)


@dataclass(frozen=True, slots=True)
class MatrixLayout(ABC):
    """Packs an expert as two matrices: ``up.codes``, ``up.scales``, ``down.codes`` and ``down.scales``, each
    [E, bytes] uint8, without ``scales`` where weights have none. ``{projection}.global_scale`` [E], biases and input
    scales are stored as in the natural layout."""

    name: str
    multiple: ClassVar[int]
    """H and F must be multiples of it."""

    @abstractmethod
    def check_encoding(self, reasons: Reasons, projection: str, encoding: Encoding) -> None:
        """Note every reason why weights of this encoding cannot be packed so."""

    @abstractmethod
    def scale_bytes(self, encoding: Encoding, rows: int, columns: int) -> int:
        """Bytes of one packed matrix's scales."""

    @abstractmethod
    def pack_matrix(self, halves: Sequence[QuantTensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Pack gate and up, or one projection.

        Returns:
            ``codes`` and, where there are some, ``scales``, uint8 each; and the value [] that :meth:`scale_limit`
            bounds, or None.
        """

    @abstractmethod
    def unpack_matrix(
        self, parts: Mapping[str, Tensor], encoding: Encoding, rows: int, columns: int, halves: int
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Inverse of :meth:`pack_matrix`: natural codes and scales of each of the ``halves`` projections in a matrix of
        [rows, columns]."""

    def scale_limit(self, encoding: Encoding) -> ScaleLimit | None:
        """What the kernels decode of this encoding's scales; None if everything."""
        return None

    def decodes(self, encoding: Encoding, scales: ScaleRange) -> bool:
        """Whether the kernels decode scales of this range."""
        return True

    def check(self, spec: ExpertsSpec, scales: ScaleRange | None = None) -> tuple[Reason, ...]:
        """Every reason why such experts cannot be packed so; empty if they can."""
        reasons = Reasons()
        if spec.gate is not None:
            both = ", ".join(f"{e.name} with scales {e.scale_dtype}" for e in (spec.gate, spec.up))
            reasons.need(spec.gate == spec.up, "gate and up", "one encoding", both)
        for projection, encoding in spec.encodings.items():
            self.check_encoding(reasons, projection, encoding)
        for name, size in (("H", spec.hidden), ("F", spec.intermediate)):
            reasons.need(size % self.multiple == 0, name, f"a multiple of {self.multiple}", size)
        for encoding in dict.fromkeys(spec.encodings.values()):
            limit = self.scale_limit(encoding)
            if limit is not None and scales is not None:
                reasons.need(self.decodes(encoding, scales), "scales", limit.expected, scales)
        return tuple(reasons.found)

    def nbytes(self, spec: ExpertsSpec) -> int:
        """Bytes of the packed layer, but for input scales and biases wider than 2 bytes."""
        total = 2 * (spec.intermediate * (len(spec.encodings) - 1) + spec.hidden) if spec.bias else 0
        total += sum(4 for e in spec.encodings.values() if e.global_scale)
        for matrix in _MATRICES:
            rows, columns = _shape(spec, matrix)
            encoding = spec.encodings[matrix]
            total += rows * columns * encoding.bits // 8 + self.scale_bytes(encoding, rows, columns)
        return spec.local_experts * total

    def pack(self, weights: ExpertWeights, device: torch.device, out: Packed | None = None) -> Packed:
        """Pack expert by expert, computing on ``device``.

        Raises:
            PlanError: if ``out`` holds experts of another spec.
            FormatError: for scales beyond :meth:`scale_limit`, which :meth:`check` did not know of.
        """
        if out is not None and out.spec != weights.spec:
            raise PlanError("update", expected=str(out.spec), got=str(weights.spec), hint="load these experts again")
        tensors = {} if out is None else out.tensors
        count = weights.spec.local_experts
        found = torch.zeros(count, len(_MATRICES), dtype=torch.uint8, device=device)
        for e, expert in enumerate(uploaded(weights, device)):
            parts = dict(expert.vectors)
            for projection, q in expert.projections.items():
                if q.global_scale is not None:
                    parts[f"{projection}.global_scale"] = q.global_scale
            for i, matrix in enumerate(_MATRICES):
                projections = expert.projections
                halves = [projections[name] for name in _halves(weights.spec, matrix)]
                packed, largest = self.pack_matrix(halves)
                parts |= {f"{matrix}.{name}": part for name, part in packed.items()}
                if largest is not None:
                    found[e, i] = largest
            store(tensors, parts, e, count, device, fresh=out is None)
        self._require_scales(weights.spec, found)
        return Packed(self.name, weights.spec, tensors)

    def _require_scales(self, spec: ExpertsSpec, found: Tensor) -> None:
        """Raise FormatError for the first expert and matrix beyond its limit; ``found`` is uint8 [E, matrices]."""
        if found.device.type == "meta":
            return
        limits = [self.scale_limit(spec.encodings[matrix]) for matrix in _MATRICES]
        most = torch.tensor([255 if limit is None else limit.most for limit in limits], device=found.device)
        for e, i in (found > most).nonzero().tolist()[:1]:  # read once a layer, because it synchronizes
            limit = limits[i]
            assert limit is not None
            raise FormatError(
                f"expert {e} {_MATRICES[i]} scales",
                expected=limit.expected,
                got=limit.describe(int(found[e, i])),
                hint="name a backend that reads the natural layout",
            )

    def unpack(self, packed: Packed) -> ExpertWeights:
        """The weights as they were, read lazily from ``packed``, one expert at a time."""
        spec = packed.spec

        def read(e: int) -> Expert:
            mine = {name: tensor[e] for name, tensor in packed.tensors.items()}
            projections = {}
            for matrix in _MATRICES:
                encoding, names = spec.encodings[matrix], _halves(spec, matrix)
                parts = {n.partition(".")[2]: t for n, t in mine.items() if n.startswith(f"{matrix}.")}
                halves = self.unpack_matrix(parts, encoding, *_shape(spec, matrix), len(names))
                for projection, (codes, scales) in zip(names, halves, strict=True):
                    world = mine.get(f"{projection}.global_scale")
                    projections[projection] = QuantTensor(codes, encoding, scales, global_scale=world)
            vectors = drop_absent({n: t for n, t in mine.items() if "." not in n})
            return Expert(**{"gate": None, **projections, **vectors})  # type: ignore[arg-type]

        return ExpertWeights(spec, read)


def interleave_gate_up(halves: Sequence[Tensor]) -> Tensor:
    """Rows of gate and up [N, ...] in alternate runs of 8; a single projection as it is."""
    if len(halves) == 1:
        return halves[0]
    return torch.stack([h.unflatten(0, (-1, 8)) for h in halves], 1).flatten(0, 2)


def deinterleave_gate_up(rows: Tensor, halves: int) -> list[Tensor]:
    """Inverse of :func:`interleave_gate_up`."""
    return [h.flatten(0, 1) for h in rows.unflatten(0, (-1, halves, 8)).unbind(1)]


def exchange_rows(rows: Tensor, inverse: bool = False) -> Tensor:
    """Rows [N, ...] with those of every 16 exchanged: row ``4t + 2h + i`` moves to ``8h + 2t + i``.

    A thread of the MMA holds rows g and g + 8. With this exchange, and a transposition in registers, one thread holds
    four neighbouring values of a row of the result and stores them at once.
    """
    split = (-1, 2, 4, 2) if inverse else (-1, 4, 2, 2)
    return rows.unflatten(0, split).transpose(1, 2).flatten(0, 3)


def as_bytes(scales: Tensor | None) -> Tensor:
    """Scales [N, G] as bytes [N, G, bytes]."""
    assert scales is not None
    scales = scales.contiguous()
    return scales.view(torch.uint8).view(*scales.shape, scales.element_size())


def _halves(spec: ExpertsSpec, matrix: str) -> tuple[str, ...]:
    """The projections in a packed matrix."""
    return ("gate", "up") if matrix == "up" and spec.gated else (matrix,)


def _shape(spec: ExpertsSpec, matrix: str) -> tuple[int, int]:
    """``[N, K]`` of a packed matrix: gate and up are one."""
    rows, columns = spec.matrix_shape(matrix)
    return rows * len(_halves(spec, matrix)), columns
