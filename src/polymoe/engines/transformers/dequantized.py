"""load_dequantized: quantized experts in Transformers without polymoe, for comparison: experts in 16 bit."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.architectures.interface import projections
from polymoe.engines.transformers.families import interface_modules, registered_names, use_own_name
from polymoe.engines.transformers.model_config import generation_config, model_config
from polymoe.engines.transformers.weights import model_from_tensors
from polymoe.errors import UnsupportedProblem
from polymoe.problem.tensors import ExpertWeights

_CONFIGS = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


def load_dequantized(
    path: str | os.PathLike[str],
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    experts: str | None = None,
    **kwargs: Any,
) -> Any:
    """A model in evaluation mode whose weights Transformers has dequantized, or whose experts in 16 bits are rounded.

    Args:
        path: a checkpoint's directory or a Hub id.
        device: one device for the whole model.
        dtype: of all weights; None is bfloat16.
        experts: a format to which experts in 16 bits are rounded.
        kwargs: for Transformers' ``from_pretrained``.

    Raises:
        CheckpointError: for a path without a checkpoint, or experts that are quantized already.
        UnsupportedProblem: for a ``quant_method`` that Transformers does not dequantize.
    """
    with Checkpoint.open(os.fspath(path), experts=experts) as checkpoint:
        for part in checkpoint.parts if experts else ():
            for layer in part.layers:
                part.spec(layer)  # raises for experts that cannot be in this format
        method = checkpoint.quantization.method
        if method not in _CONFIGS and experts is None:
            raise UnsupportedProblem(
                f"{path} dequantized by Transformers",
                expected=" or ".join(_CONFIGS),
                got=f"quantization {method!r}",
                hint="--measure packed measures the packed model only",
            )
        dequantize = None if experts else getattr(transformers, _CONFIGS[method])(dequantize=True)
        with registered_names():
            model = model_from_tensors(
                use_own_name(model_config(checkpoint)),
                checkpoint.all_tensors(),
                checkpoint.name,
                quantization_config=dequantize,
                dtype=dtype or torch.bfloat16,
                # Dequantize on the target device: a CPU takes minutes.
                device_map={"": device} if device.type == "cuda" else None,
                generation_config=generation_config(checkpoint),
                **kwargs,
            )
        for name, part, layer in interface_modules(model, checkpoint.parts) if experts else ():
            _round(model.get_submodule(name), checkpoint.parts[part].weights(layer))
    return model


@torch.no_grad()
def _round(module: Any, weights: ExpertWeights) -> None:
    """Give an experts module the dequantized weights of a layer."""
    stacks = projections(module, dict(module.named_parameters(recurse=False)))
    for e, expert in enumerate(weights):
        for name, matrix in expert.projections.items():
            stacks[name][e] = matrix.dequantize()
