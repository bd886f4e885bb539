"""load_dequantized: a quantized checkpoint in Transformers without polymoe, for comparison: experts in 16 bit."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers

from polymoe.checkpoint import Checkpoint
from polymoe.engines.transformers.families import registered_names, use_own_name
from polymoe.engines.transformers.model_config import generation_config, model_config
from polymoe.engines.transformers.weights import model_from_tensors
from polymoe.errors import UnsupportedProblem

__all__ = ["load_dequantized"]

_CONFIGS = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


def load_dequantized(
    path: str | os.PathLike[str], *, device: torch.device, dtype: torch.dtype | None = None, **kwargs: Any
) -> Any:
    """A model in evaluation mode whose weights Transformers has dequantized.

    Args:
        path: a checkpoint's directory or a Hub id.
        device: one device for the whole model.
        dtype: of all weights; None is bfloat16.
        kwargs: for Transformers' ``from_pretrained``.

    Raises:
        CheckpointError: for a path without a checkpoint.
        UnsupportedProblem: for a ``quant_method`` that Transformers does not dequantize.
    """
    with Checkpoint.open(os.fspath(path)) as checkpoint:
        method = checkpoint.quantization.method
        if method not in _CONFIGS:
            raise UnsupportedProblem(
                f"{path} dequantized by Transformers",
                expected=" or ".join(_CONFIGS),
                got=f"quantization {method!r}",
                hint="--experts packed measures the packed model only",
            )
        with registered_names():
            return model_from_tensors(
                use_own_name(model_config(checkpoint)),
                checkpoint.all_tensors(),
                checkpoint.name,
                quantization_config=getattr(transformers, _CONFIGS[method])(dequantize=True),
                dtype=dtype or torch.bfloat16,
                # Dequantize on the target device: a CPU takes minutes.
                device_map={"": device} if device.type == "cuda" else None,
                generation_config=generation_config(checkpoint),
                **kwargs,
            )
