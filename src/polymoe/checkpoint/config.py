"""Read from a checkpoint's config how the weights of each module are quantized.

The functions take dicts and read no files. The tensors take precedence over the config, so an odd config can cause a
wrong prediction but never wrong numbers.

The description is the first of ``quantization_config``, ``text_config.quantization_config``, ``compression_config``,
``text_config.compression_config`` and ``hf_quant_config.json``, which also completes a ModelOpt config without a map of
layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polymoe.checkpoint.config_reader import ConfigReader
from polymoe.checkpoint.families import ModelFamily, family_of, text_config, text_reader
from polymoe.checkpoint.quant_methods import QUANT_METHODS, Context
from polymoe.checkpoint.scheme import NamedSchemes, QuantizationConfig, Scheme
from polymoe.errors import nearest
from polymoe.formats import FORMATS


def parse_quantization(
    config: Mapping[str, Any], side: Mapping[str, Any] | None = None, family: ModelFamily | None = None
) -> QuantizationConfig:
    """Parse the quantization of ``config.json`` and ``hf_quant_config.json`` (``side``).

    Args:
        config, side: the files.
        family: the config's, if it is known already.

    Raises:
        CheckpointError: if the model family or the method is unknown (the hint names the nearest one), or the
            description has a wrong or missing key.
    """
    family, text = family or family_of(config), text_config(config)
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    half = dtype == "float16"
    plain = Scheme("plain", FORMATS["fp16" if half else "bf16"].encoding)
    nothing = QuantizationConfig(
        method="none", layers=NamedSchemes(), ignored=lambda _: False, targets=(), default=lambda: plain, plain=plain
    )
    found = _find(config, side)
    if found is None:
        return nothing
    method = _method(found)
    parse = QUANT_METHODS.get(method)
    if parse is None:
        raise found.error(
            "quant_method", "a known method", found.config.get("quant_method"), hint=nearest(method, QUANT_METHODS)
        )
    context = Context(
        keys=found,
        text=text_reader(config),
        side=ConfigReader(side or {}, "hf_quant_config.json"),
        family=family,
        scale_dtype="float16" if half else "bfloat16",
        nothing=replace(nothing, method=method),
    )
    return parse(context)


def quantization_source(config: Mapping[str, Any], side: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the description itself with its ``quant_method``; empty if the checkpoint has none."""
    found = _find(config, side)
    return {} if found is None else {**found.config, "quant_method": _method(found)}


def _find(config: Mapping[str, Any], side: Mapping[str, Any] | None) -> ConfigReader | None:
    """Find the description and remember where it was found."""
    parts = (ConfigReader(config), text_reader(config))
    for key in ("quantization_config", "compression_config"):
        for part in parts:
            if (described := part.part(key)).config:
                return described
    return ConfigReader(side, "hf_quant_config.json") if side else None


def _method(found: ConfigReader) -> str:
    """Return ``quant_method``, or infer it from other keys."""
    method = found.text("quant_method").lower()
    if not method:
        if "config_groups" in found.config and "quant_algo" not in found.config:
            return "compressed-tensors"
        if "quantization" in found.config or "quant_algo" in found.config:
            return "modelopt"
    return "modelopt" if method.startswith("modelopt") else method
