"""Model families in Transformers: where their experts are, and what stands there when they are packed.

A family is one row of :data:`FAMILIES`. The experts module's name suffices where it is called as
``experts(hidden_states_TH, top_k_index_TA, top_k_weights_TA)``: so does every model in Transformers 5 that takes part
in its experts interface. Llama-4's does not, so its whole block of router, shared expert and experts is replaced.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from polymoe.errors import UnsupportedProblem, nearest
from polymoe.experts import FusedExperts

__all__ = [
    "FAMILIES",
    "Family",
    "PackedExperts",
    "PackedLlama4Moe",
    "auto_class",
    "family_of",
    "pack_modules",
    "register_names",
    "registered_names",
    "require_model",
    "unregister_names",
    "use_own_name",
]


class PackedExperts(nn.Module):
    """What stands in a model for one layer's experts module: the same call, packed weights.

    It has no parameters and adds nothing to the model's state dict: a checkpoint is loaded into it as a whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fused: FusedExperts | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[T, H]`` from ``[T, H]``, expert ids ``[T, A]`` and routing weights ``[T, A]`` of any float dtype."""
        if self.fused is None:
            raise AssertionError("PackedExperts called before its weights were loaded")
        return self.fused(hidden_states, top_k_index, top_k_weights.float())


class PackedLlama4Moe(nn.Module):
    """Llama-4's mixture-of-experts block with its own router and shared expert, and packed experts.

    Its experts module is called with every token once for each expert, most of them times 0; here each token goes to
    the experts it was sent to.
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
        weights_TA, ids_TA = scores_TE.topk(self.top_k, dim=1)  # experts that were not chosen have a score of 0
        return self.shared_expert(x_TH) + self.experts(x_TH, ids_TA, weights_TA), logits_TE


@dataclass(frozen=True, slots=True)
class Family:
    """A model family in Transformers whose checkpoints come with quantized experts.

    Attributes:
        model_type: the config's ``model_type``.
        module: class name of the module that is replaced, one in each layer that has experts.
        packed: what replaces it, from the module itself.
        experts: name of the :class:`PackedExperts` in what replaces it; empty for itself.
        same_as: the ``model_type`` in Transformers, where the checkpoint's own is not one of Transformers'.
        since: the first version of Transformers whose model runs in 16 bit.
    """

    model_type: str
    module: str
    packed: Callable[[Any], nn.Module] = lambda module: PackedExperts()
    experts: str = ""
    same_as: str | None = None
    since: str = "5.16"

    def require_dtype(self, dtype: torch.dtype) -> None:
        """Check that this version of Transformers runs the family in ``dtype``.

        Raises:
            UnsupportedProblem: it does not; the hint has what does.
        """
        if dtype != torch.float32 and Version(transformers.__version__) < Version(self.since):
            raise UnsupportedProblem(
                f"{self.model_type} in {dtype}".replace("torch.", ""), expected=f"Transformers {self.since} or newer",
                got=transformers.__version__,
                hint="older ones mix its norms' float32 with 16 bit; upgrade, or load with dtype=torch.float32",
            )  # fmt: skip


_LLAMA4 = functools.partial(Family, module="Llama4TextMoe", packed=PackedLlama4Moe, experts="experts")

FAMILIES = (
    Family("gpt_oss", "GptOssExperts"),
    Family("deepseek_v3", "DeepseekV3Experts"),
    Family("kimi_k2", "DeepseekV3Experts", same_as="deepseek_v3"),
    Family("kimi_k25", "DeepseekV3Experts"),
    Family("deepseek_v4", "DeepseekV4Experts", since="5.20"),
    Family("nemotron_h", "NemotronHExperts"),
    Family("glm4_moe", "Glm4MoeExperts"),
    Family("qwen3_moe", "Qwen3MoeExperts"),
    Family("mixtral", "MixtralExperts"),
    _LLAMA4("llama4"),
    _LLAMA4("llama4_text"),
)
"""Every supported family, whatever its quantization."""


def family_of(model_type: str) -> Family:
    """The row of a ``model_type``.

    Raises:
        UnsupportedProblem: for a family without a row, or as :func:`require_model`.
    """
    require_model(model_type)
    family = next((row for row in FAMILIES if row.model_type == model_type), None)
    if family is None:
        known = nearest(model_type, [row.model_type for row in FAMILIES])
        raise UnsupportedProblem(
            f"{model_type} in Transformers", expected="a family with a row in polymoe.engines.transformers.FAMILIES",
            got="none", hint=f"needs a row; until then {_BY_THEMSELVES}. {known}",
        )  # fmt: skip
    return family


def require_model(model_type: str) -> None:
    """Check that Transformers has a model of this type.

    Raises:
        UnsupportedProblem: it has none; says what would be needed.
    """
    names = {row.model_type: row.same_as or row.model_type for row in FAMILIES}
    if names.get(model_type, model_type) not in CONFIG_MAPPING:
        raise UnsupportedProblem(
            f"{model_type} in Transformers", expected="a family that Transformers has",
            got=f"none of this name in {transformers.__version__}",
            hint=f"needs a version of Transformers with a model for {model_type}; until then {_BY_THEMSELVES}",
        )  # fmt: skip


_BY_THEMSELVES = "polymoe.load_experts and polymoe.explain read its experts by themselves"


def auto_class(config: Any) -> Any:
    """The class that loads a whole model of ``config``: with its vision tower if there is one."""
    return AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModelForCausalLM


def register_names() -> tuple[str, ...]:
    """Make the names of families that Transformers has under another one known to it; those that were not."""
    new = []
    for family in FAMILIES:
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
    """:func:`register_names`, for a while."""
    new = register_names()
    try:
        yield
    finally:
        unregister_names(new)


def use_own_name(config: Any) -> Any:
    """``config``, by Transformers' own name of the family: conversions of tensors go by it."""
    for family in FAMILIES:
        if family.same_as and config.model_type == family.model_type:
            config.model_type = family.same_as
    return config


def pack_modules(model: Any, family: Family) -> dict[str, int]:
    """Put packed modules in the place of a model's experts; names of the :class:`PackedExperts`, and their layers."""
    found = {name: module for name, module in model.named_modules() if type(module).__name__ == family.module}
    layers = {}
    for name, module in found.items():
        model.set_submodule(name, family.packed(module))
        layers[f"{name}.{family.experts}".rstrip(".")] = int(re.findall(r"\.(\d+)\.", f".{name}")[-1])
    return layers
