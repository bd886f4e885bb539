"""Bytes, operations and the floor: the time for them at the device's rates.

Formulas: with uniform routing of T tokens to A of E experts each, ``E * (1 - (1 - A/E)**T)`` experts are active. Their
weights are read once, x is read and y is written once; each routed row takes two operations for every weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from polymoe.machine import Device
from polymoe.problem import Problem

__all__ = ["Cost", "cost"]

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The least that one call needs.

    Attributes:
        active_experts: expected number of this rank's experts that receive a token.
        mean_rows: routed rows of each of those.
        weight_bytes: bytes of those experts.
        activation_bytes: bytes of x and y.
        flops: multiply and add operations of the projections.
        memory_us, compute_us: time for the bytes, and for the operations, at the device's rates.
    """

    active_experts: float
    mean_rows: float
    weight_bytes: float
    activation_bytes: int
    flops: float
    memory_us: float
    compute_us: float

    @property
    def floor_us(self) -> float:
        """The larger of the two times. A kernel is faster only where the device is faster than its stated rates."""
        return max(self.memory_us, self.compute_us)


def cost(problem: Problem, device: Device, tokens: int) -> Cost:
    """Return the cost of one call with ``tokens`` tokens and uniform routing."""
    s = problem.spec
    top_k = min(problem.top_k, s.experts)
    active = s.local_experts * (1 - (1 - top_k / s.experts) ** tokens)
    rows = tokens * top_k * s.local_experts / s.experts
    weights = sum(n * k for n, k in (s.matrix_shape(p) for p in s.encodings))
    flops = 2 * rows * weights
    weight_bytes = active * s.expert_bytes
    activation_bytes = 2 * tokens * s.hidden * _BYTES[problem.dtype]
    fp8 = problem.activations.quantized and device.flops_fp8
    return Cost(
        active_experts=active,
        # A token has top_k rows even if the layer has fewer experts, because it may name one expert twice.
        mean_rows=tokens * problem.top_k * s.local_experts / s.experts / max(active, 1e-9),
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        flops=flops,
        memory_us=1e6 * (weight_bytes + activation_bytes) / device.bandwidth,
        compute_us=1e6 * flops / (fp8 or device.flops_16bit),
    )
