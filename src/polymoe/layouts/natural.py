"""The natural layout: each projection's codes, scales and zero points stacked over experts, otherwise as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polymoe.errors import PlanError
from polymoe.formats import QuantTensor
from polymoe.layouts.base import Packed
from polymoe.layouts.staging import drop_absent, store, uploaded
from polymoe.scale_range import ScaleRange
from polymoe.tensors import Expert, ExpertsSpec, ExpertWeights
from polymoe.verdict import Reason

__all__ = ["Natural"]


@dataclass(frozen=True, slots=True)
class Natural:
    """Tensors ``{projection}.{part}``, for example ``gate.codes`` [E, F, H/2] and ``down.scales`` [E, H, F/32], and
    ``{projection}_bias``, and ``{projections}_input_scale`` [E]: the checkpoint's own bytes, so packing copies and does
    not compute.
    """

    name: str = "natural"

    def check(self, spec: ExpertsSpec, scales: ScaleRange | None = None) -> tuple[Reason, ...]:
        """Takes everything."""
        return ()

    def nbytes(self, spec: ExpertsSpec) -> int:
        """Bytes of the packed layer, up to input scales and zero points kept as bytes."""
        return spec.local_experts * spec.expert_bytes

    def pack(self, weights: ExpertWeights, device: torch.device, out: Packed | None = None) -> Packed:
        """Copy expert by expert into tensors on ``device``.

        Raises:
            PlanError: if ``out`` holds experts of another spec.
        """
        if out is not None and out.spec != weights.spec:
            raise PlanError("update", expected=str(out.spec), got=str(weights.spec), hint="load these experts again")
        tensors = {} if out is None else out.tensors
        count = weights.spec.local_experts
        for e, expert in enumerate(uploaded(weights, device)):
            store(tensors, _parts(expert), e, count, device, fresh=out is None)
        return Packed(self.name, weights.spec, tensors)

    def unpack(self, packed: Packed) -> ExpertWeights:
        """Experts as views of the packed tensors."""

        def read(e: int) -> Expert:
            mine = {name: tensor[e] for name, tensor in packed.tensors.items()}
            projections = {
                p: QuantTensor(
                    encoding=encoding, **{n.split(".")[1]: t for n, t in mine.items() if n.startswith(p + ".")}
                )
                for p, encoding in packed.spec.encodings.items()
            }
            vectors = drop_absent({n: t for n, t in mine.items() if "." not in n})
            return Expert(**{"gate": None, **projections, **vectors})  # type: ignore[arg-type]

        return ExpertWeights(packed.spec, read)

    def view(
        self, spec: ExpertsSpec, stacks: dict[str, QuantTensor], vectors: dict[str, Tensor] | None = None
    ) -> Packed:
        """Stacked tensors that exist already, any strides, as a packed layer without copying.

        Args:
            spec: what they are.
            stacks: gate (where there is one), up and down as [E, N, K].
            vectors: biases, [E, F] or [E, H], by name ("up_bias").
        """
        tensors = {f"{p}.{n}": part for p, stack in stacks.items() for n, part in stack.parts().items()}
        return Packed(self.name, spec, {**tensors, **(vectors or {})})


def _parts(expert: Expert) -> dict[str, Tensor]:
    parts = {f"{p}.{n}": part for p, tensor in expert.projections.items() for n, part in tensor.parts().items()}
    return {**parts, **expert.vectors}
