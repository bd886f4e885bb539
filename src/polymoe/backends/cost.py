"""Bytes, operations and the floor: the time for them at the device's rates.

Formulas: with uniform routing of T tokens to A of E experts each, ``E * (1 - (1 - A/E)**T)`` experts are active. Half
of the calls have uniform and half Zipf routing, as in measured tables, so that times and floors are of the same calls.
Weights of active experts are read once, x is read and y is written once; each routed row takes two operations for every
weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import expm1

from polymoe.machine import Device
from polymoe.problem import Problem

ZIPF_EXPONENT = 1.1
"""Of the skewed half of routings: the expert of rank r is drawn in proportion to ``r**-1.1``."""

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The least that one call needs.

    Attributes:
        active_experts: expected number of this rank's experts that receive a token.
        uniform_experts, mean_rows: with uniform routing, by which tiles are chosen: experts that receive a token, and
            routed rows of each of those.
        skewed_rows: the same rows with the last exponent of routing.
        weight_bytes: bytes of those experts.
        activation_bytes: bytes of x and y.
        flops: multiply and add operations of the projections.
        memory_us, compute_us: time for the bytes, and for the operations, at the device's rates.
    """

    active_experts: float
    uniform_experts: float
    mean_rows: float
    skewed_rows: float
    weight_bytes: float
    activation_bytes: int
    flops: float
    memory_us: float
    compute_us: float

    @property
    def floor_us(self) -> float:
        """The larger of the two times. A kernel is faster only where the device is faster than its stated rates."""
        return max(self.memory_us, self.compute_us)


def cost(problem: Problem, device: Device, tokens: int, exponents: Sequence[float] = (0.0, ZIPF_EXPONENT)) -> Cost:
    """Return the cost of one call with ``tokens`` tokens: the mean of calls with these exponents of routing, see
    :func:`active_share`."""
    s = problem.spec
    top_k = min(problem.top_k, s.experts)
    uniform = s.local_experts * active_share(s.experts, top_k, tokens)
    shares = [active_share(s.experts, top_k, tokens, exponent) for exponent in exponents]
    active = s.local_experts * sum(shares) / len(shares)
    rows = tokens * top_k * s.local_experts / s.experts
    # A token has top_k rows even if the layer has fewer experts, because it may name one expert twice.
    routed = tokens * problem.top_k * s.local_experts / s.experts
    weights = sum(n * k for n, k in (s.matrix_shape(p) for p in s.encodings))
    flops = 2 * rows * weights
    weight_bytes = active * s.expert_bytes
    activation_bytes = 2 * tokens * s.hidden * _BYTES[problem.dtype]
    fp8 = problem.activations.quantized and device.flops_fp8
    return Cost(
        active_experts=active,
        uniform_experts=uniform,
        mean_rows=routed / max(uniform, 1e-9),
        skewed_rows=routed / max(s.local_experts * shares[-1], 1e-9),
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        flops=flops,
        memory_us=1e6 * (weight_bytes + activation_bytes) / device.bandwidth,
        compute_us=1e6 * flops / (fp8 or device.flops_16bit),
    )


@cache
def active_share(experts: int, top_k: int, tokens: int, exponent: float = 0.0) -> float:
    """Return the expected share of experts that receive one of ``tokens`` tokens.

    Args:
        experts: E; the expert of rank r is drawn in proportion to ``r**-exponent``.
        top_k: distinct experts of a token.
        tokens: T.
        exponent: 0 for uniform routing.
    """
    if exponent == 0:
        return 1 - (1 - top_k / experts) ** tokens
    return sum(1 - (1 - p) ** tokens for p in chances(experts, top_k, exponent)) / experts


@cache
def chances(experts: int, top_k: int, exponent: float) -> tuple[float, ...]:
    """Return the chance of each expert to be one of a token's.

    To draw without replacement is to take those whose exponential clocks ring first; that the last of them rings at the
    same time for all tokens changes the sum by less than 1 %, and by 2 % for 2 of 8 experts.
    """
    weights = [rank**-exponent for rank in range(1, experts + 1)]
    if top_k >= experts:
        return (1.0,) * experts
    low, high = 0.0, 1.0
    while sum(-expm1(-high * w) for w in weights) < top_k:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        enough = sum(-expm1(-middle * w) for w in weights) >= top_k
        low, high = (low, middle) if enough else (middle, high)
    return tuple(-expm1(-high * w) for w in weights)
