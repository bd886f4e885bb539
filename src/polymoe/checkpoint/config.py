"""Quantization: what a checkpoint's config says of how each module's weights are stored.

Pure: takes dicts, reads no files. The tensors themselves count more than what is said here, so an odd config costs a
wrong prediction, never wrong numbers.

Where the description lives, first found first taken: ``quantization_config``, ``text_config.quantization_config``,
``compression_config``, ``text_config.compression_config``, and ``hf_quant_config.json``, which also completes a
ModelOpt config that lacks its per-layer map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polymoe.checkpoint.config_reader import Keys
from polymoe.checkpoint.families import family_of, text_config
from polymoe.checkpoint.quant_methods import METHODS, Context
from polymoe.checkpoint.scheme import Quantization, Scheme, matcher
from polymoe.errors import CheckpointError, nearest
from polymoe.formats import FORMATS

__all__ = ["Quantization", "Scheme", "parse_quantization", "quantization_source"]


def parse_quantization(config: Mapping[str, Any], side: Mapping[str, Any] | None = None) -> Quantization:
    """What ``config.json`` and ``hf_quant_config.json`` (``side``) say of quantization.

    Raises:
        CheckpointError: the model family or the method is unknown (the hint has the nearest known), or the
            description has a wrong or missing key.
    """
    family, text = family_of(config), text_config(config)
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    half = dtype == "float16"
    plain = Scheme("plain", FORMATS["fp16" if half else "bf16"].encoding)
    nothing = Quantization(
        method="none", layers={}, ignored=matcher(()), targets=(), default=lambda: plain, plain=plain
    )
    found = _find(config, side)
    if found is None:
        return nothing
    method = _method(found.config)
    parse = METHODS.get(method)
    if parse is None:
        raise CheckpointError(
            f"{found.where}.quant_method", expected="a known method", got=repr(method), hint=nearest(method, METHODS)
        )
    context = Context(
        keys=found,
        text=text,
        side=side or {},
        family=family,
        scale_dtype="float16" if half else "bfloat16",
        nothing=replace(nothing, method=method),
    )
    return parse(context)


def quantization_source(config: Mapping[str, Any], side: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The description itself, wherever it is, with its ``quant_method``; empty for a checkpoint without one."""
    found = _find(config, side)
    return {} if found is None else {**found.config, "quant_method": _method(found.config)}


def _find(config: Mapping[str, Any], side: Mapping[str, Any] | None) -> Keys | None:
    """The description, with the name of the place where it was found."""
    text = text_config(config)
    parts = {"config.json": config} if text is config else {"config.json": config, "config.json: text_config": text}
    for key in ("quantization_config", "compression_config"):
        for where, part in parts.items():
            if described := Keys(part, where).mapping(key):
                return Keys(described, f"{where}: {key}")
    return Keys(side, "hf_quant_config.json") if side else None


def _method(found: Mapping[str, Any]) -> str:
    """``quant_method``, or what else gives the method away."""
    method = found.get("quant_method")
    if method is None:
        if "config_groups" in found and "quant_algo" not in found:
            return "compressed-tensors"
        if "quantization" in found or "quant_algo" in found:
            return "modelopt"
    method = str(method).lower()
    return "modelopt" if method.startswith("modelopt") else method
