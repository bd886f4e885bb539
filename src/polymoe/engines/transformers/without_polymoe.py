"""Quantized checkpoints in Transformers without polymoe, for comparison: experts in 16 bit, or packed by Transformers'
own quantizers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from transformers.integrations import hub_kernels
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.architectures.interface import projections
from polymoe.engines.transformers.families import interface_modules, registered_names, use_own_name
from polymoe.engines.transformers.model_config import generation_config, model_config
from polymoe.engines.transformers.weights import model_from_tensors
from polymoe.errors import UnsupportedProblem

_DEQUANTIZED = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
_PACKED = ("fp8", "mxfp4")
_NO_DEEPGEMM = "TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR"


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
        if method not in _DEQUANTIZED and experts is None:
            raise UnsupportedProblem(
                f"{path} dequantized by Transformers",
                expected=" or ".join(_DEQUANTIZED),
                got=f"quantization {method!r}",
                hint="--measure packed measures the packed model only",
            )
        dequantize = None if experts else getattr(transformers, _DEQUANTIZED[method])(dequantize=True)
        # Dequantize on the target device: a CPU takes minutes.
        model = _load(checkpoint, device, dtype, quantization_config=dequantize, **kwargs)
        for name, part, layer in interface_modules(model, checkpoint.parts) if experts else ():
            module = model.get_submodule(name)
            with torch.no_grad():
                stacks = projections(module, dict(module.named_parameters(recurse=False)))
                for e, expert in enumerate(checkpoint.parts[part].weights(layer)):
                    for projection, matrix in expert.projections.items():
                        stacks[projection][e] = matrix.dequantize()
    return model


def _load(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype | None, **kwargs: Any) -> Any:
    """The model as Transformers loads it, on ``device``; ``kwargs`` are for ``from_pretrained``."""
    with registered_names():
        return model_from_tensors(
            use_own_name(model_config(checkpoint)),
            checkpoint.all_tensors(),
            checkpoint.name,
            dtype=dtype or torch.bfloat16,
            device_map={"": device} if device.type == "cuda" else None,
            generation_config=generation_config(checkpoint),
            **kwargs,
        )


@contextmanager
def local_kernels() -> Iterator[None]:
    """Within it nothing is downloaded: the package `kernels` finds kernels where its environment variable
    ``LOCAL_KERNELS`` says, or in the Hub's cache, also those that Transformers asks for while a model runs.

    DeepGEMM is optional for FP8. Where it is not found Transformers is told so: else it looks for it again in every
    call of a linear layer.
    """
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    without, told = os.environ.get(_NO_DEEPGEMM), False
    try:
        if torch.cuda.is_available() and without is None and hub_kernels.lazy_load_kernel("deep-gemm") is None:
            os.environ[_NO_DEEPGEMM], told = "1", True
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
        if told:
            del os.environ[_NO_DEEPGEMM]


def load_transformers_packed(
    path: str | os.PathLike[str],
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    experts: str | None = None,
    **kwargs: Any,
) -> Any:
    """A model in evaluation mode whose experts stay packed in Transformers. Use and run it within
    :func:`local_kernels`. The arguments are those of :func:`load_dequantized`, without ``experts``: Transformers packs
    what is stored in the format.

    Raises:
        CheckpointError: for a path without a checkpoint, or if Transformers does not find its kernels.
        UnsupportedProblem: if Transformers would expand the experts here, or cannot load them; it says why.
    """
    where = f"{path} packed by Transformers {transformers.__version__}"
    with Checkpoint.open(os.fspath(path)) as checkpoint:
        method = checkpoint.quantization.method
        if method not in _PACKED or experts is not None:
            expected = "quantization " + " or ".join(map(repr, _PACKED))
            got = repr(method) if experts is None else f"{experts} while loading"
            raise UnsupportedProblem(where, expected=expected, got=got)
        source = model_config(checkpoint).quantization_config
        with _warnings() as said:
            quantizer: Any = AutoHfQuantizer.from_config(source, pre_quantized=True)
            quantizer.validate_environment(device_map={"": device} if device.type == "cuda" else None)
            if not quantizer.quantization_config.dequantize:
                model = _load(checkpoint, device, dtype, **kwargs)
                if hasattr(model, "hf_quantizer"):  # else the weights were expanded after all
                    return model
    raise UnsupportedProblem(where, expected="packed experts", got=said[0] if said else "16-bit experts")


def fixed_kernels(model: Any) -> str | None:
    """The name of the kernels of a model whose experts have no choice of implementations, or None."""
    names = {type(module).__name__ for module in model.modules()}
    return "triton_kernels" if "Mxfp4GptOssExperts" in names else None


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what Transformers' quantizers warn of: why they expand weights."""
    said: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(" ".join(record.getMessage().split()))

    theirs, handler = transformers_logging.get_logger("transformers.quantizers"), Collector(logging.WARNING)
    level = theirs.level
    theirs.addHandler(handler)
    theirs.setLevel(logging.WARNING)
    cleared: Any = transformers_logging.warning_once
    cleared.cache_clear()  # what an earlier model was told counts for this one too
    try:
        yield said
    finally:
        theirs.removeHandler(handler)
        theirs.setLevel(level)
