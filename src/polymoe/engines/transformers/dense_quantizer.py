"""Transformers' own quantizer for matrices outside the experts (``dense="transformers"``).

On a GPU it keeps FP8 matrices in FP8 and quantizes their inputs, with kernels that Transformers downloads from the Hub
(package ``kernels``); on a CPU it dequantizes. It never sees the experts: their modules are replaced before it gets the
model, and their tensors are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer, get_keys_to_not_convert

from polymoe.errors import ArgumentError, CheckpointError, MissingDependency, UnsupportedProblem, quoted

DENSE = ("16bit", "transformers")
"""Choices for matrices outside the experts: 16-bit floats, or the result of Transformers' own quantizer."""

METHODS = ("fp8",)
"""The ``quant_method`` of the quantizers that are known to load a checkpoint without its experts."""

_PLAIN = re.compile(r"[\w.-]+(\*[\w.-]*)?")


def check_dense(dense: str, method: str) -> None:
    """Check a choice of :data:`DENSE` for a checkpoint's ``quant_method``.

    Raises:
        ArgumentError: for an unknown choice.
        UnsupportedProblem: if Transformers has no quantizer for this method, or none that is known to work.
    """
    if dense not in DENSE:
        raise ArgumentError("dense", expected=" or ".join(DENSE), got=repr(dense))
    if dense == "transformers" and method not in METHODS:
        raise UnsupportedProblem(
            'dense="transformers"',
            expected=f"a checkpoint of {' or '.join(METHODS)}",
            got=method,
            hint='dense="16bit" dequantizes quantized matrices outside the experts',
        )


def dense_quantizer(model: Any, source: dict[str, Any], experts: Iterable[str], device_map: Any) -> HfQuantizer:
    """Transformers' own quantizer, after it has prepared ``model`` for its weights.

    Args:
        model: without weights, its experts replaced.
        source: the checkpoint's ``quantization_config``.
        experts: names of the modules that replace experts.

    Raises:
        MissingDependency: if a package that it needs is not installed.
        CheckpointError: if the config skips modules by patterns that Transformers might not finish to match.
    """
    for name in source.get("modules_to_not_convert") or ():
        # Transformers matches them as regular expressions, with backtracking.
        if not _PLAIN.fullmatch(name):
            raise CheckpointError(
                "config.json: quantization_config.modules_to_not_convert",
                expected='names of modules, with at most one star, for dense="transformers"',
                got=quoted(name),
                hint='dense="16bit" accepts other patterns',
            )
    try:
        quantizer = AutoHfQuantizer.from_config(source, pre_quantized=True)
        quantizer.validate_environment(device_map=device_map, weights_only=True)
        config: Any = quantizer.quantization_config
        # A list in the config replaces Transformers' default, which skips the head.
        skipped = config.modules_to_not_convert
        skipped = get_keys_to_not_convert(model) if skipped is None else skipped
        config.modules_to_not_convert = [*skipped, *experts]
        if not config.dequantize:
            from transformers.integrations.finegrained_fp8 import load_finegrained_fp8_kernel

            load_finegrained_fp8_kernel()  # raises if the kernels are not there
        quantizer._process_model_before_weight_loading(model, device_map=device_map)
    except ImportError as error:
        raise MissingDependency(
            'dense="transformers"',
            expected="what Transformers' quantizer needs",
            got=str(error).splitlines()[0],
            hint='install it, or use dense="16bit"',
        ) from error
    return quantizer
