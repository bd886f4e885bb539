"""The layout protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.tensors import ExpertsSpec, ExpertWeights
from polymoe.problem.verdict import Reason, Reasons

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A layer's experts in one layout.

    Attributes:
        layout: name of the layout.
        spec: shapes and encodings of the experts.
        tensors: the packed tensors by name.
    """

    layout: str
    spec: ExpertsSpec
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())


class Layout(Protocol):
    """Packs the weights of a layer, and unpacks them exactly."""

    @property
    def name(self) -> str:
        """Name in ``LAYOUTS`` and in records."""
        ...

    def check(self, spec: ExpertsSpec, scales: ScaleRange | None = None) -> tuple[Reason, ...]:
        """Return every reason why the layout cannot hold such experts; an empty tuple if it can.

        Args:
            spec: shapes and encodings of the experts.
            scales: range of their scales; None if the range is ordinary or unknown.
        """
        ...

    def nbytes(self, spec: ExpertsSpec) -> int:
        """Return the bytes of the packed layer."""
        ...

    def pack(self, weights: ExpertWeights, device: torch.device, out: Packed | None = None) -> Packed:
        """Pack a layer expert by expert. Temporary memory does not grow with the number of experts.

        Args:
            weights: the experts.
            device: device of the packed tensors.
            out: a packed layer whose tensors are overwritten in place, so that captured graphs stay valid.
        """
        ...

    def unpack(self, packed: Packed) -> ExpertWeights:
        """Return the weights, read lazily from ``packed``: the exact inverse of :meth:`pack`."""
        ...


def need_one_encoding(reasons: Reasons, spec: ExpertsSpec) -> None:
    """Add a reason unless gate and up are stored alike, for kernels that read them together."""
    if spec.gate is not None:
        both = ", ".join(f"{e.name} with scales {e.scale_dtype}" for e in (spec.gate, spec.up))
        reasons.need(spec.gate == spec.up, "gate and up", "one encoding", both)
