"""The experts modules of a model in Transformers, in groups of equal ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polymoe.checkpoint.architectures.activation import activation_of
from polymoe.checkpoint.architectures.interface import has_interface, projections, require_known
from polymoe.checkpoint.moe_config import MoeConfig
from polymoe.errors import UnsupportedProblem

_LAYER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsGroup:
    """Experts modules that are alike, at most one in each layer.

    Attributes:
        template: their name in the model, with ``{layer}``.
        modules: by layer, ascending.
        moe: their sizes and activation.
    """

    template: str
    modules: Mapping[int, Any]
    moe: MoeConfig

    def name(self, layer: int) -> str:
        """The name of the module of a layer."""
        return self.template.format(layer=layer)


def expert_groups(model: Any, top_k: int | None = None) -> tuple[ExpertsGroup, ...]:
    """The experts modules of a model, those of the first layers first; none for a dense model.

    Args:
        model: of Transformers, with its weights or on ``meta``.
        top_k: experts per token where no module says it.

    Raises:
        UnsupportedProblem: naming the module, for one with other parameters or properties than known, with another
            activation, outside of layers, or without a number of experts per token.
    """
    found: dict[tuple[Any, ...], dict[int, Any]] = {}
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, module in model.named_modules():
        if not has_interface(module) or f"{name}.down_proj" in tied:  # the same experts as another module's
            continue
        require_known(module)
        numbers = list(_LAYER.finditer(name))
        if not numbers:
            raise UnsupportedProblem(name, expected="experts of a layer with a number", got="no number in the name")
        at = numbers[-1]
        template = f"{name[: at.start()]}{{layer}}{name[at.end() :]}"
        shapes = projections(module, dict(module.named_parameters(recurse=False)))
        experts, hidden, intermediate = shapes["down"].shape
        for part in ("up", "gate") if module.has_gate else ("up",):
            got, expected = list(shapes[part].shape), [experts, intermediate, hidden]
            if got != expected:
                raise UnsupportedProblem(f"{name} {part}", expected=f"shape {expected}", got=str(got))
        sizes = (template, hidden, intermediate, experts, bool(module.has_bias), activation_of(module))
        used = _top_k(model, name) or top_k
        if used is None:
            raise UnsupportedProblem(name, expected="a number of experts per token beside it: top_k", got="none")
        found.setdefault((*sizes, used), {})[int(at[0])] = module
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    groups = []
    for (template, hidden, intermediate, experts, bias, activation, used), modules in found.items():
        moe = MoeConfig(
            hidden=hidden,
            intermediate=intermediate,
            experts=experts,
            top_k=used,
            bias=bias,
            activation=activation,
            layers=tuple(sorted(modules)),
            num_layers=max(layers or 0, *(n + 1 for n in modules)),
        )
        groups.append(ExpertsGroup(template=template, modules=dict(sorted(modules.items())), moe=moe))
    return tuple(groups)


def _top_k(model: Any, name: str) -> int | None:
    """``top_k`` of the block that contains an experts module, or of its router beside the experts."""
    block = model.get_submodule(name.rpartition(".")[0])
    places = (block, *block.children())
    return next((k for place in places if type(k := vars(place).get("top_k")) is int and k > 0), None)
