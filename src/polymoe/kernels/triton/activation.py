"""Device functions of all kernels: activations, E4M3 rounding, programmatic dependent launch."""

# Kernel arguments are not what a type checker takes them for.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr):
    """Return the activation in float32. ACTIVATION "none" returns ``up``; a LIMIT of 0 means no limit."""
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
    """Round float32 x to the nearest E4M3 number, as float32. Ties go to even, magnitudes above 448 become 448.

    SM80 has no FP8 conversion. Adding and subtracting 2**20 times the power of two below x leaves E4M3's mantissa bits.
    """
    magnitude = tl.minimum(tl.abs(x), 448.0)
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, 121)  # E4M3 is subnormal below 2**-6
    large = ((exponent + 20) << 23).to(tl.float32, bitcast=True)
    magnitude = (magnitude + large) - large
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def pdl_wait_and_launch(PDL: tl.constexpr):
    """With programmatic dependent launch (SM90 and newer): wait for the previous kernel, let the next one start.

    Every CTA of every kernel calls it first, so that waiting for one kernel means waiting for all kernels before it.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def ceil_div(a: int, b: int) -> int:
    """Return the smallest integer not below ``a / b``, on the host; ``triton.cdiv`` is slow there."""
    return -(-a // b)


def launch_options(pdl: bool = False) -> dict[str, bool]:
    """Return the options of every launch: fused multiply-adds, which are Triton's default until 3.9, and not from 3.10
    on; and programmatic dependent launch, if it is asked for."""
    return {"enable_fp_fusion": True, **({"launch_pdl": True} if pdl else {})}
