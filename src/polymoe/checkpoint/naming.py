"""Names of expert tensors, for reading and writing alike.

A *part* is one stored matrix of an expert: ``gate``, ``up``, ``down``, or ``gate_up`` where gate and up are merged
(also used for stacked experts without a gate).
"""

from __future__ import annotations

from polymoe.checkpoint.arrangement import Arrangement, PerExpert

BIAS = "bias"
"""Suffix of a bias in all dialects."""


def parts(arrangement: Arrangement, *, gated: bool) -> tuple[str, ...]:
    """Return the parts that ``arrangement`` stores for one expert."""
    if isinstance(arrangement, PerExpert):
        return ("gate", "up", "down") if gated and arrangement.gate is not None else ("up", "down")
    return ("gate_up", "down")


def module_name(container: str, arrangement: Arrangement, part: str, expert: int) -> str:
    """Return the name of the part's module in quantization configs; stacked experts share one module."""
    stem = getattr(arrangement, part)
    if isinstance(arrangement, PerExpert):
        return f"{container}.{arrangement.first + expert}.{stem}"
    return f"{container}.{stem}"


def tensor_name(container: str, arrangement: Arrangement, part: str, expert: int, suffix: str) -> str:
    """Return the name of a part's tensor: ``{module}.{suffix}``; stacked experts use ``{module}_{suffix}``, or the
    module alone for the weight itself."""
    module = module_name(container, arrangement, part, expert)
    if isinstance(arrangement, PerExpert):
        return f"{module}.{suffix}"
    return module if suffix == "weight" else f"{module}_{suffix}"


def part_shape(part: str, hidden: int, intermediate: int, *, gated: bool) -> tuple[int, int]:
    """Return ``[N, K]`` of a part: ``[F, H]`` for gate and up, ``[2F, H]`` for both merged, ``[H, F]`` for down."""
    if part == "down":
        return (hidden, intermediate)
    return (2 * intermediate if part == "gate_up" and gated else intermediate, hidden)
