"""What can go wrong while a layer is packed, as layouts whose ``pack`` does it; and layers to do it to.

Experts 0, 5, 10 and 15 of 16 stay as they are: those are the four whose results are compared at load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polymoe.backends.base import Runner
from polymoe.backends.features import ANY
from polymoe.backends.reference import Reference
from polymoe.formats import FORMATS
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS, Layout, Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.tensors import Expert, ExpertWeights
from support import toys
from support.problems import random_experts
from support.toys import Toy

EXPERTS, COMPARED = 16, (0, 5, 10, 15)


@dataclass(frozen=True)
class AnyLayout(Toy):
    """The reference, on a layer in any layout."""

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        return Reference().bind(problem, packed)


def choice(layout: Layout, device: str = "cpu") -> PlanRequest:
    """Plans that take this layout."""
    backend = AnyLayout("any", layouts=(layout.name,), handles={**toys.HANDLES, "scales": ANY})
    return PlanRequest(Machine.of(device), "mixed", "any", {"any": backend}, {layout.name: layout})


def layer(format: str) -> ExpertWeights:
    """Experts with biases and input scales; NVFP4 has a global scale for each projection, and experts differ in it."""
    weights = random_experts(format, experts=EXPERTS, **_sizes(format), bias=True)

    def one(e: int) -> Expert:
        scales = torch.tensor(1.0 + e), torch.tensor(2.0 + e)
        return replace(weights.expert(e), gate_up_input_scale=scales[0], down_input_scale=scales[1])

    return ExpertWeights.of([one(e) for e in range(EXPERTS)])


def _sizes(format: str) -> dict[str, int]:
    """The least that every layout of the format holds."""
    return dict.fromkeys(("hidden", "intermediate"), 256 if format == "int4_g32" else 128)


CELLS = [
    (name, format)
    for name, layout in LAYOUTS.items()
    for format in ("nvfp4", "mxfp4", "mxfp8", "fp8_block128", "bf16", "int4_g32")
    if name != "natural" or format in ("nvfp4", "bf16")
    if format != "int4_g32" or name == "flashinfer_trtllm_int4"
    if format != "mxfp8" or name == "w8a16_fragments"
    if not layout.check(random_experts(format, experts=1, **_sizes(format)).spec)
]
"""Names of layouts, each with the formats that it holds."""

Change = Callable[[ExpertWeights], ExpertWeights]
Damage = Callable[[dict[str, Tensor]], None]


def reading(number: Callable[[int], int]) -> Change:
    """Pack expert ``number(e)`` as expert ``e``."""
    return lambda weights: ExpertWeights(weights.spec, lambda e: weights.expert(number(e)))


def changing(e: int, change: Callable[[Expert, ExpertWeights], Expert]) -> Change:
    """Pack expert ``e`` changed."""
    return lambda weights: ExpertWeights(
        weights.spec, lambda i: change(weights.expert(i), weights) if i == e else weights.expert(i)
    )


def _other_global_scale(expert: Expert, weights: ExpertWeights) -> Expert:
    return replace(expert, down=replace(expert.down, global_scale=weights.expert(4).down.global_scale))


def _of_experts(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Without what is made of them for kernels."""
    return [tensor for name, tensor in tensors.items() if not name.startswith("kernel.")]


def _stale(tensors: dict[str, Tensor]) -> None:
    for tensor in _of_experts(tensors):
        tensor[7].view(-1).view(torch.uint8).random_(0, 100)


def _overwritten(tensors: dict[str, Tensor]) -> None:
    for tensor in _of_experts(tensors):
        tensor[8].copy_(tensor[9])


def _one_bit(tensors: dict[str, Tensor]) -> None:
    tensors["down.codes"][11].view(-1).view(torch.uint8)[-1] ^= 1


BEFORE: dict[str, Change] = {
    "twelve as expert 0": reading(lambda e: e if e in COMPARED else 0),
    "one packed twice": reading(lambda e: 2 if e == 3 else e),
    "two swapped": reading(lambda e: {1: 2, 2: 1}.get(e, e)),
    "gate and up swapped": changing(3, lambda x, _: replace(x, gate=x.up, up=x.gate)),
    "bias of another": changing(3, lambda x, w: replace(x, up_bias=w.expert(4).up_bias)),
    "biases swapped": changing(3, lambda x, _: replace(x, gate_bias=x.up_bias, up_bias=x.gate_bias)),
    "global scale of another": changing(3, _other_global_scale),
    "input scale of another": changing(3, lambda x, w: replace(x, down_input_scale=w.expert(4).down_input_scale)),
    "input scale lost": changing(3, lambda x, _: replace(x, down_input_scale=None)),
}
"""Faults in what is packed."""

AFTER: dict[str, Damage] = {"stale memory": _stale, "overwritten later": _overwritten, "one bit": _one_bit}
"""Faults in what packing leaves."""


def faulty(layout: Layout, fault: str) -> Callable[..., Packed]:
    """The layout's ``pack`` with a fault."""
    right = layout.pack

    def pack(self: Layout, weights: ExpertWeights, device: torch.device, out: Packed | None = None) -> Packed:
        packed = right(BEFORE[fault](weights) if fault in BEFORE else weights, device, out)
        if fault in AFTER:
            AFTER[fault](packed.tensors)
        return packed

    return pack


FAULTY_CELLS = [
    (name, format, fault)
    for name, format in CELLS
    for fault in (*BEFORE, *AFTER)
    if fault != "global scale of another" or FORMATS[format].encoding.global_scale
]
"""Each cell with each fault."""
