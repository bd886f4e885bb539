"""The natural layout: the checkpoint's codes, scales and zero points of each projection, stacked over experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polymoe.layouts.base import Packed
from polymoe.layouts.staging import expert_of, ordinary_tensors, pack_stacks
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.tensors import ExpertsSpec, ExpertWeights
from polymoe.problem.verdict import Reason

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Natural:
    """Copies the checkpoint's bytes without any computation.

    Tensors are named ``{projection}.{part}``, for example ``gate.codes`` [E, F, H/2] and ``down.scales`` [E, H, F/32].
    There may also be ``{projection}_bias`` [E, N] and ``{projections}_input_scale`` [E].
    """

    name: str = "natural"

    def check(self, spec: ExpertsSpec, scales: ScaleRange | None = None) -> tuple[Reason, ...]:
        return ()

    def nbytes(self, spec: ExpertsSpec) -> int:
        """Return the bytes of the packed layer, without input scales and the padding of zero points to bytes."""
        return spec.local_bytes

    @ordinary_tensors()
    def pack(self, weights: ExpertWeights, device: torch.device, out: Packed | None = None) -> Packed:
        """Copy expert by expert into tensors on ``device``.

        Raises:
            PlanError: if ``out`` holds experts of another spec.
        """
        tensors = pack_stacks(weights, device, out, lambda _, expert: expert.parts())
        return Packed(self.name, weights.spec, tensors)

    def unpack(self, packed: Packed) -> ExpertWeights:

        def stacked(first: int, last: int) -> dict[str, Tensor]:
            return {name: tensor[first:last] for name, tensor in packed.tensors.items()}

        return ExpertWeights(packed.spec, lambda e: expert_of(packed.spec, packed.tensors, e), read_stacked=stacked)
