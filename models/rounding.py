"""Training through rounding: a model's weights as the stored format will return them, or with noise in its place.

Each quantized matrix becomes `weight + delta`, where delta is what rounding adds: a constant to the gradient, which so
passes straight through (arXiv:1308.3432). Deltas are renewed now and then, outside of a captured training step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from families import TrainedFamily
from store import EXPERTS
from torch import Tensor, nn
from torch.nn.utils import parametrize

from polymoe.checkpoint.config import parse_quantization
from polymoe.checkpoint.families import Fused, family_of
from polymoe.checkpoint.layer import StoredLayer
from polymoe.formats import format_of

Round = Callable[[Tensor], Tensor]


class Rounded(nn.Module):
    """A parametrization: the weight, and what rounding adds to it."""

    def __init__(self, weight: Tensor, rounding: Round) -> None:
        super().__init__()
        self.rounding = rounding
        self.register_buffer("delta", torch.zeros_like(weight), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


def add_rounding(model: nn.Module, family: TrainedFamily) -> None:
    """Let every matrix that will be quantized, or gets noise, go through :class:`Rounded`."""
    for name, module in list(model.named_modules()):
        match = EXPERTS.fullmatch(f"{name}.parameter")
        if match and family.noise:
            for parameter in [name for name, _ in module.named_parameters(recurse=False)]:
                _parametrize(module, parameter, _noisy(family.noise))
        elif match:
            for parameter, rounding in _experts(family.config, int(match[2])).items():
                _parametrize(module, parameter, rounding)
        elif isinstance(module, nn.Linear) and (found := family.encoding(family.in_files(f"{name}.weight"))):
            _parametrize(module, "weight", _to(found[1]))


def remove_rounding(model: nn.Module) -> None:
    """Undo :func:`add_rounding`; the weights stay as they were trained."""
    for module in list(model.modules()):
        for name in list(getattr(module, "parametrizations", {})):
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)


@torch.no_grad()
def set_rounded(model: nn.Module, rounded: bool) -> None:
    """Renew every delta, or set it to zero."""
    for module in model.modules():
        for steps in getattr(module, "parametrizations", {}).values():
            weight, (step,) = steps.original, steps
            step.delta.copy_(step.rounding(weight) - weight) if rounded else step.delta.zero_()


def _parametrize(module: nn.Module, name: str, rounding: Round) -> None:
    step = Rounded(getattr(module, name).detach(), rounding)
    parametrize.register_parametrization(module, name, step, unsafe=True)


def _noisy(share: float) -> Round:
    return lambda weight: weight + share * weight.square().mean(-1, keepdim=True).sqrt() * torch.randn_like(weight)


def _to(encoding: Any) -> Round:
    form = format_of(encoding)
    return lambda weight: form.quantize(weight).dequantize()


def _experts(config: Mapping[str, Any], layer: int) -> dict[str, Round]:
    """How each parameter of a layer's experts module is rounded: gate and up apart, in Transformers' arrangement."""
    family = family_of(config)
    moe = family.moe(config)
    held = next(a for a in reversed(family.arrangements) if isinstance(a, Fused))
    encodings = StoredLayer.described(family, moe, parse_quantization(config), layer).spec().encodings

    def first(weight: Tensor) -> Tensor:
        rows = weight.mT if held.k_first else weight
        if not moe.gated:
            found = _to(encodings["up"])(rows)
        elif held.order == "interleaved":
            halves = (_to(encodings[p])(rows[:, i::2]) for i, p in enumerate(("gate", "up")))
            found = torch.stack(tuple(halves), 2).flatten(1, 2)
        else:
            halves = (_to(encodings[p])(half) for p, half in zip(("gate", "up"), rows.chunk(2, 1), strict=True))
            found = torch.cat(tuple(halves), 1)
        return found.mT if held.k_first else found

    def down(weight: Tensor) -> Tensor:
        rounding = _to(encodings["down"])
        return rounding(weight.mT).mT if held.k_first else rounding(weight)

    return {held.gate_up: first, held.down: down}
