"""Arrangements: how the expert tensors of one layer are named and stacked, for reading and writing alike.

A *part* is one stored matrix of an expert: ``gate``, ``up``, ``down``, or ``gate_up`` where gate and up are merged
(also used for stacked experts without a gate).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor

BIAS = "bias"
"""Suffix of a bias in all dialects."""


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
    stacked: ClassVar[bool] = False

    def parts(self, *, gated: bool) -> tuple[str, ...]:
        """Return the parts that are stored for one expert."""
        return ("gate", "up", "down") if gated and self.gate is not None else ("up", "down")

    def module(self, container: str, part: str, expert: int) -> str:
        """Return the name of a part's module in quantization configs."""
        return f"{container}.{self.first + expert}.{getattr(self, part)}"

    def tensor(self, container: str, part: str, expert: int, suffix: str) -> str:
        """Return the name of a part's tensor."""
        return f"{self.module(container, part, expert)}.{suffix}"

    def turned(self, tensor: Tensor) -> Tensor:
        """Return a tensor of one expert as it is stored, or a stored one in natural order."""
        return tensor


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
    stacked: ClassVar[bool] = True

    def parts(self, *, gated: bool) -> tuple[str, ...]:
        """Return the parts that are stored for one expert."""
        return ("gate_up", "down")

    def module(self, container: str, part: str, expert: int) -> str:
        """Return the name of a part's module in quantization configs: one for all experts."""
        return f"{container}.{getattr(self, part)}"

    def tensor(self, container: str, part: str, expert: int, suffix: str) -> str:
        """Return the name of a part's tensor: the module alone for the weight itself."""
        module = self.module(container, part, expert)
        return module if suffix == "weight" else f"{module}_{suffix}"

    def turned(self, tensor: Tensor) -> Tensor:
        """Return a tensor of one expert as it is stored, or a stored one in natural order."""
        return tensor.mT if self.k_first and tensor.dim() >= 2 else tensor


Arrangement = PerExpert | Fused
"""How the expert tensors of one layer are named and stacked."""

UNFUSED = PerExpert(gate="gate_proj", up="up_proj", down="down_proj")
"""Also what llm-compressor and ModelOpt make of stacked experts before they quantize them."""

UNFUSED_NO_GATE = PerExpert(gate=None, up="up_proj", down="down_proj")
"""The same for experts without a gate projection."""

STACKED = Fused(dialects=("plain",))
"""As most models of Transformers hold stacked experts."""


def part_shape(part: str, hidden: int, intermediate: int, *, gated: bool) -> tuple[int, int]:
    """Return ``[N, K]`` of a part: ``[F, H]`` for gate and up, ``[2F, H]`` for both merged, ``[H, F]`` for down."""
    if part == "down":
        return (hidden, intermediate)
    return (2 * intermediate if part == "gate_up" and gated else intermediate, hidden)
