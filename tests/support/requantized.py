"""sums-qwen3-fp8 with its experts in another format and everything else in 16 bits.

An engine without kernels for quantized linear layers, as vLLM is on a CPU, can then still load every format of experts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.write import write_checkpoint

SOURCE = Path(__file__).parents[2] / "models" / "sums-qwen3-fp8"
_LAYERS = range(4)
_DENSE = ["lm_head", *(f"model.layers.{n}.self_attn.{p}_proj" for n in _LAYERS for p in "qkvo")]
_DENSE += [f"model.layers.{n}.mlp.gate" for n in _LAYERS]


def _compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    whole = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "observer": "minmax",
             "observer_kwargs": {}, "symmetric": True}  # fmt: skip
    group = {
        "format": format,
        "input_activations": {**whole, **inputs} if inputs else None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**whole, **weights},
    }
    return {
        "config_groups": {"group_0": group},
        "format": format,
        "ignore": [*_DENSE, "re:.*self_attn.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


_FP8 = {"num_bits": 8, "type": "float"}
_FP4 = {"num_bits": 4, "type": "float"}
_FP4_INPUT = {**_FP4, "dynamic": "local", "group_size": 16, "strategy": "tensor_group"}
_MODELOPT = {"producer": {"name": "modelopt", "version": "0.43.0"}, "quant_method": "modelopt", "ignore": _DENSE}
_GPTQ = {
    "bits": 4, "checkpoint_format": "gptq", "desc_act": False, "group_size": 128, "quant_method": "gptq", "sym": True,
}  # fmt: skip

FORMATS: dict[str, dict[str, Any] | None] = {
    "BF16": None,
    "FP8 in blocks": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": _DENSE,
    },
    "FP8, one scale": {"activation_scheme": "static", "quant_method": "fp8", "modules_to_not_convert": _DENSE},
    "FP8 by channel": _compressed(
        "float-quantized", {**_FP8, "strategy": "channel"}, {**_FP8, "dynamic": True, "strategy": "token"}
    ),
    "FP8 of ModelOpt": {**_MODELOPT, "quant_algo": "FP8"},
    "INT4 in groups of 32": _compressed(
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    ),
    "NVFP4": _compressed(
        "nvfp4-pack-quantized", {**_FP4, "strategy": "tensor_group", "group_size": 16}, _FP4_INPUT
    ),
    "NVFP4 of ModelOpt": {**_MODELOPT, "quant_algo": "NVFP4", "group_size": 16},
    "MXFP4": _compressed("mxfp4-pack-quantized", {**_FP4, "strategy": "group", "group_size": 32}),
    "GPTQ": {**_GPTQ, "modules_to_not_convert": _DENSE, "dynamic": {"-:.*self_attn.*": {}, "-:.*mlp.gate$": {}}},
}  # fmt: skip
"""``quantization_config`` by the format's name."""


def write(format: str, directory: Path, source: Path = SOURCE, plain: tuple[int, ...] = ()) -> Path:
    """Write the model with experts in ``format``, a key of :data:`FORMATS`, to a new directory.

    ``source`` has the weights: the bundled checkpoint, or one that this function wrote. Layers in ``plain`` stay in 16
    bits, which formats of compressed-tensors allow.
    """
    checkpoint = Checkpoint.open(source)
    config = json.loads((SOURCE / "config.json").read_text())
    config.pop("quantization_config")
    quantization = FORMATS[format]
    if quantization is not None:
        ignored = {"ignore": [*quantization["ignore"], *(f"re:.*layers.{n}.mlp.*" for n in plain)]} if plain else {}
        config["quantization_config"] = quantization | ignored
    others = {name: tensor[...] for name, tensor in checkpoint.dense_tensors().items()}
    write_checkpoint(
        directory, config, {n: checkpoint.weights(n).dequantize() for n in checkpoint.layers}, other_tensors=others
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(SOURCE / name, directory / name)
    return directory
