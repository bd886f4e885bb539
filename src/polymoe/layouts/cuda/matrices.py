"""Base class of the CUDA kernels' layouts: two packed matrices per layer, ``up`` and ``down``.

With a gate, ``up`` interleaves gate and up: rows 8i to 8i + 7 of the gate, then the same rows of up. A thread has rows
g and g + 8 of an MMA's accumulator, so that it has both inputs of the activation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from polymoe.errors import FormatError
from polymoe.formats import Encoding, QuantTensor
from polymoe.formats.elements import CODE_DTYPES, SCALE_DTYPES
from polymoe.layouts.base import Packed, need_one_encoding
from polymoe.layouts.staging import expert_of, ordinary_tensors, pack_stacks, projections_of, unchanged, wide
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights
from polymoe.problem.verdict import Reason, Reasons

if TYPE_CHECKING:
    from torch import Tensor

_MATRICES = ("up", "down")
_PARTS = ("codes", "scales", "rest")


@dataclass(frozen=True, slots=True)
class ScaleLimit:
    """The largest scale (as a byte), or step between two scales, that the kernels decode, with the text of the error.

    Attributes:
        most: the largest value that is accepted.
        expected: the accepted range in words.
        got: the value found in words.
        decodes: whether the kernels decode scales in a range.
    """

    most: int
    expected: str
    got: Callable[[int], str]
    decodes: Callable[[ScaleRange], bool]


@dataclass(frozen=True, slots=True)
class MatrixLayout(ABC):
    """Packs an expert as two matrices: ``up.codes``, ``up.scales``, ``down.codes`` and ``down.scales``, each
    [E, bytes] uint8, without ``scales`` where weights have none. There may also be ``up.rest`` and ``down.rest``: what
    no kernel reads, but the weights have. ``{projection}.global_scale`` [E], biases and input scales are stored as in
    the natural layout."""

    name: str
    multiple: ClassVar[int]
    """H and F must be multiples of this."""
    group_rows: ClassVar[int]
    """Packed matrices whose rows are a multiple of this lie behind each other as one taller matrix does."""
    stacks: ClassVar[bool] = False
    """Whether :meth:`pack_matrix` packs several such matrices at once."""

    @abstractmethod
    def check_encoding(self, reasons: Reasons, projection: str, encoding: Encoding) -> None:
        """Add to ``reasons`` why weights of this encoding cannot be packed, if so."""

    @abstractmethod
    def scale_bytes(self, encoding: Encoding, rows: int, columns: int) -> int:
        """Return the bytes of the scales of one packed matrix."""

    def rest_bytes(self, encoding: Encoding, rows: int, columns: int) -> int:
        """Return the bytes of one packed matrix that no kernel reads."""
        return 0

    @abstractmethod
    def pack_matrix(self, halves: Sequence[QuantTensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        """Pack gate and up, or one projection.

        Args:
            halves: of one expert [N, K]; of several [n, N, K] only if the layout :attr:`stacks`, and if the rows of the
                packed matrix are a multiple of :attr:`group_rows`.

        Returns:
            ``codes`` and, if there are any, ``scales`` and ``rest``, all uint8, those of an expert behind each other;
            and a tensor with the value that :meth:`scale_limit` bounds, a scalar or [n], or None.
        """

    @abstractmethod
    def unpack_matrix(
        self, parts: Mapping[str, Tensor], encoding: Encoding, rows: int, columns: int, halves: int
    ) -> list[dict[str, Tensor]]:
        """Unpack the matrices [rows, columns] of some experts: the inverse of :meth:`pack_matrix`.

        Args:
            parts: ``codes`` and, if there are any, ``scales`` and ``rest``, uint8 [experts, bytes]. Several experts are
                given only if ``rows`` is a multiple of :attr:`group_rows`.
            encoding: how the weights are stored.
            rows, columns: size of each matrix.
            halves: number of projections in each matrix.

        Returns:
            For each projection the natural codes, scales and zero points, as far as there are any, with the rows of the
            experts behind each other; codes and scales in their dtypes or as bytes.
        """

    def scale_limit(self, encoding: Encoding) -> ScaleLimit | None:
        """Return the limit on scales of this encoding; None if the kernels decode all of them."""
        return None

    def multiples(self, spec: ExpertsSpec) -> tuple[int, int]:
        """Return what H and F must be multiples of."""
        return self.multiple, self.multiple

    def derive(self, spec: ExpertsSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what kernels read beside the packed tensors and what follows from those of all experts, by names that
        begin with ``kernel.``."""
        return {}

    def check(self, spec: ExpertsSpec, scales: ScaleRange | None = None) -> tuple[Reason, ...]:
        """Return every reason why such experts cannot be packed; an empty tuple if they can."""
        reasons = Reasons()
        need_one_encoding(reasons, spec)
        for projection, encoding in spec.encodings.items():
            self.check_encoding(reasons, projection, encoding)
        sizes = (("H", spec.hidden), ("F", spec.intermediate))
        for (name, size), multiple in zip(sizes, self.multiples(spec), strict=True):
            reasons.need(size % multiple == 0, name, f"a multiple of {multiple}", size)
        for encoding in dict.fromkeys(spec.encodings.values()):
            limit = self.scale_limit(encoding)
            if limit is not None and scales is not None:
                reasons.need(limit.decodes(scales), "scales", limit.expected, scales)
        return tuple(reasons.found)

    def nbytes(self, spec: ExpertsSpec) -> int:
        """Return the bytes of the packed layer, without input scales and with biases of 2 bytes."""
        total = 2 * spec.bias_elements
        total += sum(4 for e in spec.encodings.values() if e.global_scale)
        for matrix in _MATRICES:
            rows, columns = _shape(spec, matrix)
            encoding = spec.encodings[matrix]
            total += rows * columns * encoding.bits // 8 + self.scale_bytes(encoding, rows, columns)
            total += self.rest_bytes(encoding, rows, columns)
        return spec.local_experts * total

    @ordinary_tensors()
    def pack(self, weights: ExpertWeights, device: torch.device, out: Packed | None = None) -> Packed:
        """Pack expert by expert; the computation runs on ``device``.

        Raises:
            PlanError: if ``out`` holds experts of another spec.
            FormatError: if a scale is beyond :meth:`scale_limit`, which :meth:`check` cannot know without a range.
        """
        found = torch.zeros(weights.spec.local_experts, len(_MATRICES), dtype=torch.uint8, device=device)

        def matrices(at: int | slice, projections: Mapping[str, QuantTensor]) -> dict[str, Tensor]:
            made = {}
            for i, matrix in enumerate(_MATRICES):
                packed, largest = self.pack_matrix([projections[name] for name in _halves(weights.spec, matrix)])
                made |= {f"{matrix}.{name}": part for name, part in packed.items()}
                if largest is not None:
                    found[at, i] = largest
            return made

        def parts(e: int, expert: Expert) -> dict[str, Tensor]:
            return unchanged(expert.parts()) | matrices(e, expert.projections)

        def together(first: int, some: Mapping[str, Tensor]) -> dict[str, Tensor]:
            count = len(next(iter(some.values())))
            made = matrices(slice(first, first + count), projections_of(weights.spec, some))
            return unchanged(some) | {name: part.view(count, -1) for name, part in made.items()}

        stacks = self.stacks and self._lie_behind_each_other(weights.spec)
        tensors = pack_stacks(weights, device, out, parts, together if stacks else None)
        self._require_scales(weights.spec, found)
        derived = self.derive(weights.spec, tensors)
        if out is None:
            return Packed(self.name, weights.spec, tensors | derived)
        for name, tensor in derived.items():
            out.tensors[name].copy_(tensor)
        return Packed(self.name, weights.spec, out.tensors)

    def _require_scales(self, spec: ExpertsSpec, found: Tensor) -> None:
        """Raise FormatError for the first expert and matrix beyond its limit; ``found`` is uint8 [E, matrices]."""
        if found.device.type == "meta":
            return
        limits = [self.scale_limit(spec.encodings[matrix]) for matrix in _MATRICES]
        most = torch.tensor([255 if limit is None else limit.most for limit in limits], device=found.device)
        for e, i in (found > most).nonzero().tolist()[:1]:  # read once per layer, because it synchronizes
            limit = limits[i]
            assert limit is not None
            raise FormatError(
                f"expert {e} {_MATRICES[i]} scales",
                expected=limit.expected,
                got=limit.got(int(found[e, i])),
                hint="name a backend that reads the natural layout",
            )

    def unpack(self, packed: Packed) -> ExpertWeights:
        """Return the original weights, read lazily from ``packed``, one expert or several at a time."""
        spec = packed.spec

        def stacked(first: int, last: int) -> dict[str, Tensor]:
            some = {name: tensor[first:last] for name, tensor in packed.tensors.items()}
            found = unchanged(some)
            for matrix in _MATRICES:
                encoding, names = spec.encodings[matrix], _halves(spec, matrix)
                dtypes = {"codes": CODE_DTYPES[encoding.element], "zero_points": torch.uint8}
                if encoding.scale_dtype is not None:
                    dtypes["scales"] = SCALE_DTYPES[encoding.scale_dtype]
                parts = {name: some[key] for name in _PARTS if (key := f"{matrix}.{name}") in some}
                halves = self.unpack_matrix(parts, encoding, *_shape(spec, matrix), len(names))
                for projection, natural in zip(names, halves, strict=True):
                    for name, part in natural.items():
                        found[f"{projection}.{name}"] = part.view(dtypes[name]).unflatten(0, (last - first, -1))
            return found

        return ExpertWeights(
            spec,
            lambda e: expert_of(spec, stacked(e, e + 1), 0),
            read_stacked=stacked if self._lie_behind_each_other(spec) else None,
        )

    def _lie_behind_each_other(self, spec: ExpertsSpec) -> bool:
        """Whether the packed matrices of all experts lie as those of one taller expert would."""
        return all(_shape(spec, matrix)[0] % self.group_rows == 0 for matrix in _MATRICES)


def interleave_gate_up(halves: Sequence[Tensor]) -> Tensor:
    """Interleave gate and up, each [N, ...], in runs of 8 rows: [2N, ...]. Return a single projection unchanged."""
    if len(halves) == 1:
        return halves[0]
    return torch.stack([h.unflatten(0, (-1, 8)) for h in halves], 1).flatten(0, 2)


def deinterleave_gate_up(rows: Tensor, halves: int) -> list[Tensor]:
    """Return the projections: the inverse of :func:`interleave_gate_up`."""
    (words,) = wide(rows.contiguous())
    return [h.flatten(0, 1).view(rows.dtype) for h in words.unflatten(0, (-1, halves, 8)).unbind(1)]


def exchange_rows(rows: Tensor, inverse: bool = False) -> Tensor:
    """Permute the rows [N, ...] within each 16: row ``4t + 2h + i`` moves to ``8h + 2t + i``.

    A thread of the MMA has rows g and g + 8. With this permutation, and a transposition in registers, a thread has four
    neighbouring values of a row of the result, and stores them at once.
    """
    split = (-1, 2, 4, 2) if inverse else (-1, 4, 2, 2)
    return rows.unflatten(0, split).transpose(1, 2).flatten(0, 3)


def packed_rows(halves: Sequence[Tensor]) -> Tensor:
    """Return the rows of gate and up interleaved, or those of one projection exchanged."""
    return interleave_gate_up(halves) if len(halves) > 1 else exchange_rows(halves[0])


def natural_rows(rows: Tensor, halves: int) -> list[Tensor]:
    """Return the projections: the inverse of :func:`packed_rows`."""
    return deinterleave_gate_up(rows, halves) if halves > 1 else [exchange_rows(rows, inverse=True)]


def apart(codes_HNB: Tensor, rows: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the parts of each projection, from its codes and the interleaved rows of scales and zero points."""
    split = {name: deinterleave_gate_up(part, len(codes_HNB)) for name, part in rows.items()}
    return [
        {"codes": codes, **{name: each[i].contiguous() for name, each in split.items()}}
        for i, codes in enumerate(codes_HNB)
    ]


def taller(part: Tensor) -> Tensor:
    """Return a matrix [N, K] as it is, and those of n experts [n, N, K] as one of [n * N, K]."""
    return part if part.dim() == 2 else wide(part)[0].flatten(0, 1).view(part.dtype)


def stacked(halves: Sequence[Tensor]) -> Tensor:
    """Return gate and up, or one projection, each as :func:`taller` takes it, as [halves, N, K]."""
    if len(halves) == 1:
        return taller(halves[0])[None]
    return torch.stack(wide(*halves)).view(halves[0].dtype).flatten(1, -2)


def as_bytes(scales: Tensor | None) -> Tensor:
    """Return scales [N, G] as bytes, uint8 [N, G, bytes]."""
    assert scales is not None
    scales = scales.contiguous()
    return scales.view(torch.uint8).view(*scales.shape, scales.element_size())


def _halves(spec: ExpertsSpec, matrix: str) -> tuple[str, ...]:
    """Return the names of the projections in a packed matrix."""
    return ("gate", "up") if matrix == "up" and spec.gated else (matrix,)


def _shape(spec: ExpertsSpec, matrix: str) -> tuple[int, int]:
    """Return ``[N, K]`` of a packed matrix. Gate and up are one matrix."""
    rows, columns = spec.matrix_shape(matrix)
    return rows * len(_halves(spec, matrix)), columns
