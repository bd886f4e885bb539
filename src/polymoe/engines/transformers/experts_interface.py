"""``experts_implementation="polymoe"``: polymoe's kernels on the experts of any unquantized model in Transformers.

Transformers' experts interface passes the experts module itself to a function. Its parameters are read in place, as a
packed layer in the natural layout: nothing is copied, and only backends that read this layout can run them.

Interface: https://huggingface.co/docs/transformers/experts_interface
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ExpertsInterface

from polymoe.activations import ACTIVATIONS, Activation, SwiGLU
from polymoe.backends import BACKENDS
from polymoe.call import DTYPES
from polymoe.errors import UnsupportedProblem, nearest
from polymoe.experts import FusedExperts
from polymoe.formats import FORMATS, QuantTensor
from polymoe.layouts import LAYOUTS, Natural
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.runtime import PlanRequest
from polymoe.tensors import ExpertsSpec

__all__ = ["INTERFACE_NAME", "experts_forward", "interface_name", "register", "unregister"]

INTERFACE_NAME = "polymoe"
"""``experts_implementation`` with automatic choice of a backend; ``polymoe:NAME`` names one."""

GATES: Mapping[str, Callable[[Any], Activation]] = {
    "DeepseekV4Experts": lambda experts: SwiGLU(limit=experts.limit),
    "GptOssExperts": lambda experts: SwiGLU(alpha=experts.alpha, beta=1.0, limit=experts.limit),
}
"""Activations of experts classes that do not compute ``act_fn(gate) * up``, by class name."""


def register() -> None:
    """Register ``experts_implementation="polymoe"``, and ``"polymoe:NAME"`` for each backend, in Transformers."""
    for name in ("auto", *BACKENDS):
        ExpertsInterface.register(interface_name(name), functools.partial(experts_forward, backend=name))


def unregister() -> None:
    """Undo :func:`register`."""
    for name in ("auto", *BACKENDS):
        ExpertsInterface._global_mapping.pop(interface_name(name), None)


def experts_forward(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, backend: str = "auto"
) -> Tensor:
    """Transformers calls this instead of the forward of ``experts``.

    Args:
        experts: the module whose parameters are the weights.
        hidden_states: ``[T, H]``.
        top_k_index, top_k_weights: expert ids and routing weights, ``[T, A]``.
        backend: "auto" or a backend's name.

    Returns:
        ``[T, H]`` in the dtype of ``hidden_states``.

    Raises:
        UnsupportedProblem: for parameters that are neither bfloat16 nor float16, for an activation that polymoe does
            not have, if no backend reads the natural layout here, or where gradients are recorded and a parameter
            requires one, or an argument for which the backend has no backward.
    """
    if torch.is_grad_enabled():
        trained = next((name for name, p in experts.named_parameters(recurse=False) if p.requires_grad), None)
        if trained is not None:
            raise UnsupportedProblem(
                f"{type(experts).__name__}.{trained}",
                expected="no gradient: polymoe has none for the weights of experts",
                got="a parameter that requires a gradient",
                hint="call the model under torch.no_grad(), or model.requires_grad_(False), or "
                'model.set_experts_implementation("grouped_mm") for training',
            )
    fused = _fused(experts, hidden_states, top_k_index.shape[-1], backend)
    return fused(hidden_states, top_k_index, top_k_weights.float())


def interface_name(backend: str) -> str:
    """The ``experts_implementation`` of a backend, or of "auto"."""
    return INTERFACE_NAME if backend == "auto" else f"{INTERFACE_NAME}:{backend}"


def _fused(experts: nn.Module, x: Tensor, top_k: int, backend: str) -> FusedExperts:
    """The experts as a view of the module's parameters, renewed when those have moved or changed their dtype."""
    state = (backend, *((name, p.data_ptr(), p.dtype, p.device) for name, p in experts.named_parameters(recurse=False)))
    known = experts.__dict__.get("_polymoe")
    if known is None or known[0] != state:
        known = (state, _view(experts, x, top_k, backend))
        # Hidden from nn.Module: these are views, which must not be moved or saved a second time.
        experts.__dict__["_polymoe"] = known
    return known[1]


def _view(experts: Any, x: Tensor, top_k: int, backend: str) -> FusedExperts:
    where = type(experts).__name__
    parameters = {name: p.detach() for name, p in experts.named_parameters(recurse=False)}
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    weight = parameters[first]
    if weight.dtype not in DTYPES or DTYPES[weight.dtype] == "fp32":
        raise UnsupportedProblem(
            f"{where}.{first}",
            expected="bfloat16 or float16",
            got=str(weight.dtype),
            hint="from_pretrained(..., dtype=torch.bfloat16)",
        )
    if getattr(experts, "has_post_expert_norm", False):
        raise UnsupportedProblem(where, expected="experts without a norm after them", got="has_post_expert_norm")
    encoding = FORMATS[DTYPES[weight.dtype]].encoding

    def stack(matrix: Tensor) -> QuantTensor:
        return QuantTensor(matrix, encoding)

    def gate_and_up(tensor: Tensor, dim: int) -> dict[str, Tensor]:
        """The gate and up halves of a tensor along ``dim``, as views."""
        if not experts.has_gate:
            return {"up": tensor}
        if experts.is_concatenated:
            return dict(zip(("gate", "up"), tensor.chunk(2, dim), strict=True))
        pairs = tensor.unflatten(dim, (-1, 2))
        return {name: pairs.select(dim % tensor.dim() + 1, i) for i, name in enumerate(("gate", "up"))}

    matrices = {
        name: parameters[name].mT if experts.is_transposed else parameters[name] for name in (first, "down_proj")
    }
    stacks = {name: stack(half) for name, half in gate_and_up(matrices[first], 1).items()}
    stacks["down"] = stack(matrices["down_proj"])
    vectors: dict[str, Tensor] = {}
    if experts.has_bias:
        vectors = {f"{name}_bias": half for name, half in gate_and_up(parameters[f"{first}_bias"], 1).items()}
        vectors["down_bias"] = parameters["down_proj_bias"]
    count, hidden, intermediate = stacks["down"].shape
    spec = ExpertsSpec(
        hidden=hidden,
        intermediate=intermediate,
        experts=count,
        bias=experts.has_bias,
        gate=encoding if experts.has_gate else None,
        up=encoding,
        down=encoding,
    )
    problem = Problem(spec=spec, activation=_activation(experts), top_k=top_k, dtype=DTYPES[x.dtype])
    request = PlanRequest(Machine.of(str(weight.device)), "mixed", backend, BACKENDS, LAYOUTS)
    fused = FusedExperts(problem, Natural().view(spec, stacks, vectors), request)
    fused.explain().require(where)
    return fused


def _activation(experts: Any) -> Activation:
    where = type(experts).__name__
    if where in GATES:
        return GATES[where](experts)
    default_gate = type(experts)._apply_gate.__module__ == ExpertsInterface.__module__
    if experts.has_gate and not default_gate:
        raise UnsupportedProblem(where, expected="act_fn(gate) * up, or one of " + ", ".join(GATES), got="another gate")
    for name, activation in ACTIVATIONS.items():
        if activation.gated == experts.has_gate and type(experts.act_fn) is type(ACT2FN[name]):
            return activation
    raise UnsupportedProblem(where, got=f"activation {type(experts.act_fn).__name__}", hint=nearest("", ACTIVATIONS))
