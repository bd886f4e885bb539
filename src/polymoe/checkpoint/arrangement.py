"""Arrangements: how the expert tensors of one layer are named and stacked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PerExpert:
    """One module for each expert and projection: ``{container}.{first + e}.{name}``, tensors ``{module}.{suffix}``.

    Attributes:
        gate, up, down: names of the modules; ``gate`` is None for experts without a gate projection.
        first: the number of expert 0, where two experts modules share one container.
        dialects: the dialects that use this arrangement; None for any.
    """

    up: str
    down: str
    gate: str | None
    first: int = 0
    dialects: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """All experts stacked, gate and up merged: ``{container}.{gate_up}``, or ``{container}.{gate_up}_{suffix}``.

    Attributes:
        gate_up, down: stems of the tensor names.
        order: of gate and up rows: all gate rows, then all up rows; or alternating, gate first.
        k_first: whether matrices are stored transposed, ``[E, K, N]``.
        dialects: the dialects that use this arrangement; None for any.
    """

    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    order: Literal["concatenated", "interleaved"] = "concatenated"
    k_first: bool = False
    dialects: tuple[str, ...] | None = None


Arrangement = PerExpert | Fused
"""How the expert tensors of one layer are named and stacked."""

UNFUSED = PerExpert(gate="gate_proj", up="up_proj", down="down_proj")
"""Also what llm-compressor and ModelOpt make of stacked experts before they quantize them."""

UNFUSED_NO_GATE = PerExpert(gate=None, up="up_proj", down="down_proj")
"""The same for experts without a gate projection."""

STACKED = Fused(dialects=("plain",))
"""As most models of Transformers hold stacked experts."""
