"""Activation functions between the up and down projections: frozen values with their definition in torch.

torch is imported only when an activation is applied, so that a problem can be described without torch.

Example::

    act = parse_activation("silu", limit=10.0)   # SwiGLU(alpha=1.0, beta=0.0, limit=10.0)
    act.name                                     # "swiglu(limit=10)"
    hidden_RF = act(gate_RF, up_RF)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from polymoe.errors import ArgumentError, nearest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """Gated SiLU, optionally clamped, steepened and shifted: ``G' * sigmoid(alpha * G') * (U' + beta)``.

    ``G' = min(gate, limit)`` has no lower clamp; ``U' = clamp(up, -limit, limit)``.

    Attributes:
        alpha: factor inside the sigmoid; 1 is SiLU.
        beta: added to the clamped up projection.
        limit: clamps both inputs before anything else; None does not clamp.

    Sources: Shazeer, arXiv:2002.05202 (plain). gpt-oss: arXiv:2508.10925, ``SwiGLU(1.702, 1.0, 7.0)``. DeepSeek-V4:
    ``SwiGLU(limit=10.0)``, ``swiglu_limit`` in its config. Models that clamp after the SiLU use another function.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    gated: ClassVar[Literal[True]] = True

    def __post_init__(self) -> None:
        for field in ("alpha", "beta", "limit"):
            value = getattr(self, field)
            if field == "limit" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ArgumentError(f"SwiGLU.{field}", expected="a finite number", got=repr(value))
        if self.limit is not None and self.limit <= 0:
            raise ArgumentError(
                "SwiGLU.limit", expected="a number above 0", got=repr(self.limit), hint="None means no clamping"
            )

    @property
    def name(self) -> str:
        """``swiglu`` with the constants that differ from their defaults: ``swiglu(alpha=1.702, beta=1, limit=7)``."""
        plain = {"alpha": 1.0, "beta": 0.0, "limit": None}
        shown = [f"{k}={_number(getattr(self, k))}" for k, default in plain.items() if getattr(self, k) != default]
        return "swiglu" + (f"({', '.join(shown)})" if shown else "")

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return activated values in the inputs' dtype and shape; raises ArgumentError if the shapes differ."""
        import torch

        _check_same_shape(self.name, gate, up)
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(-self.limit, self.limit)
        # The plain constants are skipped, not multiplied in, so that plain SwiGLU rounds like silu(gate) * up.
        if self.alpha == 1:
            activated = torch.nn.functional.silu(gate)
        else:
            activated = gate * torch.sigmoid(self.alpha * gate)
        return activated * (up + self.beta if self.beta else up)


@dataclass(frozen=True, slots=True)
class GeGLU:
    """Gated GELU: ``gelu(gate) * up``.

    Attributes:
        approximate: ``"none"`` is ``x * Phi(x)`` by the error function, ``"tanh"`` its usual approximation
            ``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``.

    Sources: Hendrycks and Gimpel, arXiv:1606.08415 (GELU, both forms); Shazeer, arXiv:2002.05202 (gated).
    """

    approximate: Literal["none", "tanh"] = "none"

    gated: ClassVar[Literal[True]] = True

    def __post_init__(self) -> None:
        if self.approximate not in ("none", "tanh"):
            raise ArgumentError("GeGLU.approximate", expected="'none' or 'tanh'", got=repr(self.approximate))

    @property
    def name(self) -> str:
        """``geglu`` or ``geglu(tanh)``."""
        return "geglu" if self.approximate == "none" else f"geglu({self.approximate})"

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return activated values in the inputs' dtype and shape; raises ArgumentError if the shapes differ."""
        import torch

        _check_same_shape(self.name, gate, up)
        return torch.nn.functional.gelu(gate, approximate=self.approximate) * up


@dataclass(frozen=True, slots=True)
class ReLU2:
    """Squared ReLU of experts that have no gate projection: ``max(x, 0) ** 2`` (Nemotron-H, Nemotron-3).

    Source: So et al., arXiv:2109.08668.
    """

    gated: ClassVar[Literal[False]] = False

    @property
    def name(self) -> str:
        """``relu2``."""
        return "relu2"

    def __call__(self, x: Tensor) -> Tensor:
        """Return activated values in the input's dtype and shape."""
        import torch

        return torch.relu(x).square()


Activation = SwiGLU | GeGLU | ReLU2
"""Any activation. If ``gated``, it is called with ``(gate, up)``, else with the output of the only projection.

``y = act(gate, up) if act.gated is True else act(up)``: with ``is True`` a type checker follows.
"""

HIDDEN_ACTS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": GeGLU(),
        "gelu_fast": GeGLU("tanh"),
        "gelu_new": GeGLU("tanh"),
        "gelu_pytorch_tanh": GeGLU("tanh"),
        "relu2": ReLU2(),
        "silu": SwiGLU(),
        "swish": SwiGLU(),
    }
)
"""The activation for each ``hidden_act`` string of model configs, sorted by string."""


def parse_activation(
    hidden_act: str, *, gated: bool = True, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None
) -> Activation:
    """Return the activation for a config's ``hidden_act``.

    Args:
        hidden_act: the config's string, a key of :data:`HIDDEN_ACTS`.
        gated: whether the experts have a gate projection.
        alpha, beta, limit: constants of :class:`SwiGLU` that the model family or its config sets.

    Raises:
        ArgumentError: if the string is unknown or does not fit ``gated``, or if constants are given for an activation
            that has none.
    """
    activation = HIDDEN_ACTS.get(hidden_act) if isinstance(hidden_act, str) else None
    fitting = [name for name, known in HIDDEN_ACTS.items() if known.gated == gated]
    experts = "experts with a gate" if gated else "experts without a gate"
    if activation is None:
        raise ArgumentError(
            "hidden_act",
            expected=f"an activation known for {experts}",
            got=repr(hidden_act),
            hint=nearest(str(hidden_act), fitting),
        )
    if activation.gated != gated:
        raise ArgumentError(
            "hidden_act",
            expected=f"an activation for {experts}: {', '.join(fitting)}",
            got=repr(hidden_act),
            hint=f"{hidden_act!r} is known for experts {'with' if activation.gated else 'without'} a gate projection",
        )
    swiglu = SwiGLU(alpha, beta, limit)
    if isinstance(activation, SwiGLU):
        return swiglu
    if swiglu != SwiGLU():
        raise ArgumentError("hidden_act", expected=f"silu, to which {swiglu.name} applies", got=repr(hidden_act))
    return activation


def _number(value: float) -> str:
    """Return the shortest exact text: ``1.702``, and ``7`` for both 7 and 7.0."""
    return repr(value).removesuffix(".0")


def _check_same_shape(where: str, gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape:  # torch would broadcast
        raise ArgumentError(where, expected=f"up of gate's shape {list(gate.shape)}", got=str(list(up.shape)))
