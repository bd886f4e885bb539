"""Model families in Transformers: which module holds their experts, and what replaces it when they are packed.

Every model in Transformers 5 that supports its experts interface has experts modules with the call
``experts(hidden_states_TH, top_k_index_TA, top_k_weights_TA)``, and needs nothing more. Llama-4 does not: there, the
whole block of router, shared expert and experts is replaced. :data:`TRANSFORMERS_FAMILIES` has its row, and other
exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.architectures.experts import expert_groups
from polymoe.checkpoint.architectures.interface import has_interface
from polymoe.checkpoint.moe_config import MoeConfig
from polymoe.checkpoint.plain_experts import PlainExperts
from polymoe.common.units import format_ranges
from polymoe.engines.transformers.contract import checked_call
from polymoe.errors import UnsupportedProblem
from polymoe.layer.experts import FusedExperts


def refuse_expert_tensors(names: Iterable[str]) -> None:
    """Check that none of the tensors that are to be loaded into a packed model belongs to its experts: those of an
    adapter, such as LoRA, would be left out.

    Raises:
        UnsupportedProblem: naming the layer and the tensor of the first.
    """
    experts = sorted(name for name in names if "experts" in name.split("."))
    if experts:
        layer = re.search(r"\.(\d+)\.", f".{experts[0]}")
        raise UnsupportedProblem(
            f"layer {layer[1]}, {experts[0]}" if layer else experts[0],
            expected="tensors of other modules: packed experts take no adapter",
            got="one of the experts" + (f", and {len(experts) - 1} more" if experts[1:] else ""),
            hint="load the model without polymoe, or merge the adapter into 16-bit weights and quantize them",
        )


def _refuse_state_dict(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    refuse_expert_tensors(name for name in state_dict if name.startswith(prefix))


class PackedExperts(nn.Module):
    """Replaces one layer's experts module in a model: the same call, packed weights.

    It has no parameters and adds nothing to the model's state dict: :attr:`fused` is set once the model is loaded. A
    state dict with tensors of its experts is refused, even with ``strict=False``, with which PEFT loads adapters.

    Attributes:
        fused: the experts, or this rank's part of them.
        num_experts: how many experts a rank has, which Transformers' expert parallelism reads.
        plain: how they are named in 16 bits, for :func:`~polymoe.engines.transformers.refit.refit`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fused: FusedExperts | None = None
        self.plain: PlainExperts | None = None
        self.num_experts = 0
        self.register_load_state_dict_pre_hook(_refuse_state_dict)

    def forward(self, *args: Tensor, **others: Any) -> Tensor:
        """``[T, H]`` from ``[T, H]``, expert ids ``[T, A]`` and routing weights ``[T, A]`` of any float dtype.

        Raises:
            UnsupportedProblem: for other arguments, or another order.
        """
        if self.fused is None:
            raise AssertionError("PackedExperts called before its weights were loaded")
        x_TH, ids_TA, weights_TA = checked_call("PackedExperts", args, others)
        spec = self.fused.problem.spec
        if spec.first_expert:  # Transformers calls each rank with numbers among its own experts, and one more for none
            ids_TA = (ids_TA + spec.first_expert).clamp(max=spec.experts)
        return self.fused(x_TH, ids_TA, weights_TA)


class PackedLlama4Moe(nn.Module):
    """Llama-4's mixture-of-experts block with its own router and shared expert, and packed experts.

    Llama-4 calls its experts module with every token once for each expert, and multiplies most results by 0. This block
    computes each token only with the experts that the router chose.
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.top_k = block.top_k
        self.router, self.shared_expert = block.router, block.shared_expert
        self.experts = PackedExperts()

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """``[T, H]`` and router logits ``[T, E]`` from ``[..., H]``."""
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores_TE, logits_TE = self.router(x_TH)
        weights_TA, ids_TA = scores_TE.topk(self.top_k, dim=1)  # what the router did not choose has a score of 0
        return self.shared_expert(x_TH) + self.experts(x_TH, ids_TA, weights_TA), logits_TE


@dataclass(frozen=True, slots=True)
class TransformersFamily:
    """What is special about a model family in Transformers.

    Attributes:
        model_type: the config's ``model_type``.
        module: class name of the module to replace in each layer that has experts; None for modules of Transformers'
            experts interface.
        packed: builds the replacement from that module.
        experts: name of the :class:`PackedExperts` within the replacement; empty if it is the replacement.
        same_as: Transformers' ``model_type`` of the family, if it differs from the checkpoint's.
        since: the first version of Transformers that runs the family in 16 bit.
    """

    model_type: str
    module: str | None = None
    packed: Callable[[Any], nn.Module] = lambda module: PackedExperts()
    experts: str = ""
    same_as: str | None = None
    since: str = "5.16"

    def require_dtype(self, dtype: torch.dtype) -> None:
        """Raise UnsupportedProblem if the installed version of Transformers does not run the family in ``dtype``."""
        if dtype != torch.float32 and Version(transformers.__version__) < Version(self.since):
            raise UnsupportedProblem(
                f"{self.model_type} in {dtype}".replace("torch.", ""),
                expected=f"Transformers {self.since} or newer",
                got=transformers.__version__,
                hint="older versions mix float32 norms with 16-bit weights; upgrade, or load with dtype=torch.float32",
            )


TRANSFORMERS_FAMILIES = (
    TransformersFamily("kimi_k2", same_as="deepseek_v3"),
    TransformersFamily("deepseek_v4", since="5.20"),
    TransformersFamily("llama4", "Llama4TextMoe", PackedLlama4Moe, "experts"),
    TransformersFamily("llama4_text", "Llama4TextMoe", PackedLlama4Moe, "experts"),
)
"""Families that need more than their experts modules say; every other one with these modules needs no row."""


def family_named(model_type: str) -> TransformersFamily:
    """The row of a ``model_type``, or one without anything special.

    Raises:
        UnsupportedProblem: as :func:`require_model`.
    """
    require_model(model_type)
    return next((row for row in TRANSFORMERS_FAMILIES if row.model_type == model_type), TransformersFamily(model_type))


def require_model(model_type: str) -> None:
    """Raise UnsupportedProblem if the installed version of Transformers has no model of this type."""
    names = {row.model_type: row.same_as or row.model_type for row in TRANSFORMERS_FAMILIES}
    if names.get(model_type, model_type) not in CONFIG_MAPPING:
        raise UnsupportedProblem(
            f"{model_type} in Transformers",
            expected="a family that Transformers has",
            got=f"none of this name in {transformers.__version__}",
            hint=f"install a version of Transformers with a model for {model_type}; {_WITHOUT_MODEL}",
        )


_WITHOUT_MODEL = "polymoe.load_experts and polymoe.explain read the experts without a model"


def register_names() -> tuple[str, ...]:
    """Register families that Transformers knows under another name; the names that are new to it."""
    new = []
    for family in TRANSFORMERS_FAMILIES:
        if family.same_as and family.same_as in CONFIG_MAPPING and family.model_type not in CONFIG_MAPPING:
            CONFIG_MAPPING.register(family.model_type, CONFIG_MAPPING[family.same_as])
            new.append(family.model_type)
    return tuple(new)


def unregister_names(names: Iterable[str]) -> None:
    """Undo :func:`register_names`."""
    for name in names:
        CONFIG_MAPPING._extra_content.pop(name, None)


@contextmanager
def registered_names() -> Iterator[None]:
    """:func:`register_names`, undone at the end."""
    new = register_names()
    try:
        yield
    finally:
        unregister_names(new)


def use_own_name(config: Any) -> Any:
    """``config`` with Transformers' name of the family, by which Transformers chooses how to convert tensors."""
    for family in TRANSFORMERS_FAMILIES:
        if family.same_as and config.model_type == family.model_type:
            config.model_type = family.same_as
    return config


def pack_modules(model: Any, family: TransformersFamily, parts: Sequence[Checkpoint]) -> dict[str, tuple[int, int]]:
    """Replace a model's experts by packed ones, still empty.

    Returns:
        For the name of each :class:`PackedExperts` the index of its part of the checkpoint, and its layer.

    Raises:
        UnsupportedProblem: if the model calls its experts in another way than known, or if they are not those of the
            checkpoint.
    """
    layers: dict[str, tuple[int, int]] = {}
    for name, index, layer in _listed(model, family) if family.module else interface_modules(model, parts):
        model.set_submodule(name, family.packed(model.get_submodule(name)))
        # Some models initialize parameters of the experts where they initialize the block around them.
        model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True
        layers[f"{name}.{family.experts}".rstrip(".")] = index, layer
    # Before any tensor is loaded, and also for tensors by names of modules that the model does not have.
    model.register_load_state_dict_pre_hook(_refuse_state_dict)
    return layers


def _listed(model: Any, family: TransformersFamily) -> list[tuple[str, int, int]]:
    """Modules of the class that a row names, all of the first part, and their layers."""
    names = [name for name, module in model.named_modules() if type(module).__name__ == family.module]
    return [(name, 0, int(re.findall(r"\.(\d+)\.", f".{name}")[-1])) for name in names]


def interface_modules(model: Any, parts: Sequence[Checkpoint]) -> list[tuple[str, int, int]]:
    """Modules of the experts interface, the parts of the checkpoint with their experts, and their layers."""
    groups = expert_groups(model, parts[0].moe.top_k if parts else None)
    found = [_facts(group.moe) for group in groups]
    if found != (expected := [_facts(part.moe) for part in parts]):
        raise UnsupportedProblem(
            type(model).__name__,
            expected="; ".join(expected),
            got="; ".join(found) or "no experts with Transformers' experts interface",
            hint="config.json and the model disagree about the experts",
        )
    names = {group.name(layer): (index, layer) for index, group in enumerate(groups) for layer in group.modules}
    for name, module in model.named_modules():
        if has_interface(module) and name not in names:
            raise UnsupportedProblem(name, expected="experts of its own", got="the same weights as another module's")
    return [(name, *place) for name, place in names.items()]


def _facts(moe: MoeConfig) -> str:
    """What the experts of a config and of a model must agree on, as text."""
    sizes = f"{moe.experts} experts of {moe.hidden} x {moe.intermediate}, {moe.activation.name}"
    return f"{sizes}, layers {format_ranges(moe.layers)}"
