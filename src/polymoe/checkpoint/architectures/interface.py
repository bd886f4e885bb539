"""Transformers' experts interface: which modules have it, and what their parameters are."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import transformers
from torch import Tensor
from transformers.integrations.moe import use_experts_implementation

from polymoe.errors import UnsupportedProblem

NEWEST = (5, 23)
"""The newest version of Transformers that polymoe is tested with. A newer one runs with a warning if it keeps to the
contract. Refusing it would stop users at every release, and most releases change nothing here."""

_CALLS = (("hidden_states", "top_k_index", "top_k_weights"), ("hidden_states", "router_indices", "routing_weights"))
_KNOWN = {"experts_class", "experts_interface", "is_concatenated", "is_transposed", "has_bias", "has_gate"}


def has_interface(module: Any) -> bool:
    """Whether a module holds the experts of one layer and is called by Transformers' experts interface."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def first_parameter(experts: Any) -> str:
    """The name of the parameter that holds gate and up, or up alone."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def require_experts(kind: type[Any]) -> None:
    """Check that a class of experts modules is called with x, expert ids and routing weights, in this order.

    Raises:
        UnsupportedProblem: naming the class and its parameters.
    """
    names = tuple(inspect.signature(kind.forward).parameters)[1:]
    if names not in _CALLS:
        raise unsupported(f"{kind.__name__}.forward({', '.join(_CALLS[0])})", f"({', '.join(names)})")


def require_known(experts: Any) -> None:
    """Check that a module has the parameters and properties of the experts that are known, and no others.

    Raises:
        UnsupportedProblem: naming what differs.
    """
    where, parameters = type(experts).__name__, dict(experts.named_parameters(recurse=False))
    first = first_parameter(experts)
    require_experts(type(experts))
    for name, parameter in inspect.signature(use_experts_implementation).parameters.items():
        value = getattr(experts, name, parameter.default)
        if name not in _KNOWN and value != parameter.default:
            raise unsupported(f"{where} with {name}={parameter.default}", f"{name}={value!r}")
    names = {first, "down_proj", *([f"{first}_bias", "down_proj_bias"] if experts.has_bias else [])}
    if parameters.keys() != names:
        raise unsupported(f"{where} with the parameters {', '.join(sorted(names))}", ", ".join(sorted(parameters)))


def projections(experts: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The stacked ``gate`` (if any), ``up`` and ``down``, natural order ``[E, N, K]``, and their biases ``gate_bias``
    and so on, as views of a module's ``parameters``."""

    def gate_and_up(tensor: Tensor) -> dict[str, Tensor]:
        if not experts.has_gate:
            return {"up": tensor}
        halves = tensor.chunk(2, 1) if experts.is_concatenated else (tensor[:, 0::2], tensor[:, 1::2])
        return dict(zip(("gate", "up"), halves, strict=True))

    first = first_parameter(experts)
    matrices = {n: parameters[n].mT if experts.is_transposed else parameters[n] for n in (first, "down_proj")}
    found = {**gate_and_up(matrices[first]), "down": matrices["down_proj"]}
    if experts.has_bias:
        found |= {f"{name}_bias": half for name, half in gate_and_up(parameters[f"{first}_bias"]).items()}
        found["down_bias"] = parameters["down_proj_bias"]
    return found


def unsupported(expected: str, got: str) -> UnsupportedProblem:
    """Return the error for a part of Transformers that is not as expected."""
    return UnsupportedProblem(
        f"Transformers {transformers.__version__}",
        expected=expected,
        got=got,
        hint=f"polymoe is tested with versions up to {'.'.join(map(str, NEWEST))}",
    )
