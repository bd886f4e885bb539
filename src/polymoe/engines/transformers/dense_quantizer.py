"""Transformers' own quantizer for what is not an expert, where one asks for it (``dense="transformers"``).

It keeps FP8 matrices in FP8 on a GPU, for which Transformers fetches kernels from the Hub (package ``kernels``), and
quantizes their inputs; on a CPU it dequantizes. The experts are out of its reach: they are packed before it sees the
model, and their tensors are not shown to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer, get_keys_to_not_convert

from polymoe.errors import ArgumentError, MissingDependency, UnsupportedProblem

__all__ = ["DENSE", "METHODS", "check_dense", "dense_quantizer"]

DENSE = ("16bit", "transformers")
"""What matrices outside the experts may be: 16-bit floats, or what Transformers' own quantizer makes of them."""

METHODS = ("fp8",)
"""The ``quant_method`` of those quantizers that are known to load such checkpoints without their experts."""


def check_dense(dense: str, method: str) -> None:
    """Check a wish against a checkpoint's ``quant_method``.

    Raises:
        ArgumentError: there is no such choice.
        UnsupportedProblem: Transformers has no quantizer for this method, or one that is not known to work.
    """
    if dense not in DENSE:
        raise ArgumentError("dense", expected=" or ".join(DENSE), got=repr(dense))
    if dense == "transformers" and method not in METHODS:
        raise UnsupportedProblem(
            'dense="transformers"', expected=f"a checkpoint of {' or '.join(METHODS)}", got=method,
            hint='dense="16bit" dequantizes what is quantized outside the experts',
        )  # fmt: skip


def dense_quantizer(model: Any, source: dict[str, Any], experts: Iterable[str], device_map: Any) -> HfQuantizer:
    """Transformers' own quantizer, with ``model`` made ready for it.

    Args:
        model: without weights, its experts replaced.
        source: the checkpoint's ``quantization_config``.
        experts: names of the modules that replace experts.
        device_map: as ``from_pretrained`` has it.

    Raises:
        MissingDependency: a package that it needs is not installed.
    """
    try:
        quantizer = AutoHfQuantizer.from_config(source, pre_quantized=True)
        quantizer.validate_environment(device_map=device_map, weights_only=True)
        config: Any = quantizer.quantization_config
        _keep(model, config, experts)
        quantizer._process_model_before_weight_loading(model, device_map=device_map)
    except ImportError as error:
        raise MissingDependency(
            'dense="transformers"', expected="what Transformers' own quantizer needs", got=str(error).splitlines()[0],
            hint='install it, or dense="16bit"',
        ) from error  # fmt: skip
    return quantizer


def _keep(model: Any, config: Any, experts: Iterable[str]) -> None:
    """Let the quantizer pass over packed experts, and check that what it makes of the rest can run."""
    # A list of its own stands in place of what Transformers leaves alone by default, the head above all.
    default = get_keys_to_not_convert(model) if config.modules_to_not_convert is None else config.modules_to_not_convert
    config.modules_to_not_convert = [*default, *experts]
    if not config.dequantize:
        from transformers.integrations.finegrained_fp8 import load_finegrained_fp8_kernel

        load_finegrained_fp8_kernel()
