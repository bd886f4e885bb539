"""What stands between an expert's products, and E4M3 rounding, as device functions."""

# Kernel arguments are not what a type checker takes them for.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["activate", "chain", "round_e4m3"]


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr):
    """The activation in float32; "none" is ``up`` as it is. A LIMIT of 0 is none."""
    if ACTIVATION == "swiglu":
        if LIMIT > 0:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return gate * tl.sigmoid(ALPHA * gate) * (up + BETA)
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(inner) * up
    elif ACTIVATION == "relu2":
        positive = tl.maximum(up, 0.0)
        return positive * positive
    else:
        return up


@triton.jit
def round_e4m3(x):
    """Nearest E4M3 number of float32 x, ties to even, magnitudes above 448 to 448, as float32.

    In arithmetic, because SM80 has no FP8: a number 2**20 times the power of two below x ends with E4M3's last bit.
    """
    magnitude = tl.minimum(tl.abs(x), 448.0)
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, 121)  # E4M3 is subnormal below 2**-6
    large = ((exponent + 20) << 23).to(tl.float32, bitcast=True)
    magnitude = (magnitude + large) - large
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def chain(CHAINED: tl.constexpr):
    """With programmatic dependent launch (SM90 and newer): wait for the launch before, let the next one start.

    Every program of every kernel begins with it, so waiting for one launch is waiting for all before it.
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
