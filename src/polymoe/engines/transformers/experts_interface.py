"""``experts_implementation="polymoe"``: polymoe's kernels on the experts of any unquantized model in Transformers.

Transformers' experts interface passes the experts module itself to a function. Its parameters are read in place, as a
packed layer in the natural layout: nothing is copied, and only backends that read this layout can run them.

Interface: https://huggingface.co/docs/transformers/experts_interface
"""

from __future__ import annotations

import ctypes
import functools
import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]
from torch.utils._python_dispatch import _disable_current_modes
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from polymoe.backends import BACKENDS
from polymoe.checkpoint.architectures.activation import activation_of
from polymoe.checkpoint.architectures.interface import (
    first_parameter,
    has_interface,
    projections,
    require_known,
    unsupported,
)
from polymoe.engines.transformers.contract import checked_call
from polymoe.errors import PolymoeError, UnsupportedProblem
from polymoe.formats import FORMATS
from polymoe.layer.runtime import PlanCache, PlanRequest, compiled_call
from polymoe.layouts import LAYOUTS, Natural
from polymoe.machine import Machine
from polymoe.planning.agreement import require_agreement
from polymoe.problem import Problem
from polymoe.problem.call import DTYPES, CallArguments
from polymoe.problem.tensors import ExpertsSpec

log = logging.getLogger("polymoe")

INTERFACE_NAME = "polymoe"
"""``experts_implementation`` with automatic choice of a backend; ``polymoe:NAME`` names one."""

_NAME, _TRACED = "_polymoe", "_polymoe_traced"  # attributes of experts modules


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

    A call that records gradients of the experts' parameters runs Transformers' own ``grouped_mm``. No reference to the
    parameters' memory is left after a call: others may move them away.

    Args:
        experts: the module whose parameters are the weights, in bfloat16 or float16; in float32 only under autocast,
            which then converts them in each call.
        args: x ``[T, H]``, expert ids ``[T, A]`` and routing weights ``[T, A]``.
        backend: "auto" or a backend's name.
        others: none; a version of Transformers that hands over more is refused.

    Returns:
        ``[T, H]`` in the dtype of x.

    Raises:
        UnsupportedProblem: for parameters of another dtype, for an activation that polymoe does not have, if no backend
            reads the natural layout here, or where gradients are recorded and an argument requires one for which the
            backend has no backward; for arguments or parameters that differ from those of the versions of Transformers
            that are known.
        PlanError: if the ranks of a model that :func:`note_groups` knows have different plans.
    """
    where = type(experts).__name__
    parameters = dict(experts.named_parameters(recurse=False))
    if torch.is_grad_enabled() and any(p.requires_grad for p in parameters.values()):
        _say_gradients(where)
        return grouped_mm_experts_forward(experts, *args, **others)
    call = CallArguments(*checked_call(where, args, others))
    x_TH, ids_TA, _ = call[:3]
    parameters = {name: _autocast(parameter.detach()) for name, parameter in parameters.items()}
    state = (backend, *[(name, p.dtype, p.device, p.shape) for name, p in parameters.items()])
    asked = state, x_TH.dtype, ids_TA.shape[1]
    if torch.compiler.is_compiling():
        known: _Known | None = getattr(experts, _NAME, None)
        plans = _traced_plans(id(experts), *asked) if known is None or known.state != state else known.plans
        return compiled_call(plans, list(_views(experts, parameters).values()), call)
    if is_tracing():
        return compiled_call(_known_before(experts, *asked), list(_views(experts, parameters).values()), call)
    known = _known(experts, *asked)
    _note_capture(experts, known, x_TH)
    layer = known.plans.layer(list(_views(experts, parameters).values()))
    call.check(layer.plans.problem, layer.device)
    return layer.run(call)


def interface_name(backend: str) -> str:
    """The ``experts_implementation`` of a backend, or of "auto"."""
    return INTERFACE_NAME if backend == "auto" else f"{INTERFACE_NAME}:{backend}"


def note_groups(model: nn.Module) -> None:
    """Make the ranks among which a model's experts are split agree on their plans, or refuse, at the first call."""
    for module in model.modules():
        meshes = {_mesh(p) for p in module.parameters(recurse=False)} - {None}
        if meshes and has_interface(module):
            groups = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
            module.__dict__["_polymoe_groups"] = groups


def _mesh(parameter: Any) -> Any:
    """The processes among which a parameter is split, None for a whole one."""
    return getattr(parameter, "device_mesh", None)


@dataclass(slots=True)
class _Known:
    """What a call leaves on an experts module: nothing that holds its parameters' memory.

    Attributes:
        state: backend, and the parameters' names, dtypes, devices and shapes, for which the plans were made.
        plans: the plans.
        captured: where the parameters are that a CUDA graph reads.
    """

    state: tuple[Any, ...]
    plans: PlanCache
    captured: tuple[int, ...] = ()


def _known(experts: nn.Module, state: tuple[Any, ...], x_dtype: torch.dtype, top_k: int) -> _Known:
    """The plans for these parameters, made at the first call and where a dtype, device or shape has changed."""
    known: _Known | None = vars(experts).get(_NAME) or vars(experts).get(_TRACED)
    if known is None or known.state != state:
        captured = () if known is None else known.captured
        known = _Known(state, _agreed(experts, state, x_dtype, top_k), captured)
        setattr(experts, _NAME, known)
    return known


def _known_before(experts: nn.Module, state: tuple[Any, ...], x_dtype: torch.dtype, top_k: int) -> PlanCache:
    """As :func:`_known`, while ``torch.jit.trace`` records: what new plans compute would be in the trace."""
    known: _Known | None = vars(experts).get(_NAME)
    if known is None or known.state != state:
        raise UnsupportedProblem(
            type(experts).__name__,
            expected="a model that was called before torch.jit.trace records it",
            got="its first call" if known is None else "parameters of another dtype, device or shape since then",
            hint="call the model once with the inputs that torch.jit.trace gets",
        )
    return known.plans


@torch.compiler.assume_constant_result
def _traced_plans(address: int, state: tuple[Any, ...], x_dtype: torch.dtype, top_k: int) -> PlanCache:
    """As :func:`_known`, while torch compiles. It is called then, and its result is a constant of the graph.

    A graph compiled with it holds for this module only. What it keeps has another name, because torch has noted that
    the module has none of the usual one, and would compile again. The module is handed over by its ``id``, because
    torch 2.11 takes no module here; the call that is traced keeps it alive.
    """
    experts: nn.Module = ctypes.cast(address, ctypes.py_object).value
    known: _Known | None = vars(experts).get(_TRACED)
    if known is None or known.state != state:
        with _disable_current_modes():  # of torch.export: the activation is established with real tensors
            known = _Known(state, _agreed(experts, state, x_dtype, top_k))
        setattr(experts, _TRACED, known)
    return known.plans


@torch.compiler.assume_constant_result
def _say_gradients(where: str) -> None:
    """Say it once, also while torch compiles, which cannot compile logging."""
    _say_once(
        f"{where}: gradients of its parameters are recorded, and polymoe has no backward for them: Transformers' "
        "grouped_mm runs instead. For inference, call the model under torch.no_grad()"
    )


@functools.cache
def _say_once(text: str) -> None:
    log.info(text)


def _note_capture(experts: nn.Module, known: _Known, x: Tensor) -> None:
    """Note where parameters are that a CUDA graph reads; warn once if they have moved since."""
    now = capturing(x)
    if not (now or known.captured):
        return
    addresses = tuple([parameter.data_ptr() for parameter in experts.parameters(recurse=False)])
    if known.captured not in ((), addresses):
        # A replay does not come here, so it cannot be refused. Nor can this call: the graph may be gone.
        warnings.warn(
            f"the parameters of {type(experts).__name__} have moved since a CUDA graph captured it: the graph "
            "reads their former memory; capture it again",
            stacklevel=3,
        )
        known.captured = ()
    if now:
        known.captured = addresses


def capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is captured now, on the stream that computes with ``x``."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _agreed(experts: nn.Module, state: tuple[Any, ...], x_dtype: torch.dtype, top_k: int) -> PlanCache:
    """New plans, after the ranks that share these experts have compared theirs."""
    where, groups = type(experts).__name__, experts.__dict__.get("_polymoe_groups", ())
    try:
        plans = _plans(experts, state, x_dtype, top_k)
    except PolymoeError:
        for group in groups:  # the other ranks wait for this one
            require_agreement(None, group, where)
        raise
    selection = plans.selection(plans.problem.dtype)
    for group in groups:
        require_agreement(selection, group, where)
    selection.require(where)
    return plans


def _autocast(parameter: Tensor) -> Tensor:
    """The parameter as autocast converts it: float32 to autocast's dtype where it is enabled."""
    kind = parameter.device.type
    converted = parameter.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    return parameter.to(torch.get_autocast_dtype(kind)) if converted else parameter


def _views(experts: Any, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Views of the parameters by the natural layout's names: matrices [E, N, K], then biases [E, N]."""
    found = projections(experts, parameters)
    return {name if name.endswith("_bias") else f"{name}.codes": tensor for name, tensor in found.items()}


def _plans(experts: Any, state: tuple[Any, ...], x_dtype: torch.dtype, top_k: int) -> PlanCache:
    where = type(experts).__name__
    first = first_parameter(experts)
    require_known(experts)
    parameters = dict(experts.named_parameters(recurse=False))
    split = [name for name, p in parameters.items() if _mesh(p) is not None]
    if split:
        raise unsupported(f"{where} called with this rank's part of its parameters", f"{split[0]} as a DTensor")
    if any(p.dtype != parameters[first].dtype for p in parameters.values()):
        raise unsupported(f"{where} with parameters of one dtype", ", ".join(str(p.dtype) for p in parameters.values()))
    backend, device = state[0], parameters[first].device
    dtype = next(dtype for name, dtype, *_ in state[1:] if name == first)
    if dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedProblem(
            f"{where}.{first}",
            expected="bfloat16 or float16",
            got=str(dtype),
            hint="load the model with from_pretrained(..., dtype=torch.bfloat16), or call it under "
            f'torch.autocast("{device.type}", dtype=torch.bfloat16)',
        )
    encoding = FORMATS[DTYPES[dtype]].encoding
    views = _views(experts, parameters)
    count, hidden, intermediate = views["down.codes"].shape
    spec = ExpertsSpec(
        hidden=hidden,
        intermediate=intermediate,
        experts=count,
        bias=experts.has_bias,
        gate=encoding if experts.has_gate else None,
        up=encoding,
        down=encoding,
    )
    problem = Problem(spec=spec, activation=activation_of(experts), top_k=top_k, dtype=DTYPES[x_dtype])
    request = PlanRequest(Machine.of(str(device)), "mixed", backend, BACKENDS, LAYOUTS)
    return PlanCache.of(problem, request, Natural().name, tuple((name, dtype) for name in views))
