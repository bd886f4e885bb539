"""Which activation an experts module of Transformers computes, established by evaluating it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ExpertsInterface

from polymoe.errors import UnsupportedProblem, quoted
from polymoe.problem.activations import HIDDEN_ACTS, Activation, SwiGLU

_TOLERANCE = 1e-10
"""Relative, in float64. Below what float32 can distinguish, and above the digits that ``gelu_fast`` leaves out."""

_POINTS = (0.0, *(sign * 2.0 ** (n / 2) for n in range(-16, 31) for sign in (1, -1)))
"""Inputs from 0.004 to 32768, most of what 16 bits hold: a clamp may lie far out."""


def activation_of(experts: Any) -> Activation:
    """Return the activation that equals a module's own, on a grid of inputs in float64.

    Its constants can only be attributes of the module whose names end in ``alpha`` or ``limit``. The order of gate and
    up rows, as the module's class declares it, is checked by the same comparison.

    Args:
        experts: a module of Transformers' experts interface, with ``has_gate`` and ``is_concatenated``.

    Raises:
        UnsupportedProblem: if no activation equals it.
    """
    where = type(experts).__name__
    points = torch.tensor(_POINTS, dtype=torch.float64, device="cpu")
    inputs = list(torch.cartesian_prod(points, points).unbind(-1)) if experts.has_gate else [points]
    try:
        with torch.no_grad(), _InFloat64():
            got = _applied(experts, inputs)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise UnsupportedProblem(
            where, expected="a gate that can be evaluated on a CPU", got=quoted(str(error))
        ) from error
    candidates = dict.fromkeys(_candidates(experts))
    for activation in candidates:
        expected = activation(*inputs)
        same = got.shape == expected.shape and got.dtype == expected.dtype
        if same and torch.allclose(got, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            return activation
    raise UnsupportedProblem(
        where,
        expected="an activation equal to one of " + ", ".join(activation.name for activation in candidates),
        got="another gate" if experts.has_gate and not _has_default_gate(experts) else type(experts.act_fn).__name__,
        hint="leave experts_implementation out: Transformers' own kernels run it",
    )


def _applied(experts: Any, inputs: list[Tensor]) -> Tensor:
    """The module's activation of gate and up, as one row of its first product, or of up alone."""
    if not experts.has_gate:
        return experts.act_fn(*inputs)
    row = torch.cat(inputs) if experts.is_concatenated else torch.stack(inputs, -1).flatten()
    return experts._apply_gate(row[None])[0]


def _has_default_gate(experts: Any) -> bool:
    return type(experts)._apply_gate.__module__ == ExpertsInterface.__module__


def _candidates(experts: Any) -> Iterator[Activation]:
    yield from (known for known in HIDDEN_ACTS.values() if known.gated == experts.has_gate)
    if experts.has_gate:
        alphas, limits = _constants(experts, "alpha"), _constants(experts, "limit")
        for alpha, beta, limit in itertools.product((1.0, *alphas), (0.0, 1.0), (None, *limits)):
            yield SwiGLU(alpha, beta, limit)


def _constants(experts: Any, ending: str) -> list[float]:
    """Positive numbers among a module's attributes."""
    found = {value for name, value in vars(experts).items() if name.endswith(ending) and type(value) in (int, float)}
    return sorted(float(value) for value in found if 0 < value < float("inf"))


class _InFloat64(TorchFunctionMode):
    """Ignores conversions to float32, which some gates of models in 16 bits contain."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        to_float32 = func is Tensor.to and any(value is torch.float32 for value in (*args, *kwargs.values()))
        return args[0] if to_float32 or func is Tensor.float else func(*args, **kwargs)
