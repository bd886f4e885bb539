"""The layout protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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

    @property
    def wide_scales(self) -> bool:
        """Whether an E8M0 scale is above 2**25 (or NaN): synchronizes with the device."""
        e8m0 = (t for t in self.tensors.values() if t.dtype == torch.float8_e8m0fnu and t.numel())
        return any(int(t.view(torch.uint8).max()) > 127 + 25 for t in e8m0)


class Layout(Protocol):
    """Packs a layer and takes it apart again, to the bit."""

    @property
    def name(self) -> str:
        """Name in ``LAYOUTS`` and in records."""
        ...

    def check(self, spec: ExpertsSpec) -> tuple[Reason, ...]:
        """Every reason why experts of this spec cannot be packed so; empty if they can."""
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
