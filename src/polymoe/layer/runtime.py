"""Runs the calls of a layer: plans for each dtype of x, runners bound to the packed tensors, and custom ops for
``torch.compile``."""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from polymoe.backends.base import Backend, Runner
from polymoe.backends.config import Config
from polymoe.errors import ArgumentError, PlanError
from polymoe.layouts import Layout, Packed
from polymoe.layouts.pack_check import pack_checked, require_input_scales
from polymoe.layouts.staging import kept, ordinary_tensors
from polymoe.machine import Machine
from polymoe.planning.select import select
from polymoe.planning.selection import Selection
from polymoe.problem import Dtype, Problem
from polymoe.problem.call import DTYPES, CallArguments, no_gradient
from polymoe.problem.scale_range import measure_scales
from polymoe.problem.tensors import ExpertWeights
from polymoe.problem.verdict import Accepted


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The arguments of a layer's plans, kept in order to plan again when x has another dtype. Each problem is planned
    once: a plan takes as long as to pack a layer, and a model has many layers of one kind."""

    machine: Machine
    role: str
    backend: str
    backends: Mapping[str, Backend]
    layouts: Mapping[str, Layout]
    _made: dict[tuple[Problem, str | None], Selection] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def select(self, problem: Problem, layout: str | None = None) -> Selection:
        """Return the selection for ``problem``, restricted to ``layout`` if given."""
        key = problem, layout
        if key not in self._made:
            self._made[key] = select(
                problem,
                self.machine,
                role=self.role,
                backend=self.backend,
                layout=layout,
                backends=self.backends,
                layouts=self.layouts,
            )
        return self._made[key]

    def pack(
        self, problem: Problem, weights: ExpertWeights, device: torch.device, where: str, *, check: bool = True
    ) -> tuple[Problem, Packed]:
        """Measure the range of the scales, plan, and pack the layer; with ``check``, compare the packed bytes.

        Returns:
            The problem with the range of its scales, and the packed layer on ``device``.

        Raises:
            CheckpointError: if static input scales are missing.
            UnsupportedProblem: if no backend, or not the requested one, runs the problem on this machine.
            FormatError, VerificationError: as :func:`polymoe.layouts.pack_check.pack_checked`.
        """
        if problem.activations.static:
            require_input_scales(weights, where)
        weights = kept(weights)
        problem = replace(problem, scales=measure_scales(weights, device, where))
        plan = self.select(problem).require(where)
        return problem, pack_checked(self.layouts[plan.layout], weights, device, where, compare=check)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which ``device`` is torch's current GPU: kernels and other libraries use the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


class PlanCache:
    """Plans by dtype of x, shared by all layers with the same problem, request, layout and tensors.

    A compiled graph contains :attr:`key` as a constant. It depends on the names and classes of backends and layouts, so
    that it is the same in another process.
    """

    def __init__(self, problem: Problem, request: PlanRequest, layout: str, parts: _Parts, key: str) -> None:
        self.problem, self.request, self.layout, self.parts, self.key = problem, request, layout, parts, key
        self.names = tuple(name for name, _ in parts)
        self._entries = _entries(request)
        self._layers: WeakValueDictionary[tuple[int, ...], LayerRuntime] = WeakValueDictionary()

    @classmethod
    def of(cls, problem: Problem, request: PlanRequest, layout: str, parts: _Parts) -> PlanCache:
        """Return the shared instance for these arguments; create it if there is none."""
        entries = _entries(request)
        kinds = [[(name, type(e).__module__, type(e).__qualname__) for name, e in table] for table in entries]
        about = f"{problem!r} {request.machine!r} {request.role} {request.backend} {kinds} {layout} {parts}"
        key = digest = hashlib.sha256(about.encode()).hexdigest()[:16]
        numbers = count(1)
        with _LOCK:
            while (found := _CACHES.get(key)) is not None and found._entries != entries:
                key = f"{digest}.{next(numbers)}"  # others have these names and classes
            if found is None:
                found = _CACHES[key] = cls(problem, request, layout, parts, key)
            return found

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanCache.of, (self.problem, self.request, self.layout, self.parts)

    def __deepcopy__(self, memo: object) -> PlanCache:
        return self

    def on(self, request: PlanRequest) -> PlanCache:
        """Return the shared instance for another machine."""
        return PlanCache.of(self.problem, request, self.layout, self.parts)

    def selection(self, dtype: Dtype) -> Selection:
        """Return the selection for x in ``dtype``, which the request makes once."""
        return self.request.select(replace(self.problem, dtype=dtype), self.layout)

    def packed(self, tensors: Sequence[Tensor]) -> Packed:
        """Return the tensors, given in the order of ``names``, as a packed layer."""
        return Packed(self.layout, self.problem.spec, dict(zip(self.names, tensors, strict=True)))

    def layer(self, tensors: Sequence[Tensor]) -> LayerRuntime:
        """Return the runtime at the addresses of these tensors. There is one, so that all who call it, copies of a
        module and compiled graphs too, know of an update that failed. Only a weak reference is kept."""
        addresses = _addresses(tensors)
        with _LOCK:
            found = self._layers.get(addresses)
            # After an assignment to ``.data`` the old addresses may belong to other tensors.
            if found is None or _addresses(found.tensors) != addresses:
                found = self._layers[addresses] = LayerRuntime(self, tensors)
            return found


_Parts = tuple[tuple[str, torch.dtype], ...]
"""Names and dtypes of packed tensors."""

_CACHES: WeakValueDictionary[str, PlanCache] = WeakValueDictionary()
_IN_GRAPHS: set[PlanCache] = set()
"""Those whose keys are in graphs, which may be called when no layer is left that holds them."""

_LOCK = threading.RLock()


def _entries(request: PlanRequest) -> tuple[tuple[tuple[str, Any], ...], ...]:
    return tuple(request.backends.items()), tuple(request.layouts.items())


def _addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple([t.data_ptr() for t in tensors])


@dataclass(frozen=True, slots=True)
class BoundStep:
    """The runner and configuration for calls of up to ``max_tokens`` tokens (None: any number)."""

    max_tokens: int | None
    backend: str
    runner: Runner
    config: Config


class LayerRuntime:
    """One layer's packed tensors, and the runners bound to them.

    Attributes:
        plans: the plans of the layer.
        tensors: the packed tensors, in the order of ``plans.names``.
        addresses: where the tensors were when the runners were bound; runners are stale where they are elsewhere.
        device: the device of all of them.
        incomplete: whether an update of the tensors has failed or has not finished, so that calls raise.
        in_flight: threads that are in a call.
        reads: how often experts were read from the tensors, by whatever thread.
    """

    def __init__(self, plans: PlanCache, tensors: Sequence[Tensor]) -> None:
        self.plans, self.incomplete, self.in_flight, self.reads = plans, False, set[int](), 0
        with ordinary_tensors():  # views that an update may write to
            self.tensors = [t.view(dtype) for t, (_, dtype) in zip(tensors, plans.parts, strict=True)]
        self.addresses, self.device = _addresses(tensors), tensors[0].device
        self._runners: dict[str, Runner] = {}
        self._steps: dict[torch.dtype, tuple[list[float], list[BoundStep]]] = {}

    def steps(self, dtype: torch.dtype) -> list[BoundStep]:
        """Return the steps of the plan for x in ``dtype``, with runners bound to the packed tensors.

        Raises:
            UnsupportedProblem: if no backend runs the problem on this device.
        """
        return (self._steps.get(dtype) or self._bind(dtype))[1]

    def _bind(self, dtype: torch.dtype) -> tuple[list[float], list[BoundStep]]:
        plan, packed = self.plans.selection(DTYPES[dtype]).require(), self.plans.packed(self.tensors)
        runners, backends = self._runners, self.plans.request.backends
        with on_device(self.device):
            for step in plan.steps:
                if step.backend not in runners:  # a runner serves every dtype
                    runners[step.backend] = backends[step.backend].bind(self.plans.problem, packed)
        bounds = [float("inf") if step.max_tokens is None else step.max_tokens for step in plan.steps]
        steps = [BoundStep(step.max_tokens, step.backend, runners[step.backend], step.config) for step in plan.steps]
        self._steps[dtype] = bounds, steps
        return bounds, steps

    def step(self, dtype: torch.dtype, tokens: int) -> BoundStep:
        """Return the step for a call of ``tokens`` tokens.

        Raises:
            PlanError: if the last step of the plan serves fewer tokens.
        """
        bounds, steps = self._steps.get(dtype) or self._bind(dtype)
        at = bisect_left(bounds, tokens)
        if at == len(steps):
            self.plans.selection(DTYPES[dtype]).require().step(tokens)  # raises
        return steps[at]

    def run(self, call: CallArguments) -> Tensor:
        """Run the planned backend for this token count and return the weighted sum, [T, H].

        :meth:`CallArguments.check` has checked the arguments.

        Raises:
            ArgumentError: if the workspace is too small, the backend does not support an option, or, on a CPU, an id
                or a place of an expert is out of range.
            PlanError: if the tensors are :attr:`incomplete`, or the plan serves fewer tokens.
            UnsupportedProblem: if an argument requires a gradient for which the backend has no backward.
        """
        thread = threading.get_ident()
        self.in_flight.add(thread)  # before it looks: an update says that it has begun, then waits for these
        try:
            if self.incomplete:
                raise incomplete_update()
            return self._run(call)
        finally:
            self.in_flight.discard(thread)

    def _run(self, call: CallArguments) -> Tensor:
        if not call.x_TH.shape[0]:
            return self._with_out(call).out_TH
        call, step = self.planned(call)
        with on_device(self.device):
            step.runner.run(call, step.config)
        return call.out_TH

    def planned(self, call: CallArguments) -> tuple[CallArguments, BoundStep]:
        """Return a call of at least one token, with ``out``, and the step that runs it; raises as :meth:`run`."""
        problem = self.plans.problem
        if self.device.type == "cpu":
            call.check_values(problem)
        dtype = call.out_dtype(problem)
        step = self.step(dtype, call.x_TH.shape[0])
        if call.requires_grad:
            self._require_gradients(step, call, DTYPES[dtype])
        if call.workspace is not None or call.x_scales is not None or call.expert_map is not None:
            _require_options(step, call)
        return self._with_out(call), step

    def _with_out(self, call: CallArguments) -> CallArguments:
        if call.out is not None:
            return call
        dtype = call.out_dtype(self.plans.problem)
        return call._replace(out=torch.empty_like(call.x_TH, dtype=dtype, memory_format=torch.contiguous_format))

    def _require_gradients(self, step: BoundStep, call: CallArguments, dtype: Dtype) -> None:
        accepted = [c.backend for c in self.plans.selection(dtype).candidates if isinstance(c.verdict, Accepted)]
        given = {name: self.plans.request.backends[name].gradients(self.plans.problem) for name in accepted}
        needed = call.requiring_gradients()
        missing = [name for name in needed if name not in given[step.backend]]
        if missing:
            others = [f'load with backend="{name}"' for name, names in given.items() if names.issuperset(needed)]
            hint = " or ".join(["call under torch.no_grad()", *others])
            raise no_gradient(missing[0], f"backend {step.backend!r}", hint)


def compiled_call(plans: PlanCache, tensors: list[Tensor], call: CallArguments) -> Tensor:
    """Return the result of a call in the graph that torch is compiling, as a node of this graph.

    The node raises when it runs if an argument requires a gradient: torch.compile cannot raise while it traces, and
    would no longer compile this function.

    Raises:
        ArgumentError: if the shape, dtype or device of an argument is wrong.
    """
    call.check(plans.problem, tensors[0].device)
    call, refused = call.without_gradients()
    x_TH, ids_TA, weights_TA, out_TH, workspace, x_scales, expert_map = call
    given = (x_TH, ids_TA, weights_TA, tensors, plans.key)
    if out_TH is None:  # its memory, and the workspace's, is the graph's
        return torch.ops.polymoe.fused_experts(*given, x_scales, expert_map, refused)
    torch.ops.polymoe.fused_experts_out(out_TH, *given, workspace, x_scales, expert_map, refused)
    return out_TH


def incomplete_update() -> PlanError:
    """Return the error of a call of a layer whose packed tensors hold parts of two updates."""
    return PlanError(
        "experts",
        expected="weights of one whole update",
        got="a mixture, because an update failed or has not finished",
        hint="call update again, with weights that can be read, or load the layer again",
    )


def _require_options(step: BoundStep, call: CallArguments) -> None:
    """Raise ArgumentError if the runner does not support an option that is given, or the workspace is too small."""
    for name in ("workspace", "x_scales", "expert_map"):
        tensor = getattr(call, name)
        if tensor is not None and name not in step.runner.options:
            raise ArgumentError(
                name,
                expected=f"none: backend {step.backend!r} does not support it",
                got=f"a tensor {list(tensor.shape)}",
                hint="choose a backend that supports it with backend=...",
            )
    if call.workspace is not None:
        tokens, top_k = call.topk_ids_TA.shape
        least, got = step.runner.workspace_bytes(tokens, top_k, step.config), call.workspace.numel()
        if got < least:
            hint = "experts.workspace_bytes(tokens, top_k) returns the size"
            raise ArgumentError("workspace", expected=f"at least {least} bytes", got=str(got), hint=hint)


def refuse_gradient(argument: str) -> None:
    """Raise UnsupportedProblem in a node of a compiled graph, for the argument that requires one, if any."""
    if argument:
        hint = 'call under torch.no_grad(), or outside torch.compile with backend="reference"'
        raise no_gradient(argument, "a compiled graph", hint)


def _run_node(key: str, tensors: list[Tensor], call: CallArguments, refused: str) -> Tensor:
    refuse_gradient(refused)
    return _plans_of(key).layer(tensors).run(call)


def _plans_of(key: str) -> PlanCache:
    found = _CACHES.get(key)
    if found is None:
        raise PlanError(
            "a graph that calls packed experts",
            expected="experts of the same problem and layout, loaded in this process",
            got=f"none with key {key}",
            hint="load the experts as before the export, with polymoe.load_experts, before the graph runs",
        )
    return found


@torch.library.custom_op("polymoe::fused_experts", mutates_args=())
def _fused_experts(
    x_TH: Tensor,
    topk_ids_TA: Tensor,
    topk_weights_TA: Tensor,
    tensors: list[Tensor],
    key: str,
    x_scales: Tensor | None = None,
    expert_map: Tensor | None = None,
    refused: str = "",
) -> Tensor:
    call = CallArguments(x_TH, topk_ids_TA, topk_weights_TA, x_scales=x_scales, expert_map=expert_map)
    return _run_node(key, tensors, call, refused)


@_fused_experts.register_fake
def _(
    x_TH: Tensor,
    topk_ids_TA: Tensor,
    topk_weights_TA: Tensor,
    tensors: list[Tensor],
    key: str,
    x_scales: Tensor | None = None,
    expert_map: Tensor | None = None,
    refused: str = "",
) -> Tensor:
    plans = _plans_of(key)
    _IN_GRAPHS.add(plans)
    dtype = CallArguments(x_TH, topk_ids_TA, topk_weights_TA, x_scales=x_scales).out_dtype(plans.problem)
    return torch.empty_like(x_TH, dtype=dtype, memory_format=torch.contiguous_format)


def _refuse_gradients(ctx: object, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Torch calls it where gradients are recorded and an input requires one, as in a graph that was exported before."""
    x_TH, ids_TA, weights_TA, tensors, key, x_scales, *_ = inputs
    names = CallArguments(x_TH, ids_TA, weights_TA, x_scales=x_scales).requiring_gradients()
    _run_node(key, tensors, CallArguments(x_TH, ids_TA, weights_TA), names[0] if names else "packed experts")


def _no_backward(ctx: object, gradient: Tensor) -> None:
    raise AssertionError


_fused_experts.register_autograd(_no_backward, setup_context=_refuse_gradients)


@torch.library.custom_op("polymoe::fused_experts_out", mutates_args=("out_TH", "workspace"))
def _fused_experts_out(
    out_TH: Tensor,
    x_TH: Tensor,
    topk_ids_TA: Tensor,
    topk_weights_TA: Tensor,
    tensors: list[Tensor],
    key: str,
    workspace: Tensor | None,  # no default: torch 2.11 looks for an argument that is written at its place
    x_scales: Tensor | None = None,
    expert_map: Tensor | None = None,
    refused: str = "",
) -> None:
    call = CallArguments(x_TH, topk_ids_TA, topk_weights_TA, out_TH, workspace, x_scales, expert_map)
    _run_node(key, tensors, call, refused)


@_fused_experts_out.register_fake
def _(
    out_TH: Tensor,
    x_TH: Tensor,
    topk_ids_TA: Tensor,
    topk_weights_TA: Tensor,
    tensors: list[Tensor],
    key: str,
    *_: object,
) -> None:
    _IN_GRAPHS.add(_plans_of(key))
