"""The layout protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from polymoe.scale_range import ScaleRange
from polymoe.tensors import ExpertsSpec, ExpertWeights
from polymoe.verdict import Reason

__all__ = ["Layout", "Packed"]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A layer's experts in one layout: named tensors, with the layout and spec that say what they are."""

    layout: str
    spec: ExpertsSpec
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class Layout(Protocol):
    """Packs a layer and unpacks it again exactly."""

    @property
    def name(self) -> str:
        """Name in ``LAYOUTS`` and in records."""
        ...

    def check(self, spec: ExpertsSpec, scales: ScaleRange | None = None) -> tuple[Reason, ...]:
        """Every reason why experts of this spec, with scales in this range, cannot be packed so; empty if they can.

        ``scales`` is None where the range is ordinary, or is not known.
        """
        ...

    def nbytes(self, spec: ExpertsSpec) -> int:
        """Bytes of the packed layer."""
        ...

    def pack(self, weights: ExpertWeights, device: torch.device, out: Packed | None = None) -> Packed:
        """Pack expert by expert, never holding more than the result and one expert.

        With ``out``, refill its tensors in place: same addresses, so captured graphs stay valid.
        """
        ...

    def unpack(self, packed: Packed) -> ExpertWeights:
        """The weights as they were, read lazily from ``packed``: the exact inverse of :meth:`pack`."""
        ...
