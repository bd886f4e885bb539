"""A layer's calls: what a call needs but the packed tensors, and the one custom op that runs it in compiled graphs."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from polymoe.backends.base import Backend
from polymoe.errors import ArgumentError, ScaleError
from polymoe.layouts import Layout, Packed
from polymoe.machine import Machine
from polymoe.planning.select import Selection, select
from polymoe.problem import Dtype, Problem
from polymoe.routing import Routing
from polymoe.tensors import ExpertWeights

__all__ = ["DTYPES", "LayerRuntime", "PlanRequest", "on_device"]

log = logging.getLogger("polymoe")

DTYPES: dict[torch.dtype, Dtype] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
"""Dtypes of x, and their names in a Problem."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Tables and wishes that plan a layer, kept to plan again when x comes in another dtype."""

    machine: Machine
    role: str
    backend: str
    backends: Mapping[str, Backend]
    layouts: Mapping[str, Layout]

    def select(self, problem: Problem, layout: str | None = None) -> Selection:
        """The selection for ``problem``, bound to ``layout`` if given."""
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
        """The layer packed as planned, and its problem, with what only reading its scales shows: where the planned
        layout does not hold them, another one does.

        Raises:
            UnsupportedProblem: if nothing, or not the backend that is wished for, runs it here.
        """
        plan = self.select(problem).require(where)
        try:
            packed = self.layouts[plan.layout].pack(weights, device)
        except ScaleError as error:
            log.info("%s: layout %s does not hold it (%s): planned anew", where, plan.layout, error.where)
            packed = None  # what was packed is free before the next layout is
        if packed is None:
            problem = replace(problem, wide_scales=True)
            plan = self.select(problem).require(where)
            packed = self.layouts[plan.layout].pack(weights, device)
        if packed.wide_scales and not problem.wide_scales:
            problem = replace(problem, wide_scales=True)
            self.select(problem, packed.layout).require(where)
        return problem, packed


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU torch's current one: kernels launch there, and it need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class LayerRuntime:
    """All of a layer but its tensors: what a call needs to run on them."""

    def __init__(self, problem: Problem, choice: PlanRequest, layout: str, names: tuple[str, ...], key: str) -> None:
        self.problem, self.choice, self.layout, self.names, self.key = problem, choice, layout, names, key
        self._selections: dict[str, Selection] = {}

    @classmethod
    def of(cls, problem: Problem, choice: PlanRequest, layout: str, names: tuple[str, ...]) -> LayerRuntime:
        """The one that layers like this share."""
        tables = [sorted(map(repr, table.values())) for table in (choice.backends, choice.layouts)]
        about = f"{problem!r} {choice.machine!r} {choice.role} {choice.backend} {tables} {layout} {names}"
        key = hashlib.sha256(about.encode()).hexdigest()[:16]
        calls = _RUNTIMES.get(key) or cls(problem, choice, layout, names, key)
        _RUNTIMES[key] = calls
        return calls

    def selection(self, dtype: Dtype) -> Selection:
        """For the problem with x in ``dtype``, made once: calls only look it up."""
        if dtype not in self._selections:
            self._selections[dtype] = self.choice.select(replace(self.problem, dtype=dtype), self.layout)
        return self._selections[dtype]

    def packed(self, tensors: Sequence[Tensor]) -> Packed:
        """The tensors, in the order of ``names``, as a packed layer."""
        return Packed(self.layout, self.problem.spec, dict(zip(self.names, tensors, strict=True)))

    def run(self, tensors: Sequence[Tensor], x_TH: Tensor, routing: Routing) -> Tensor:
        """The weighted sum, on the planned backend for this token count."""
        out_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
        tokens = x_TH.shape[0]
        if tokens:
            if x_TH.device.type == "cpu":
                low, high = int(routing.topk_ids_TA.min()), int(routing.topk_ids_TA.max())
                experts = self.problem.spec.experts
                if low < -1 or high > experts:
                    raise ArgumentError(
                        "topk_ids_TA",
                        expected=f"0 to {experts - 1}, or -1 or {experts} for none",
                        got=f"{low} to {high}",
                    )
            selection = self.selection(DTYPES[x_TH.dtype])
            step = selection.require().step(tokens)
            packed = self.packed(tensors)
            backend = self.choice.backends[step.backend]
            with on_device(x_TH.device):
                backend.run(selection.problem, packed, x_TH, routing, step.config, out_TH)
        return out_TH


# A compiled graph holds a layer's key as a constant. Equal keys mean equal calls, also in another process.
_RUNTIMES: WeakValueDictionary[str, LayerRuntime] = WeakValueDictionary()


@torch.library.custom_op("polymoe::fused_experts", mutates_args=())
def _fused_experts(
    x_TH: Tensor, topk_ids_TA: Tensor, topk_weights_TA: Tensor, tensors: list[Tensor], key: str
) -> Tensor:
    return _RUNTIMES[key].run(tensors, x_TH, Routing(topk_ids_TA, topk_weights_TA))


@_fused_experts.register_fake
def _(x_TH: Tensor, topk_ids_TA: Tensor, topk_weights_TA: Tensor, tensors: list[Tensor], key: str) -> Tensor:
    return torch.empty_like(x_TH, memory_format=torch.contiguous_format)
