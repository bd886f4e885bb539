"""What is checked of a layer when it is loaded: a few of its experts, on every backend of its plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polymoe.backends.base import inputs_of
from polymoe.backends.reference import run_experts
from polymoe.errors import PlanError, VerificationError
from polymoe.layer.runtime import LayerRuntime, on_device
from polymoe.layouts import Layout, Packed
from polymoe.layouts.pack_check import require_input_scales, up_to_four
from polymoe.layouts.staging import INPUT_SCALES
from polymoe.problem import Problem
from polymoe.problem.call import TORCH_DTYPES, CallArguments
from polymoe.problem.numerics import relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.scale_range import ScaleRange, measure_scales
from polymoe.problem.tensors import Expert, ExpertWeights

log = logging.getLogger("polymoe")


@torch.no_grad()
def check_layer(layer: LayerRuntime, problem: Problem, weights: ExpertWeights, where: str) -> None:
    """Compare up to four experts with the float32 reference, on every backend of the plan.

    Args:
        layer: the packed layer, bound.
        problem: what it computes.
        weights: what was packed.
        where: the layer's name for the message.

    Raises:
        VerificationError: naming backend, layer and error.
    """
    spec, device = problem.spec, layer.device
    local = up_to_four(spec.local_experts)
    dtype = TORCH_DTYPES[problem.dtype]
    steps = layer.steps(dtype)
    most = max(step.config.check_tokens for step in steps)
    # Explicit: engines load models with another default dtype, and programs may set another default device.
    cpu: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "generator": torch.Generator("cpu").manual_seed(0)}
    x_TH = torch.randn(most, spec.hidden, **cpu).to(dtype)
    ids = [spec.first_expert + local[i % len(local)] for i in range(most * 2)]
    ids_TA = torch.tensor(ids, device="cpu").view(most, 2)
    weights_TA = torch.rand(most, 2, **cpu) + 0.5
    modes = dict.fromkeys(inputs_of(problem, step.config) for step in steps)
    expected = {
        mode: _expected(replace(problem, activations=mode), weights, x_TH, Routing(ids_TA, weights_TA), device)
        for mode in modes
    }
    if not all(bool(torch.isfinite(result).all()) for result in expected.values()):
        raise VerificationError(
            f"{where}, experts {', '.join(str(spec.first_expert + e) for e in local)}",
            expected="finite results in float32",
            got="NaN or infinity",
            hint="weights or scales are far too large: the files are damaged, or converted wrongly",
        )
    routing = Routing(ids_TA.to(device), weights_TA.to(device))
    for step in steps:
        rows = min(step.config.check_tokens, step.max_tokens or most)
        x, some = x_TH[:rows].to(device), Routing(*(part[:rows] for part in routing))
        got = torch.empty_like(x)
        with on_device(device):
            step.runner.run(CallArguments(x, *some, got), step.config)
        mode = inputs_of(problem, step.config)
        error = relative_error(got.cpu(), expected[mode][:rows])
        if not error <= mode.tolerance:  # NaN fails too
            raise VerificationError(
                f"{where}, backend {step.backend!r} ({step.config}), layout {layer.plans.layout!r}",
                expected=f"a relative error of at most {mode.tolerance:g} against the reference",
                got=f"{error:.3g}",
                hint="this is a bug: report it with this message, and load with another backend meanwhile",
            )


def _expected(problem: Problem, weights: ExpertWeights, x_TH: Tensor, routing: Routing, device: torch.device) -> Tensor:
    """What the reference computes, float32 on the CPU: in milliseconds on a GPU, if it has memory for a matrix.

    There in float64, since torch may have been told to compute float32 products in TF32.
    """

    def run(device: torch.device, dtype: torch.dtype) -> Tensor:
        here = ExpertWeights(weights.spec, lambda e: weights.expert(e).to(device))
        inputs = x_TH.to(device), Routing(*(part.to(device) for part in routing))
        return run_experts(problem, here, *inputs, dtype).float().cpu()

    if device.type != "cpu":
        try:
            return run(device, torch.float64)
        except torch.OutOfMemoryError:
            log.debug("no memory on %s for the reference: it runs on the CPU", device)
    return run(torch.device("cpu"), torch.float32)


@torch.no_grad()
def require_planned(
    problem: Problem,
    weights: ExpertWeights,
    device: torch.device,
    where: str,
    hint: str,
    present: tuple[Layout, Packed] | None = None,
) -> bool:
    """Refuse weights that cannot take the place of those that a layer was planned for, before they are packed.

    Every expert is read once, of a checkpoint's files only the scales of 4-bit weights.

    Args:
        problem: the problem of the layer, with the range of its scales.
        weights: the new weights.
        device: where the layer is.
        where: its name for the message.
        hint: what the user can do.
        present: the layer's layout and tensors, if the new weights are to be packed into them.

    Returns:
        Whether this thread reads the new weights from these tensors, so that packing into them would change them.

    Raises:
        PlanError: if their spec differs, their scales reach further, or they have input scales or dtypes of biases for
            which the present tensors have no place.
        FormatError: for a scale that is NaN.
        CheckpointError: if static input scales are missing.
    """
    if weights.spec != problem.spec:
        raise PlanError(where, expected=str(problem.spec), got=str(weights.spec), hint=hint)
    watched = _Watched(weights, present, where, hint)
    weights = replace(weights, read_unchecked=watched.peek)
    with watched:
        found, planned = measure_scales(weights, device, where), problem.scales or ScaleRange()
        if problem.activations.static:
            require_input_scales(weights, where)
        for e in set(range(weights.spec.local_experts)) - watched.seen:
            watched.peek(e)
    if found is not None and not planned.covers(found):
        hint = f"{hint}: the layout was chosen by the range of the scales"
        raise PlanError(where, expected=str(planned), got=str(found), hint=hint)
    return watched.touched


class _Watched(TorchDispatchMode):
    """Reads experts for :func:`require_planned`, and notes whether that reads the packed tensors.

    An expert may be a view of them, or computed from them, whoever wrote the function that reads it.
    """

    def __init__(self, weights: ExpertWeights, present: tuple[Layout, Packed] | None, where: str, hint: str) -> None:
        super().__init__()
        self._weights, self._where, self._hint = weights, where, hint
        self.seen: set[int] = set()
        self.touched = False
        self._tensors: Mapping[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        if present is not None:
            layout, packed = present
            self._tensors = packed.tensors
            self._dtypes = {name: part.dtype for name, part in layout.unpack(packed).peek(0).parts().items()}
        self._storages = {_storage(t) for t in self._tensors.values()} - {0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.touched:
            leaves = tree_leaves((args, kwargs))
            self.touched = any(_storage(leaf) in self._storages for leaf in leaves if isinstance(leaf, Tensor))
        return func(*args, **(kwargs or {}))

    def peek(self, e: int) -> Expert:
        expert = self._weights.peek(e)
        self.seen.add(e)
        if not self._tensors:
            return expert
        for name, part in expert.parts().items():
            self.touched |= _storage(part) in self._storages
            got = part.dtype
            wanted = self._dtypes.get(name)
            if wanted is None and name in INPUT_SCALES and name in self._tensors:
                wanted = self._tensors[name].dtype  # expert 0 has none
            if got != wanted:
                raise PlanError(
                    f"{self._where}, expert {self._weights.spec.first_expert + e} {name}",
                    expected="none, as in the packed experts" if wanted is None else str(wanted),
                    got=str(got),
                    hint=self._hint,
                )
        missing = self._dtypes.keys() - expert.parts().keys() - INPUT_SCALES
        if missing:
            raise PlanError(
                f"{self._where}, expert {self._weights.spec.first_expert + e}",
                expected=", ".join(sorted(missing)),
                got="none",
                hint=self._hint,
            )
        return expert


def _storage(tensor: Tensor) -> int:
    """The address of what a tensor is a view of; 0 for none."""
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
