"""Quantization: what a checkpoint's config says of how each module's weights are stored.

Pure: takes dicts, reads no files. What the tensors themselves say comes later and counts more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polymoe.checkpoint.families import text_config
from polymoe.errors import CheckpointError, nearest
from polymoe.formats import FORMATS, Encoding
from polymoe.problem import ActivationMode

__all__ = ["Quantization", "Scheme", "parse_quantization"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one module's weight is stored.

    Attributes:
        dialect: names and arrangement of its tensors, a key of ``DIALECTS``.
        encoding: what they mean; the scales' dtype is the usual one where the config does not say.
        activations: how the checkpoint's authors meant the module's input to be quantized.
    """

    dialect: str
    encoding: Encoding
    activations: ActivationMode = "16bit"


@dataclass(frozen=True, slots=True)
class Quantization:
    """A checkpoint's scheme for every module.

    Attributes:
        method: the config's ``quant_method``, or "none".
        default: the scheme of modules that nothing else is said of.
    """

    method: str
    default: Scheme

    def scheme(self, module: str) -> Scheme:
        """The scheme of ``module``, named as in the checkpoint: ``model.layers.3.mlp.experts.0.up_proj``, or of
        stacked experts ``model.layers.3.mlp.experts.gate_up_proj``."""
        return self.default


def parse_quantization(config: Mapping[str, Any], side: Mapping[str, Any] | None = None) -> Quantization:
    """What ``config.json`` and ``hf_quant_config.json`` (``side``) say of quantization.

    Raises:
        CheckpointError: the method is unknown (the hint has the nearest known), or its description is wrong.
    """
    text = text_config(config)
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    plain = Scheme("plain", FORMATS["fp16" if dtype == "float16" else "bf16"].encoding)
    described = config.get("quantization_config")
    if not described:
        return Quantization("none", plain)
    method = described.get("quant_method")
    if method != "mxfp4":
        raise CheckpointError(
            "config.json: quantization_config.quant_method", got=repr(method), hint=nearest(str(method), ["mxfp4"])
        )
    return Quantization("mxfp4", Scheme("gpt_oss", FORMATS["mxfp4"].encoding))
