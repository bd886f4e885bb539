"""What is checked of a layer when it is loaded: a few of its experts, on every backend of its plan."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polymoe.backends.base import inputs_of
from polymoe.backends.reference import run_experts
from polymoe.errors import PlanError, VerificationError
from polymoe.layer.runtime import LayerRuntime, on_device
from polymoe.layouts.pack_check import require_input_scales
from polymoe.problem import Problem
from polymoe.problem.call import TORCH_DTYPES, CallArguments
from polymoe.problem.numerics import relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.scale_range import ScaleRange, measure_scales
from polymoe.problem.tensors import ExpertWeights

__all__ = ["check_layer", "require_planned"]

log = logging.getLogger("polymoe")


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
    local = sorted({round(i * (spec.local_experts - 1) / 3) for i in range(4)})
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


def require_planned(problem: Problem, weights: ExpertWeights, device: torch.device, where: str, hint: str) -> None:
    """Refuse weights that cannot take the place of those that a layer was planned for, before they are packed.

    The scales of 4-bit weights are read once; other tensors are not read.

    Args:
        problem: the problem of the layer, with the range of its scales.
        weights: the new weights.
        device: where the layer is.
        where: its name for the message.
        hint: what the user can do.

    Raises:
        PlanError: if their spec differs, or their scales reach further.
        FormatError: for a scale that is NaN.
        CheckpointError: if static input scales are missing.
    """
    if weights.spec != problem.spec:
        raise PlanError(where, expected=str(problem.spec), got=str(weights.spec), hint=hint)
    found, planned = measure_scales(weights, device, where), problem.scales or ScaleRange()
    if found is not None and not planned.covers(found):
        hint = f"{hint}: the layout was chosen by the range of the scales"
        raise PlanError(where, expected=str(planned), got=str(found), hint=hint)
    if problem.activations.static:
        require_input_scales(weights, where)
