"""A user's settings for polymoe in a serving engine: environment variables, which reach all processes of the engine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from polymoe.errors import ArgumentError, nearest, renamed
from polymoe.problem.verdict import Reasons

Mode = Literal["auto", "off", "require"]
_MODES: Mapping[str, Mode] = {"": "auto", "1": "auto", "auto": "auto", "0": "off", "off": "off", "require": "require"}
_RANGES = re.compile(r"(!?)(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The variables ``POLYMOE`` and ``POLYMOE_*``, checked.

    Attributes:
        mode: "auto" runs the layers that polymoe can run, "off" none; "require" makes it an error to stand aside.
        layers: which layers: "0-3,7", or "!0" for all others; None for all.
        backend: as in :func:`polymoe.load_experts`.
        activations: the same; "auto" is what the engine's own method does with the experts' inputs on a GPU.
        role: token counts to plan for, or None for the engine's own role.
        expert_memory: GPU memory for experts, which lie in host memory then: "16GiB" or "32slots"; None for all.
    """

    mode: Mode = "auto"
    layers: str | None = None
    backend: str = "auto"
    activations: str = "auto"
    role: str | None = None
    expert_memory: str | None = None

    def __post_init__(self) -> None:
        if self.layers is not None and _RANGES.fullmatch(self.layers) is None:
            raise ArgumentError(
                "POLYMOE_LAYERS",
                expected="numbers and ranges such as 0-3,7, or !0 for all others",
                got=repr(self.layers),
            )

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> EngineSettings:
        """Read the variables.

        Raises:
            ArgumentError: for a value of ``POLYMOE`` or ``POLYMOE_LAYERS`` that says nothing. Names of backends,
                activations and roles, and ``POLYMOE_EXPERT_MEMORY``, are checked where they are used.
        """
        mode = environ.get("POLYMOE", "").lower()
        if mode not in _MODES:
            raise ArgumentError("POLYMOE", got=repr(mode), hint=nearest(mode, [m for m in _MODES if m]))
        return cls(
            mode=_MODES[mode],
            layers=environ.get("POLYMOE_LAYERS") or None,
            backend=environ.get("POLYMOE_BACKEND") or "auto",
            activations=environ.get("POLYMOE_ACTIVATIONS") or "auto",
            role=environ.get("POLYMOE_ROLE") or None,
            expert_memory=environ.get("POLYMOE_EXPERT_MEMORY") or None,
        )

    def check_names(self) -> None:
        """Check the names of backend, activations and role, and the memory for experts, as the first layer of a model
        does.

        Raises:
            ArgumentError: for an unknown one; it names the variable.
        """
        from polymoe.backends import BACKENDS
        from polymoe.layer.offload import require_expert_memory
        from polymoe.planning.plan import role_tokens
        from polymoe.planning.select import require_backend
        from polymoe.problem.activation_quantization import ActivationQuantization

        with renamed(lambda where: f"POLYMOE_{where.upper()}"):
            require_backend(self.backend, BACKENDS)
            role_tokens(self.role or "mixed")
            if self.activations != "auto":
                ActivationQuantization.of(self.activations)
            if self.expert_memory is not None:
                require_expert_memory(self.expert_memory)

    def includes(self, where: str) -> bool:
        """Whether the layer of this name is one that polymoe is to run; a name without a number always is."""
        index = layer_index(where)
        if self.layers is None or index is None:
            return True
        found = _RANGES.fullmatch(self.layers)
        assert found is not None
        bounds = [[int(n) for n in part.split("-")] for part in found[2].split(",")]
        return any(b[0] <= index <= b[-1] for b in bounds) != bool(found[1])

    def need_included(self, reasons: Reasons, where: str) -> None:
        """Add to ``reasons`` that the user leaves the layer of this name to the engine, if so."""
        reasons.need(self.includes(where), "POLYMOE_LAYERS", self.layers, where)


def layer_index(where: str) -> int | None:
    """Return the layer's number in a module's name (3 in ``model.layers.3.mlp.experts``), or None."""
    numbers = [int(part) for part in where.split(".") if part.isdecimal()]
    return numbers[0] if numbers else None
