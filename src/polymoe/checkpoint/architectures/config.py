"""Configs of checkpoints as Transformers' objects, without anything that names code; and models on ``meta``."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from logging import getLogger
from typing import Any

import torch
from transformers.initialization import meta_device_safe_creation_ops, no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from polymoe.checkpoint.config_reader import MOST_LAYERS
from polymoe.common.untrusted import reading
from polymoe.errors import CheckpointError, UnsupportedProblem, quoted

log = getLogger("polymoe")

_CHOICES = re.compile(r".*_implementation(_\w+)?")
"""Keys by which a config chooses code, which may be a kernel of anybody's on the Hub. The caller chooses."""

_LEFT_OUT = re.compile(
    # Code, and other places for files.
    r"auto_map|custom_pipelines|custom_generate|configuration_files|transformers_weights|_?name_or_path|adapter_\w+"
    # What changes modules, or belongs to other tasks than generating text.
    r"|fusion_config|distributed_config|pruned_heads|num_labels|id2label|label2id|problem_type|task_specific_params"
    r"|is_encoder_decoder|is_decoder|add_cross_attention|return_dict|output_attentions|output_hidden_states"
)

_INFINITIES = ((math.inf, {"__float__": "Infinity"}), (-math.inf, {"__float__": "-Infinity"}))
"""Numbers that JSON does not have, as ``save_pretrained`` writes them. NaN, which no model needs, stays an object."""


def neutral(config: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """A config without what names code, files or other tasks, at any depth.

    Args:
        config: a config, which stays as it is.
        where: its name in warnings about code that it chooses; without one there are none.
    """
    kept: dict[str, Any] = {}
    for name, value in config.items():
        if _CHOICES.fullmatch(name):
            if value is not None and where:
                log.warning("%s: %s: %s is not used: the caller chooses implementations", where, name, quoted(value))
        elif not _LEFT_OUT.fullmatch(name) or (name.startswith("adapter_") and type(value) is int):  # a size
            kept[name] = _neutral_value(value, where)
    return kept


def _neutral_value(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        written = next((number for number, form in _INFINITIES if form == value), None)
        return neutral(value, where) if written is None else written
    if isinstance(value, list):
        return [_neutral_value(item, where) for item in value]
    return copy.deepcopy(value)


def require_layers(fields: Mapping[str, Any], most: int, reason: str, where: str) -> None:
    """Check that a config has no more layers than ``most``, under any key.

    Raises:
        CheckpointError: naming the key.
    """
    for name, value in _numbers(fields):
        if "layers" in name and value > most:
            raise CheckpointError(f"{where}: {name}", expected=f"at most {most}, {reason}", got=quoted(value))


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Every integer in a config, with its key."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, name)
    elif isinstance(value, int):
        yield name, value


def model_class(config: Any) -> Any:
    """The class of the whole model of ``config``, with its vision tower if it has one.

    Raises:
        UnsupportedProblem: if Transformers has no model that generates text for this config.
    """
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (list, tuple)) else found
    raise UnsupportedProblem(
        f"{config.model_type} in Transformers", expected="a model that generates text", got=type(config).__name__
    )


def empty_model(fields: Mapping[str, Any], where: str) -> Any:
    """The model of a checkpoint's config on ``meta``: modules with names, shapes and constants, and no weights.

    Args:
        fields: ``config.json``, whose ``model_type`` Transformers has. Nothing of it is run as code.
        where: names the config in errors.

    Raises:
        CheckpointError: if Transformers does not accept it.
        UnsupportedProblem: as :func:`model_class`.
    """
    fields = neutral({key: value for key, value in fields.items() if key not in _QUANTIZATION})
    require_layers(fields, MOST_LAYERS, "more than any model has", where)
    with reading(where, "a config that Transformers accepts"):
        config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    kind = model_class(config)
    with (
        reading(where, "a model that Transformers can build"),
        torch.device("meta"),
        no_init_weights(),
        meta_device_safe_creation_ops(),
    ):
        return kind(config)


_QUANTIZATION = ("quantization_config", "compression_config")
