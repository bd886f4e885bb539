"""The baselines: a quantized checkpoint in Transformers without polymoe's experts, every weight in 16 or 32 bit.

`own` is Transformers' own dequantizing path, where it has one that works; `filled` is Transformers' model, given
weights that polymoe has dequantized.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.families import Fused
from polymoe.engines.transformers.families import registered_names, use_own_name


def auto_class(config: Any) -> Any:
    """The auto class that loads the whole model of ``config``, with its vision tower if it has one."""
    return AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModelForCausalLM


def own(path: str | Path, dtype: torch.dtype) -> Any:
    """Return the checkpoint as Transformers dequantizes it, or None where Transformers cannot.

    It has no path for ModelOpt's files, needs another package for GPTQ and AWQ, and reads compressed-tensors' NVFP4
    experts without their global scale (seen in 5.23), so that their weights come out thousands of times too large.
    """
    described = json.loads((Path(path) / "config.json").read_text()).get("quantization_config", {})
    method = described.get("quant_method")
    if method == "compressed-tensors" and ("nvfp4" in described["format"] or not _has("compressed_tensors")):
        return None
    if method == "fp8" and not _has("accelerate"):
        return None
    configs = {
        "compressed-tensors": transformers.CompressedTensorsConfig,
        "fp8": transformers.FineGrainedFP8Config,
        "mxfp4": transformers.Mxfp4Config,
    }
    if method not in configs:
        return None
    with registered_names():
        config = use_own_name(AutoConfig.from_pretrained(path, trust_remote_code=False))
        wanted = configs[method](dequantize=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the checkpoint has a quantization config already
            return auto_class(config).from_pretrained(
                path, config=config, quantization_config=wanted, dtype=dtype, trust_remote_code=False
            )


def filled(path: str | Path, dtype: torch.dtype) -> Any:
    """Return Transformers' model of the checkpoint, filled with weights that are dequantized to float32 beforehand."""
    checkpoint = Checkpoint.open(path)
    descriptions = ("quantization_config", "compression_config")
    plain = {key: value for key, value in checkpoint.config.items() if key not in descriptions}
    if "text_config" in plain:
        plain["text_config"] = {k: v for k, v in plain["text_config"].items() if k not in descriptions}
    others = {name: tensor[...].contiguous().clone() for name, tensor in checkpoint.dense_tensors().items()}
    with tempfile.TemporaryDirectory() as directory, registered_names():
        (Path(directory) / "config.json").write_text(json.dumps(plain))
        save_file(others, Path(directory) / "model.safetensors", {"format": "pt"})
        config = use_own_name(AutoConfig.from_pretrained(directory, trust_remote_code=False))
        said = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # the experts are not there yet
        model = auto_class(config).from_pretrained(
            directory, config=config, dtype=dtype, experts_implementation="eager", trust_remote_code=False
        )
        transformers.logging.set_verbosity(said)
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            _fill(module, checkpoint, int(name.split("layers.")[1].split(".")[0]))
    return model


@torch.no_grad()
def _fill(module: Any, checkpoint: Checkpoint, layer: int) -> None:
    """Give an experts module of Transformers the numbers of a layer."""
    held = next(a for a in reversed(checkpoint.family.arrangements) if isinstance(a, Fused))
    weights = checkpoint.weights(layer)
    gate_up, down = weights.dequantize()
    if held.order == "interleaved":
        gate_up = torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2)
    for name, value in ((held.gate_up, gate_up), (held.down, down)):
        getattr(module, name).copy_(value.mT if held.k_first else value)
    if weights.spec.bias:
        gate, up, last = (torch.stack([e.vectors[f"{p}_bias"] for e in weights]) for p in ("gate", "up", "down"))
        getattr(module, f"{held.gate_up}_bias").copy_(torch.stack((gate, up), 2).flatten(1, 2))
        getattr(module, f"{held.down}_bias").copy_(last)


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
