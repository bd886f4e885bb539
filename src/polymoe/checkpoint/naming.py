"""Names of expert tensors: the one place that spells them, for reading and writing alike.

A *part* is one stored matrix of an expert: ``gate``, ``up``, ``down``, or ``gate_up`` where those two are one (also
for stacked experts without a gate).
"""

from __future__ import annotations

from polymoe.checkpoint.families import Arrangement, PerExpert

__all__ = ["BIAS", "module_name", "part_shape", "parts", "tensor_name"]

BIAS = "bias"
"""Suffix of a bias, whatever the dialect."""


def parts(arrangement: Arrangement, *, gated: bool) -> tuple[str, ...]:
    """The parts that ``arrangement`` stores for one expert."""
    if isinstance(arrangement, PerExpert):
        return ("gate", "up", "down") if gated and arrangement.gate is not None else ("up", "down")
    return ("gate_up", "down")


def module_name(container: str, arrangement: Arrangement, part: str, expert: int) -> str:
    """Name of the part's module as quantization configs know it; stacked experts have one for all."""
    stem = getattr(arrangement, part)
    return f"{container}.{expert}.{stem}" if isinstance(arrangement, PerExpert) else f"{container}.{stem}"


def tensor_name(container: str, arrangement: Arrangement, part: str, expert: int, suffix: str) -> str:
    """Name of a part's tensor: ``{module}.{suffix}``; stacked, ``{module}_{suffix}``, or the module alone for the
    weight itself."""
    module = module_name(container, arrangement, part, expert)
    if isinstance(arrangement, PerExpert):
        return f"{module}.{suffix}"
    return module if suffix == "weight" else f"{module}_{suffix}"


def part_shape(part: str, hidden: int, intermediate: int, *, gated: bool) -> tuple[int, int]:
    """``[N, K]`` of a part: ``[F, H]`` for gate and up, ``[2F, H]`` for both in one, ``[H, F]`` for down."""
    if part == "down":
        return (hidden, intermediate)
    return (2 * intermediate if part == "gate_up" and gated else intermediate, hidden)
