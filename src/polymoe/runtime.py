"""Runs the calls of a layer: plans for each dtype of x, runners bound to the packed tensors, and custom ops for
``torch.compile``."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from polymoe.backends.base import Backend, Runner
from polymoe.backends.config import Config
from polymoe.errors import ArgumentError
from polymoe.layouts import Layout, Packed
from polymoe.machine import Machine
from polymoe.planning.select import select
from polymoe.planning.selection import Selection
from polymoe.problem import Dtype, Problem
from polymoe.routing import Routing
from polymoe.scale_range import measure_scales
from polymoe.tensors import ExpertWeights

__all__ = ["DTYPES", "TORCH_DTYPES", "BoundStep", "LayerRuntime", "PlanCache", "PlanRequest", "check_call", "on_device"]

DTYPES: dict[torch.dtype, Dtype] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
"""Names in a Problem of the dtypes of x."""

TORCH_DTYPES: dict[Dtype, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}
"""The inverse of :data:`DTYPES`."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The arguments of a layer's plans, kept in order to plan again when x has another dtype."""

    machine: Machine
    role: str
    backend: str
    backends: Mapping[str, Backend]
    layouts: Mapping[str, Layout]

    def select(self, problem: Problem, layout: str | None = None) -> Selection:
        """Return the selection for ``problem``, restricted to ``layout`` if given."""
        return select(
            problem,
            self.machine,
            role=self.role,
            backend=self.backend,
            layout=layout,
            backends=self.backends,
            layouts=self.layouts,
        )

    def pack(
        self, problem: Problem, weights: ExpertWeights, device: torch.device, where: str
    ) -> tuple[Problem, Packed]:
        """Measure the range of the scales, plan, and pack the layer.

        Returns:
            The problem with the range of its scales, and the packed layer on ``device``.

        Raises:
            UnsupportedProblem: if no backend, or not the requested one, runs the problem on this machine.
        """
        problem = replace(problem, scales=measure_scales(weights, device))
        plan = self.select(problem).require(where)
        return problem, self.layouts[plan.layout].pack(weights, device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which ``device`` is torch's current GPU, because kernels launch on the current GPU."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


class PlanCache:
    """Selections by dtype of x, shared by all layers with the same problem, request, layout and tensor names.

    A compiled graph contains :attr:`key` as a constant. Equal keys mean equal plans, also in another process.
    """

    def __init__(self, problem: Problem, request: PlanRequest, layout: str, names: tuple[str, ...], key: str) -> None:
        self.problem, self.request, self.layout, self.names, self.key = problem, request, layout, names, key
        self._selections: dict[str, Selection] = {}
        self._layers: WeakValueDictionary[tuple[int, ...], LayerRuntime] = WeakValueDictionary()

    @classmethod
    def of(cls, problem: Problem, request: PlanRequest, layout: str, names: tuple[str, ...]) -> PlanCache:
        """Return the shared instance for these arguments; create it if there is none."""
        tables = [sorted(map(repr, table.values())) for table in (request.backends, request.layouts)]
        about = f"{problem!r} {request.machine!r} {request.role} {request.backend} {tables} {layout} {names}"
        key = hashlib.sha256(about.encode()).hexdigest()[:16]
        found = _CACHES.get(key) or cls(problem, request, layout, names, key)
        _CACHES[key] = found
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanCache.of, (self.problem, self.request, self.layout, self.names)

    def selection(self, dtype: Dtype) -> Selection:
        """Return the selection for x in ``dtype``. It is made once; later calls look it up."""
        if dtype not in self._selections:
            self._selections[dtype] = self.request.select(replace(self.problem, dtype=dtype), self.layout)
        return self._selections[dtype]

    def packed(self, tensors: Sequence[Tensor]) -> Packed:
        """Return the tensors, given in the order of ``names``, as a packed layer."""
        return Packed(self.layout, self.problem.spec, dict(zip(self.names, tensors, strict=True)))

    def layer(self, tensors: Sequence[Tensor]) -> LayerRuntime:
        """Return the runtime bound to these tensors: that of an existing layer, else a new one."""
        addresses = tuple(t.data_ptr() for t in tensors)
        return self._layers.get(addresses) or LayerRuntime(self, tensors)

    def add(self, layer: LayerRuntime) -> None:
        """Register ``layer`` for :meth:`layer`; only a weak reference is kept."""
        self._layers[tuple(t.data_ptr() for t in layer.tensors)] = layer


_CACHES: WeakValueDictionary[str, PlanCache] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class BoundStep:
    """The runner and configuration for calls of up to ``max_tokens`` tokens (None: any number)."""

    max_tokens: int | None
    backend: str
    runner: Runner
    config: Config


class LayerRuntime:
    """One layer's packed tensors, and the runners bound to them."""

    def __init__(self, plans: PlanCache, tensors: Sequence[Tensor]) -> None:
        self.plans, self.tensors, self.device = plans, list(tensors), tensors[0].device
        self._runners: dict[str, Runner] = {}
        self._steps: dict[torch.dtype, tuple[list[float], list[BoundStep]]] = {}

    def holds(self, tensors: Sequence[Tensor | None]) -> bool:
        """Return whether these are the tensors that the runners are bound to."""
        return all(mine is given for mine, given in zip(self.tensors, tensors, strict=True))

    def steps(self, dtype: torch.dtype) -> list[BoundStep]:
        """Return the steps of the plan for x in ``dtype``, with runners bound to the packed tensors.

        Raises:
            UnsupportedProblem: if no backend runs the problem on this device.
        """
        return (self._steps.get(dtype) or self._bind(dtype))[1]

    def _bind(self, dtype: torch.dtype) -> tuple[list[float], list[BoundStep]]:
        plan, packed = self.plans.selection(DTYPES[dtype]).require(), self.plans.packed(self.tensors)
        runners = self._runners
        for step in plan.steps:
            if step.backend not in runners:  # a runner serves every dtype
                runners[step.backend] = self.plans.request.backends[step.backend].bind(self.plans.problem, packed)
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

    def run(
        self,
        x_TH: Tensor,
        ids_TA: Tensor,
        weights_TA: Tensor,
        out_TH: Tensor | None = None,
        workspace: Tensor | None = None,
        x_scales: Tensor | None = None,
        expert_map: Tensor | None = None,
    ) -> Tensor:
        """Run the planned backend for this token count and return the weighted sum, [T, H].

        :meth:`polymoe.experts.FusedExperts.forward` checks the arguments beforehand.

        Raises:
            ArgumentError: if the workspace is too small, the backend does not support an option, or, on a CPU, an id
                is out of range.
        """
        dtype = x_TH.dtype if x_scales is None else TORCH_DTYPES[self.plans.problem.dtype]
        if out_TH is None:
            out_TH = torch.empty_like(x_TH, dtype=dtype, memory_format=torch.contiguous_format)
        tokens = x_TH.shape[0]
        if not tokens:
            return out_TH
        if self.device.type == "cpu":
            experts = self.plans.problem.spec.experts if expert_map is None else len(expert_map)
            _require_ids(ids_TA, experts)
        step = self.step(dtype, tokens)
        options = {}
        if workspace is not None or x_scales is not None or expert_map is not None:
            options = _options(step, workspace=workspace, x_scales=x_scales, expert_map=expert_map)
            if workspace is not None:
                least = step.runner.workspace_bytes(tokens, ids_TA.shape[1], step.config)
                if workspace.numel() < least:
                    raise ArgumentError(
                        "workspace", expected=f"at least {least} bytes", got=str(workspace.numel()),
                        hint="experts.workspace_bytes(tokens, top_k) returns the size",
                    )  # fmt: skip
        with on_device(self.device):
            step.runner.run(x_TH, Routing(ids_TA, weights_TA), step.config, out_TH, **options)
        return out_TH


def check_call(
    problem: Problem,
    device: torch.device,
    x_TH: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    out_TH: Tensor | None = None,
    workspace: Tensor | None = None,
    x_scales: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> None:
    """Check the arguments of :meth:`polymoe.experts.FusedExperts.forward` that do not depend on the backend.

    Raises:
        ArgumentError: if the shape, dtype or device of an argument is wrong; the error names the argument.
    """
    hidden, shape, ids_shape = problem.spec.hidden, x_TH.shape, ids_TA.shape
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES) if x_scales is None else (torch.float8_e4m3fn,)
    if len(shape) != 2 or shape[1] != hidden:
        raise ArgumentError("x_TH", expected=f"[T, {hidden}]", got=str(list(shape)))
    if x_TH.dtype not in dtypes:
        expected = "bfloat16, float16 or float32" if x_scales is None else "float8_e4m3fn, as x_scales is given"
        raise ArgumentError("x_TH", expected=expected, got=str(x_TH.dtype))
    tokens = shape[0]
    for name, tensor, dtypes in (
        ("topk_ids_TA", ids_TA, (torch.int32, torch.int64)),
        ("topk_weights_TA", weights_TA, (torch.float32,)),
    ):
        if tensor.dtype not in dtypes:
            raise ArgumentError(name, expected=" or ".join(map(str, dtypes)), got=str(tensor.dtype))
        own = tensor.shape
        if len(own) != 2 or own[0] != tokens or own[1] < 1 or own != ids_shape:
            raise ArgumentError(name, expected=f"[{tokens}, A], the same for ids and weights", got=str(list(own)))
        if tensor.device != x_TH.device:
            raise ArgumentError(name, expected=f"on {x_TH.device}, like x", got=str(tensor.device))
    if x_TH.device != device:
        raise ArgumentError("x_TH", expected=f"on {device}, like the packed experts", got=str(x_TH.device))
    if out_TH is not None:
        dtype = x_TH.dtype if x_scales is None else TORCH_DTYPES[problem.dtype]
        _require("out", out_TH, device, (dtype,), list(shape))
    if workspace is not None:
        _require("workspace", workspace, device, (torch.uint8,), [workspace.numel()])
    if x_scales is not None:
        groups = problem.activations.scales_per_row(hidden)
        if groups is None:
            raise ArgumentError(
                "x_scales",
                expected="none: the experts do not quantize their inputs dynamically",
                got=f"a tensor {list(x_scales.shape)}",
                hint='load them with activations="fp8_token" or "fp8_group128"',
            )
        _require("x_scales", x_scales, device, (torch.float32,), [tokens, groups])
    if expert_map is not None:
        _require("expert_map", expert_map, device, (torch.int32, torch.int64), [expert_map.numel()])


def _require(
    name: str, tensor: Tensor, device: torch.device, dtypes: tuple[torch.dtype, ...], shape: list[int]
) -> None:
    """Raise ArgumentError unless the tensor is contiguous and has this shape, this device and one of these dtypes."""
    if tensor.dtype not in dtypes:
        raise ArgumentError(name, expected=" or ".join(map(str, dtypes)), got=str(tensor.dtype))
    if list(tensor.shape) != shape:
        raise ArgumentError(name, expected=str(shape), got=str(list(tensor.shape)))
    if tensor.device != device:
        raise ArgumentError(name, expected=f"on {device}, like the packed experts", got=str(tensor.device))
    if not tensor.is_contiguous():
        raise ArgumentError(name, expected="a contiguous tensor", got=f"strides {list(tensor.stride())}")


def _require_ids(ids_TA: Tensor, experts: int) -> None:
    low, high = int(ids_TA.min()), int(ids_TA.max())
    if low < -1 or high > experts:
        expected = f"0 to {experts - 1}, or -1 or {experts} for none"
        raise ArgumentError("topk_ids_TA", expected=expected, got=f"{low} to {high}")


def _options(step: BoundStep, **given: Tensor | None) -> dict[str, Tensor]:
    """Return the options that are not None; raise ArgumentError if the runner does not support one of them."""
    for name, value in given.items():
        if value is not None and name not in step.runner.options:
            raise ArgumentError(
                name,
                expected=f"none: backend {step.backend!r} does not support it",
                got=f"a tensor {list(value.shape)}",
                hint="choose a backend that supports it with backend=...",
            )
    return {name: value for name, value in given.items() if value is not None}


@torch.library.custom_op("polymoe::fused_experts", mutates_args=())
def _fused_experts(
    x_TH: Tensor,
    topk_ids_TA: Tensor,
    topk_weights_TA: Tensor,
    tensors: list[Tensor],
    key: str,
    x_scales: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> Tensor:
    layer = _CACHES[key].layer(tensors)
    return layer.run(x_TH, topk_ids_TA, topk_weights_TA, x_scales=x_scales, expert_map=expert_map)


@_fused_experts.register_fake
def _(
    x_TH: Tensor,
    topk_ids_TA: Tensor,
    topk_weights_TA: Tensor,
    tensors: list[Tensor],
    key: str,
    x_scales: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> Tensor:
    dtype = x_TH.dtype if x_scales is None else TORCH_DTYPES[_CACHES[key].problem.dtype]
    return torch.empty_like(x_TH, dtype=dtype, memory_format=torch.contiguous_format)


@torch.library.custom_op("polymoe::fused_experts_out", mutates_args=("out_TH", "workspace"))
def _fused_experts_out(
    out_TH: Tensor,
    x_TH: Tensor,
    topk_ids_TA: Tensor,
    topk_weights_TA: Tensor,
    tensors: list[Tensor],
    key: str,
    workspace: Tensor | None = None,
    x_scales: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> None:
    _CACHES[key].layer(tensors).run(x_TH, topk_ids_TA, topk_weights_TA, out_TH, workspace, x_scales, expert_map)


@_fused_experts_out.register_fake
def _(*args: object, **kwargs: object) -> None:
    return None
