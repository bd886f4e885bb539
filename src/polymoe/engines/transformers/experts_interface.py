"""``experts_implementation="polymoe"``: polymoe's kernels on the experts of any unquantized model in Transformers.

Transformers' experts interface passes the experts module itself to a function. Its parameters are read in place, as a
packed layer in the natural layout: nothing is copied, and only backends that read this layout can run them.

Interface: https://huggingface.co/docs/transformers/experts_interface
"""

from __future__ import annotations

import functools
import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, use_experts_implementation

from polymoe.backends import BACKENDS
from polymoe.engines.transformers.activation import activation_of
from polymoe.engines.transformers.contract import checked_call, require_experts, unsupported
from polymoe.errors import PolymoeError, UnsupportedProblem
from polymoe.formats import FORMATS, QuantTensor
from polymoe.layer.experts import FusedExperts
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS, Natural
from polymoe.machine import Machine
from polymoe.planning.agreement import require_agreement
from polymoe.problem import Problem
from polymoe.problem.call import DTYPES
from polymoe.problem.tensors import ExpertsSpec

__all__ = ["INTERFACE_NAME", "experts_forward", "interface_name", "note_groups", "register", "unregister"]

INTERFACE_NAME = "polymoe"
"""``experts_implementation`` with automatic choice of a backend; ``polymoe:NAME`` names one."""


def register() -> None:
    """Register ``experts_implementation="polymoe"``, and ``"polymoe:NAME"`` for each backend, in Transformers.

    Experts that Transformers itself keeps quantized are dispatched by interfaces of their own, which would not know
    the name. There it refuses, and says what packs them.
    """
    for name in ("auto", *BACKENDS):
        ExpertsInterface.register(interface_name(name), functools.partial(experts_forward, backend=name))
        for kind in _quantized_interfaces():
            kind.register(interface_name(name), _refuse_quantized)


def unregister() -> None:
    """Undo :func:`register`."""
    for kind in (ExpertsInterface, *_quantized_interfaces()):
        for name in ("auto", *BACKENDS):
            kind._global_mapping.pop(interface_name(name), None)


def _quantized_interfaces() -> list[Any]:
    return [kind for kind in ExpertsInterface.__subclasses__() if "_global_mapping" in vars(kind)]


def _refuse_quantized(experts: nn.Module, *_: Any, **__: Any) -> Tensor:
    raise UnsupportedProblem(
        f'experts_implementation="polymoe" for {type(experts).__name__}',
        expected="experts in 16 bit, or packed by polymoe",
        got="experts that Transformers keeps quantized itself",
        hint="polymoe.install() before from_pretrained packs them, as polymoe.load() does; "
        "for Transformers' own kernels leave experts_implementation out",
    )


def experts_forward(experts: nn.Module, *args: Tensor, backend: str = "auto", **others: Any) -> Tensor:
    """Transformers calls this instead of the forward of ``experts``.

    Args:
        experts: the module whose parameters are the weights.
        args: x ``[T, H]``, expert ids ``[T, A]`` and routing weights ``[T, A]``.
        backend: "auto" or a backend's name.
        others: none; a version of Transformers that hands over more is refused.

    Returns:
        ``[T, H]`` in the dtype of x.

    Raises:
        UnsupportedProblem: for parameters that are neither bfloat16 nor float16, for an activation that polymoe does
            not have, if no backend reads the natural layout here, or where gradients are recorded and a parameter
            requires one, or an argument for which the backend has no backward; for arguments or parameters that differ
            from those of the versions of Transformers that are known.
        PlanError: if the ranks of a model that :func:`note_groups` knows have different plans.
    """
    where = type(experts).__name__
    if torch.is_grad_enabled():
        trained = next((name for name, p in experts.named_parameters(recurse=False) if p.requires_grad), None)
        if trained is not None:
            raise UnsupportedProblem(
                f"{where}.{trained}",
                expected="no gradient: polymoe has none for the weights of experts",
                got="a parameter that requires a gradient",
                hint="call the model under torch.no_grad(), or model.requires_grad_(False), or "
                'model.set_experts_implementation("grouped_mm") for training',
            )
    x_TH, ids_TA, weights_TA = checked_call(where, args, others)
    return _fused(experts, x_TH, ids_TA.shape[-1], backend)(x_TH, ids_TA, weights_TA)


def interface_name(backend: str) -> str:
    """The ``experts_implementation`` of a backend, or of "auto"."""
    return INTERFACE_NAME if backend == "auto" else f"{INTERFACE_NAME}:{backend}"


def note_groups(model: nn.Module) -> None:
    """Make the ranks among which a model's experts are split agree on their plans, or refuse, at the first call."""
    for module in model.modules():
        meshes = {_mesh(p) for p in module.parameters(recurse=False)} - {None}
        if meshes and hasattr(module, "has_gate"):
            groups = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
            module.__dict__["_polymoe_groups"] = groups


def _mesh(parameter: Any) -> Any:
    """The processes among which a parameter is split, None for a whole one."""
    return getattr(parameter, "device_mesh", None)


@dataclass(slots=True)
class _View:
    """An experts module's parameters as a packed layer, and where they were.

    Attributes:
        state: backend, addresses, dtypes and devices, by which a change is noticed.
        fused: the layer.
        captured: whether a CUDA graph reads these addresses.
    """

    state: tuple[Any, ...]
    fused: FusedExperts
    captured: bool = False


def _fused(experts: nn.Module, x: Tensor, top_k: int, backend: str) -> FusedExperts:
    """The experts as a view of the module's parameters, renewed when those have moved or changed their dtype."""
    state = (backend, *((name, p.data_ptr(), p.dtype, p.device) for name, p in experts.named_parameters(recurse=False)))
    # Hidden from nn.Module: these are views, which must not be moved or saved a second time.
    known: _View | None = experts.__dict__.get("_polymoe")
    if known is None or known.state != state:
        if known is not None and known.captured:
            # A replay does not come here, so it cannot be refused. Nor can this call: the graph may be gone.
            warnings.warn(
                f"the parameters of {type(experts).__name__} have moved since a CUDA graph captured it: the graph "
                "reads their former memory; capture it again",
                stacklevel=2,
            )
        known = _View(state, _agreed(experts, x, top_k, backend))
        experts.__dict__["_polymoe"] = known
    known.captured |= capturing(x)
    return known.fused


def capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is captured now, on the stream that computes with ``x``."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _agreed(experts: nn.Module, x: Tensor, top_k: int, backend: str) -> FusedExperts:
    """A new view, after the ranks that share these experts have compared their plans."""
    where, groups = type(experts).__name__, experts.__dict__.get("_polymoe_groups", ())
    try:
        fused = _view(experts, x, top_k, backend)
    except PolymoeError:
        for group in groups:  # the other ranks wait for this one
            require_agreement(None, group, where)
        raise
    for group in groups:
        require_agreement(fused.explain(), group, where)
    fused.explain().require(where)
    return fused


_KNOWN = {"experts_class", "experts_interface", "is_concatenated", "is_transposed", "has_bias", "has_gate"}


def _require_known(experts: Any, first: str) -> None:
    """Check that a module has the parameters and properties of the experts that are known, and no others."""
    where, parameters = type(experts).__name__, dict(experts.named_parameters(recurse=False))
    require_experts(type(experts))
    for name, parameter in inspect.signature(use_experts_implementation).parameters.items():
        value = getattr(experts, name, parameter.default)
        if name not in _KNOWN and value != parameter.default:
            raise unsupported(f"{where} with {name}={parameter.default}", f"{name}={value!r}")
    names = {first, "down_proj", *([f"{first}_bias", "down_proj_bias"] if experts.has_bias else [])}
    if parameters.keys() != names:
        raise unsupported(f"{where} with the parameters {', '.join(sorted(names))}", ", ".join(sorted(parameters)))
    split = [name for name, p in parameters.items() if _mesh(p) is not None]
    if split:
        raise unsupported(f"{where} called with this rank's part of its parameters", f"{split[0]} as a DTensor")
    if any(p.dtype != parameters[first].dtype for p in parameters.values()):
        raise unsupported(f"{where} with parameters of one dtype", ", ".join(str(p.dtype) for p in parameters.values()))


def _view(experts: Any, x: Tensor, top_k: int, backend: str) -> FusedExperts:
    where = type(experts).__name__
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    _require_known(experts, first)
    parameters = {name: p.detach() for name, p in experts.named_parameters(recurse=False)}
    weight = parameters[first]
    if weight.dtype not in DTYPES or DTYPES[weight.dtype] == "fp32":
        raise UnsupportedProblem(
            f"{where}.{first}",
            expected="bfloat16 or float16",
            got=str(weight.dtype),
            hint="from_pretrained(..., dtype=torch.bfloat16)",
        )
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
    problem = Problem(spec=spec, activation=activation_of(experts), top_k=top_k, dtype=DTYPES[x.dtype])
    request = PlanRequest(Machine.of(str(weight.device)), "mixed", backend, BACKENDS, LAYOUTS)
    return FusedExperts(problem, Natural().view(spec, stacks, vectors), request)
