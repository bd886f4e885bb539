"""From a config to the experts of its model: sizes, activation, and where their tensors are in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from polymoe.checkpoint.architectures.config import empty_model
from polymoe.checkpoint.architectures.experts import expert_groups
from polymoe.checkpoint.architectures.names import stored_names
from polymoe.checkpoint.arrangement import Arrangement
from polymoe.checkpoint.config_reader import ConfigReader
from polymoe.checkpoint.moe_config import MoeConfig
from polymoe.errors import UnsupportedProblem, nearest

_TOP_K = ("num_experts_per_tok", "top_k_experts")
"""Keys of configs for the number of experts per token, where no module keeps it."""


def groups_of(
    config: Mapping[str, Any], names: Sequence[str] = ()
) -> tuple[tuple[str, MoeConfig, tuple[tuple[str, Arrangement], ...]], ...]:
    """The model type, the experts, and containers with arrangements, of each group of equal experts modules.

    Args:
        config: ``config.json``.
        names: of tensors in files.

    Raises:
        CheckpointError: if Transformers does not have the model, or does not accept the config.
        UnsupportedProblem: for a model without experts that have its experts interface, or as
            :func:`~polymoe.checkpoint.architectures.experts.expert_groups` and
            :func:`~polymoe.checkpoint.architectures.names.stored_names`.
    """
    keys = ConfigReader(config)
    model_type = keys.text("model_type")
    if model_type not in CONFIG_MAPPING:
        hint = nearest(model_type, CONFIG_MAPPING)
        raise keys.error(
            "model_type", "a known family, or a model of Transformers", config.get("model_type"), hint=hint
        )
    model = empty_model(config, "config.json")
    text = model.config.get_text_config()
    top_k = next((k for name in _TOP_K if type(k := getattr(text, name, None)) is int), None)
    groups = expert_groups(model, top_k)
    if not groups:
        raise UnsupportedProblem(
            f"{model_type} in Transformers",
            expected="experts with Transformers' experts interface",
            got="none in this model",
            hint="docs/models.md lists the models that have it",
        )
    places = stored_names(model, groups, names)
    return tuple((model_type, group.moe, place) for group, place in zip(groups, places, strict=True))
