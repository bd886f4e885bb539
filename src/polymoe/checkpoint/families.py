"""MODEL_FAMILIES: one row for each model family, with the names of its expert tensors and the function that reads its
config.

A family without a row is described by its model in Transformers (:mod:`polymoe.checkpoint.architectures`). Rows are for
what Transformers does not say - dialects, names of other tools, models that it does not have - and for use without it.
A row contains nothing about quantization, which :mod:`polymoe.checkpoint.config` reads from the same file.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any

from polymoe.checkpoint import moe_config as describe
from polymoe.checkpoint.arrangement import STACKED, UNFUSED, UNFUSED_NO_GATE, Arrangement, Fused, PerExpert
from polymoe.checkpoint.config_reader import ConfigReader
from polymoe.checkpoint.moe_config import MoeConfig
from polymoe.common.install_command import install_hint
from polymoe.errors import MissingDependency, nearest
from polymoe.formats.encoding import ScaleDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A row of :data:`MODEL_FAMILIES`.

    Attributes:
        name: of the model family.
        model_types: every ``model_type`` of this family, for whole models and for their text parts.
        containers: possible full names of a layer's experts module, with ``{layer}``; the first is the usual one.
        arrangements: possible arrangements, tried in order on the existing tensors.
        places: containers, each with an arrangement; by default every container with every arrangement.
        describe: reads the text part of a config; :meth:`moe` finds that part.
        uneven_tp: whether tensor parallelism gives each rank whole groups of columns, and the last rank fewer.
        fp8_dialect: the dialect of ``quant_method: fp8`` with block scales.
        fp8_scale: the dtype of those scales, which configs do not contain.
    """

    name: str
    model_types: tuple[str, ...]
    containers: tuple[str, ...] = ()
    arrangements: tuple[Arrangement, ...] = (UNFUSED, STACKED)
    places: tuple[tuple[str, Arrangement], ...] = ()
    describe: Callable[[ConfigReader], MoeConfig]
    uneven_tp: bool = False
    fp8_dialect: str = "deepseek"
    fp8_scale: ScaleDtype = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", self.places or tuple(product(self.containers, self.arrangements)))

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
    """Return the first of :func:`families_of`."""
    return families_of(config)[0]


def families_of(config: Mapping[str, Any], names: Iterable[str] = ()) -> tuple[ModelFamily, ...]:
    """Return the families of a config's experts: a row of :data:`MODEL_FAMILIES`, by ``model_type`` or that of the
    text part, or what the model in Transformers says, if it is installed. There is more than one where experts of a
    model differ in size, or a layer has two kinds.

    Args:
        config: ``config.json``.
        names: of tensors in files, which may have other prefixes than usual.

    Raises:
        CheckpointError: for a model without experts, or an unknown ``model_type``; the hint names the nearest one.
        UnsupportedProblem: if the model in Transformers has experts that polymoe does not run; what it misses is named.
    """
    types = [ConfigReader(c).text("model_type") for c in (config, text_config(config))]
    for name in types:
        if name in MODEL_FAMILIES:
            return (MODEL_FAMILIES[name],)
    parts = [part for whole in (config, text_config(config)) for part in (whole, *whole.values())]
    if not any(_ROUTED.search(key) for part in parts if isinstance(part, Mapping) for key in part):
        raise ConfigReader(config).error(
            "model_type",
            "a mixture-of-experts model",
            config.get("model_type"),
            hint="no key of this config speaks of experts: a dense model has none for polymoe to run",
        )
    if importlib.util.find_spec("transformers") is None:
        raise ConfigReader(config).error(
            "model_type",
            "a known family",
            config.get("model_type"),
            hint=f"{nearest(types[0], MODEL_FAMILIES)}. With Transformers, polymoe knows all models that have its "
            f"experts interface: {install_hint('transformers')}",
        )
    return _by_transformers(json.dumps(config, sort_keys=True), tuple(sorted(names)))


@lru_cache(maxsize=4)  # a model's config is asked for several times while it is loaded
def _by_transformers(config: str, names: tuple[str, ...]) -> tuple[ModelFamily, ...]:
    try:
        from polymoe.checkpoint.architectures.families import groups_of
    except ImportError as error:  # of a name that another version does not have
        raise MissingDependency(
            "a model without a row in polymoe.checkpoint.families.MODEL_FAMILIES",
            expected="Transformers 5.23, whose conversions of tensors polymoe asks",
            got=str(error),
            hint=install_hint("transformers"),
        ) from error
    return tuple(
        ModelFamily(name=name, model_types=(name,), places=places, describe=lambda _, moe=moe: moe)
        for name, moe, places in groups_of(json.loads(config), names)
    )


_MLP = "layers.{layer}.mlp.experts"
_W123 = PerExpert(gate="w1", up="w3", down="w2")

_ROWS = (
    ModelFamily(
        name="gpt-oss",
        model_types=("gpt_oss",),
        containers=(f"model.{_MLP}",),
        arrangements=(
            Fused(order="interleaved", dialects=("gpt_oss",)),
            Fused(order="interleaved", k_first=True, dialects=("plain",)),
            UNFUSED,
        ),
        describe=describe.gpt_oss,
        uneven_tp=True,
    ),
    ModelFamily(
        name="deepseek-v3",
        model_types=("deepseek_v3", "deepseek_v32", "kimi_k2"),
        containers=(f"model.{_MLP}",),
        describe=describe.deepseek_v3,
    ),
    ModelFamily(
        name="kimi-k2.5",
        model_types=("kimi_k25",),
        containers=(f"language_model.model.{_MLP}", f"language_model.{_MLP}", f"model.language_model.{_MLP}"),
        describe=describe.deepseek_v3,
    ),
    ModelFamily(
        name="deepseek-v4",
        model_types=("deepseek_v4",),
        containers=("layers.{layer}.ffn.experts", "model.layers.{layer}.ffn.experts", f"model.{_MLP}"),
        arrangements=(_W123, STACKED, UNFUSED),
        describe=describe.deepseek_v4,
        fp8_dialect="deepseek_v4",
    ),
    ModelFamily(
        name="deepseek-v4.1",
        model_types=("deepseek_v41",),
        containers=("layers.{layer}.ffn.experts",),
        arrangements=(_W123,),
        describe=partial(describe.deepseek_v4, hashed=0),
        fp8_dialect="deepseek_v4",
    ),
    ModelFamily(
        name="nemotron-h",
        model_types=("nemotron_h",),
        containers=("backbone.layers.{layer}.mixer.experts", "model.layers.{layer}.mixer.experts"),
        arrangements=(UNFUSED_NO_GATE, Fused(gate_up="up_proj", dialects=("plain",))),
        describe=describe.nemotron_h,
    ),
    ModelFamily(
        name="glm-4",
        model_types=("glm4_moe", "glm4_moe_lite"),
        containers=(f"model.{_MLP}",),
        describe=partial(describe.deepseek_v3, scaling=1.0, groups=(1, 1), dense=1),
    ),
    ModelFamily(
        name="qwen3",
        model_types=("qwen3_moe",),
        containers=(f"model.{_MLP}",),
        describe=partial(describe.qwen, renormalize=False),  # only if the config says so
        fp8_scale="bfloat16",
    ),
    ModelFamily(
        name="qwen3-next",
        model_types=("qwen3_next",),
        containers=(f"model.{_MLP}",),
        describe=describe.qwen,
        fp8_scale="bfloat16",
    ),
    ModelFamily(
        name="qwen3-vl",
        model_types=("qwen3_vl_moe",),
        containers=(f"model.language_model.{_MLP}", f"model.{_MLP}"),
        # [E, H, 2F] as released, [E, 2F, H] as Transformers may save it; for 2F = H the shapes are the same.
        arrangements=(Fused(k_first=True, dialects=("plain",)), STACKED, UNFUSED),
        describe=describe.qwen,
        fp8_scale="bfloat16",
    ),
    ModelFamily(
        name="qwen3.5",
        model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
        containers=(f"model.language_model.{_MLP}", f"model.{_MLP}"),
        arrangements=(STACKED, UNFUSED),
        describe=describe.qwen,
        fp8_scale="bfloat16",
    ),
    ModelFamily(
        name="mixtral",
        model_types=("mixtral",),
        containers=("model.layers.{layer}.block_sparse_moe.experts", f"model.{_MLP}"),
        arrangements=(_W123, UNFUSED, STACKED),
        describe=describe.mixtral,
    ),
    ModelFamily(
        name="llama-4",
        model_types=("llama4", "llama4_text"),
        containers=(
            "language_model.model.layers.{layer}.feed_forward.experts",
            "model.layers.{layer}.feed_forward.experts",
        ),
        arrangements=(Fused(k_first=True, dialects=("plain", "modelopt_fp8")), UNFUSED),
        describe=describe.llama4,
    ),
)

MODEL_FAMILIES: Mapping[str, ModelFamily] = {model_type: row for row in _ROWS for model_type in row.model_types}
"""Families by ``model_type``."""
