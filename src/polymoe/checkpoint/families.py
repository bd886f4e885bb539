"""FAMILIES: one row for each model family, with the names of its expert tensors and the function that reads its config.

A row contains nothing about quantization, which :mod:`polymoe.checkpoint.config` reads from the same file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from polymoe.checkpoint import moe_config as describe
from polymoe.checkpoint.config_reader import ConfigReader
from polymoe.checkpoint.moe_config import MoeConfig
from polymoe.errors import nearest
from polymoe.formats.encoding import ScaleDtype

__all__ = [
    "FAMILIES",
    "Arrangement",
    "Fused",
    "ModelFamily",
    "MoeConfig",
    "PerExpert",
    "family_of",
    "text_config",
    "text_reader",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PerExpert:
    """One module for each expert and projection: ``{container}.{e}.{name}``, tensors ``{module}.{suffix}``.

    Attributes:
        gate, up, down: names of the modules; ``gate`` is None for experts without a gate projection.
        dialects: the dialects that use this arrangement; None for any.
    """

    up: str
    down: str
    gate: str | None
    dialects: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """All experts stacked, gate and up merged: ``{container}.{gate_up}``, or ``{container}.{gate_up}_{suffix}``.

    Attributes:
        gate_up, down: stems of the tensor names.
        order: of gate and up rows: all gate rows, then all up rows; or alternating, gate first.
        k_first: whether matrices are stored transposed, ``[E, K, N]``.
        dialects: the dialects that use this arrangement; None for any.
    """

    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    order: Literal["concatenated", "interleaved"] = "concatenated"
    k_first: bool = False
    dialects: tuple[str, ...] | None = None


Arrangement = PerExpert | Fused
"""How the expert tensors of one layer are named and stacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A row of :data:`FAMILIES`.

    Attributes:
        name: of the model family.
        model_types: every ``model_type`` of this family, for whole models and for their text parts.
        containers: possible full names of a layer's experts module, with ``{layer}``; the first is the usual one.
        arrangements: possible arrangements, tried in order on the existing tensors.
        describe: reads the text part of a config; :meth:`moe` finds that part.
        uneven_tp: whether tensor parallelism gives each rank whole groups of columns, and the last rank fewer.
        fp8_dialect: the dialect of ``quant_method: fp8`` with block scales.
        fp8_scale: the dtype of those scales, which configs do not contain.
    """

    name: str
    model_types: tuple[str, ...]
    containers: tuple[str, ...]
    arrangements: tuple[Arrangement, ...]
    describe: Callable[[ConfigReader], MoeConfig]
    uneven_tp: bool = False
    fp8_dialect: str = "deepseek"
    fp8_scale: ScaleDtype = "float32"

    def moe(self, config: Mapping[str, Any]) -> MoeConfig:
        """Describe the routed experts of a model from its whole config.

        Raises:
            CheckpointError: if a key is missing or has a value of a wrong type or outside its range.
        """
        return self.describe(text_reader(config))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the text model: ``text_config`` of multimodal models, else all of
    it.

    Raises:
        CheckpointError: if ``text_config`` is not an object.
    """
    return config if config.get("text_config") is None else ConfigReader(config).mapping("text_config")


def text_reader(config: Mapping[str, Any]) -> ConfigReader:
    """Return a reader of :func:`text_config`, whose errors say where in the file it is."""
    text = text_config(config)
    return ConfigReader(text) if text is config else ConfigReader(text, "config.json: text_config")


_ROUTED = re.compile("expert|moe")
"""In names of keys, of every config of a mixture of experts."""


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """Return the family of a config's ``model_type`` or of its text part's.

    Raises:
        CheckpointError: for an unknown ``model_type``; the hint names the nearest one.
    """
    names = [ConfigReader(c).text("model_type") for c in (config, text_config(config))]
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    if not any(_ROUTED.search(key) for part in (config, text_config(config)) for key in part):
        raise ConfigReader(config).error(
            "model_type",
            "a mixture-of-experts model",
            config.get("model_type"),
            hint="no key of this config speaks of experts: a dense model has none for polymoe to run",
        )
    raise ConfigReader(config).error(
        "model_type", "a known family", config.get("model_type"), hint=nearest(names[0], FAMILIES)
    )


_MLP = "layers.{layer}.mlp.experts"
_GATED = PerExpert(gate="gate_proj", up="up_proj", down="down_proj")
_W123 = PerExpert(gate="w1", up="w3", down="w2")
_STACKED = Fused(dialects=("plain",))  # as Transformers holds stacked experts and saves them

_ROWS = (
    ModelFamily(
        name="gpt-oss",
        model_types=("gpt_oss",),
        containers=(f"model.{_MLP}",),
        arrangements=(
            Fused(order="interleaved", dialects=("gpt_oss",)),
            Fused(order="interleaved", k_first=True, dialects=("plain",)),
        ),
        describe=describe.gpt_oss,
        uneven_tp=True,
    ),
    ModelFamily(
        name="deepseek-v3",
        model_types=("deepseek_v3", "deepseek_v32", "kimi_k2"),
        containers=(f"model.{_MLP}",),
        arrangements=(_GATED, _STACKED),
        describe=describe.deepseek_v3,
    ),
    ModelFamily(
        name="kimi-k2.5",
        model_types=("kimi_k25",),
        containers=(f"language_model.model.{_MLP}", f"language_model.{_MLP}", f"model.language_model.{_MLP}"),
        arrangements=(_GATED, _STACKED),
        describe=describe.deepseek_v3,
    ),
    ModelFamily(
        name="deepseek-v4",
        model_types=("deepseek_v4",),
        containers=("layers.{layer}.ffn.experts", "model.layers.{layer}.ffn.experts", f"model.{_MLP}"),
        arrangements=(_W123, _STACKED),
        describe=describe.deepseek_v4,
        fp8_dialect="deepseek_v4",
    ),
    ModelFamily(
        name="deepseek-v4.1",
        model_types=("deepseek_v41",),
        containers=("layers.{layer}.ffn.experts",),
        arrangements=(_W123,),
        describe=describe.deepseek_v41,
        fp8_dialect="deepseek_v4",
    ),
    ModelFamily(
        name="nemotron-h",
        model_types=("nemotron_h",),
        containers=("backbone.layers.{layer}.mixer.experts", "model.layers.{layer}.mixer.experts"),
        arrangements=(
            PerExpert(gate=None, up="up_proj", down="down_proj"),
            Fused(gate_up="up_proj", dialects=("plain",)),
        ),
        describe=describe.nemotron_h,
    ),
    ModelFamily(
        name="glm-4",
        model_types=("glm4_moe", "glm4_moe_lite"),
        containers=(f"model.{_MLP}",),
        arrangements=(_GATED, _STACKED),
        describe=describe.glm,
    ),
    ModelFamily(
        name="qwen3",
        model_types=("qwen3_moe",),
        containers=(f"model.{_MLP}",),
        arrangements=(_GATED, _STACKED),
        describe=describe.qwen3,
        fp8_scale="bfloat16",
    ),
    ModelFamily(
        name="qwen3-next",
        model_types=("qwen3_next",),
        containers=(f"model.{_MLP}",),
        arrangements=(_GATED, _STACKED),
        describe=describe.qwen,
        fp8_scale="bfloat16",
    ),
    ModelFamily(
        name="qwen3-vl",
        model_types=("qwen3_vl_moe",),
        containers=(f"model.language_model.{_MLP}", f"model.{_MLP}"),
        # [E, H, 2F] as released, [E, 2F, H] as Transformers may save it; for 2F = H the shapes are the same.
        arrangements=(Fused(k_first=True, dialects=("plain",)), _STACKED, _GATED),
        describe=describe.qwen,
        fp8_scale="bfloat16",
    ),
    ModelFamily(
        name="qwen3.5",
        model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
        containers=(f"model.language_model.{_MLP}", f"model.{_MLP}"),
        arrangements=(_STACKED, _GATED),
        describe=describe.qwen,
        fp8_scale="bfloat16",
    ),
    ModelFamily(
        name="mixtral",
        model_types=("mixtral",),
        containers=("model.layers.{layer}.block_sparse_moe.experts", f"model.{_MLP}"),
        arrangements=(_W123, _GATED, _STACKED),
        describe=describe.mixtral,
    ),
    ModelFamily(
        name="llama-4",
        model_types=("llama4", "llama4_text"),
        containers=(
            "language_model.model.layers.{layer}.feed_forward.experts",
            "model.layers.{layer}.feed_forward.experts",
        ),
        arrangements=(Fused(k_first=True, dialects=("plain", "modelopt_fp8")), _GATED),
        describe=describe.llama4,
    ),
)

FAMILIES: Mapping[str, ModelFamily] = {model_type: row for row in _ROWS for model_type in row.model_types}
"""Families by ``model_type``."""
