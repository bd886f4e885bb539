"""Layout ``dequantized``: float32 matrices that torch multiplies by on a CPU, beside the checkpoint's own bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polymoe.layouts.base import Packed
from polymoe.layouts.natural import Natural
from polymoe.layouts.staging import ordinary_tensors, pack_stacks
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights
from polymoe.problem.verdict import Reason

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "dequantized."


@dataclass(frozen=True, slots=True)
class DequantizedMatrices:
    """The tensors of the natural layout, and float32 ``dequantized.gate_up`` [E, 2F, H] (gate rows, then up rows; [E,
    F, H] without a gate) and ``dequantized.down`` [E, H, F], with ``_bias`` [E, 2F] and [E, H] where there are biases.

    The natural tensors make :meth:`unpack` exact for every format: numbers alone do not say what was stored, where a
    scale is zero or a zero point is in question. They are 4.25 of 36.25 bits of a weight in MXFP4.

    float32 and not bfloat16: every format is exact in it but for the rounding of a product with a scale, and a CPU
    without bfloat16 instructions is not slower.
    """

    name: str = "dequantized"

    def check(self, spec: ExpertsSpec, scales: ScaleRange | None = None) -> tuple[Reason, ...]:
        return ()

    def nbytes(self, spec: ExpertsSpec) -> int:
        """Return the bytes of the packed layer: 4 of each weight and bias, and those of the natural layout."""
        numbers = sum(n * k for n, k in map(spec.matrix_shape, spec.encodings))
        return Natural().nbytes(spec) + 4 * spec.local_experts * (numbers + spec.bias_elements)

    @ordinary_tensors()
    def pack(self, weights: ExpertWeights, device: torch.device, out: Packed | None = None) -> Packed:
        """Copy and dequantize expert by expert into tensors on ``device``.

        Raises:
            PlanError: if ``out`` holds experts of another spec.
        """
        tensors = pack_stacks(weights, device, out, lambda _, expert: {**expert.parts(), **_dequantized(expert)})
        return Packed(self.name, weights.spec, tensors)

    def unpack(self, packed: Packed) -> ExpertWeights:
        natural = {name: tensor for name, tensor in packed.tensors.items() if not name.startswith(_PREFIX)}
        return Natural().unpack(Packed("natural", packed.spec, natural))


def _dequantized(expert: Expert) -> dict[str, Tensor]:
    """Return the float32 tensors of one expert by name."""
    first = ["gate", "up"] if expert.gate is not None else ["up"]
    found = {
        "gate_up": torch.cat([expert.projections[name].dequantize() for name in first]),
        "down": expert.down.dequantize(),
    }
    if expert.down_bias is not None:
        found["gate_up_bias"] = torch.cat([expert.vectors[f"{name}_bias"].float() for name in first])
        found["down_bias"] = expert.down_bias.float()
    return {_PREFIX + name: tensor for name, tensor in found.items()}
