"""Checkpoints of every family with random weights, stored as the releases are; and what Transformers makes of one when
every weight has been turned into numbers beforehand."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import torch
from safetensors.torch import save_file
from store import store
from torch import Tensor
from transformers import AutoConfig

from checkpoint.configs import FP8_CHANNEL, FP8_PER_TOKEN, FP8_STATIC, compressed
from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.families import Fused
from polymoe.engines.transformers import PackedExperts
from polymoe.engines.transformers_families import auto_class, register_names, use_own_name
from polymoe.experts import FusedExperts

Change = Callable[[dict[str, Any]], None]


def _quantized(**description: Any) -> Change:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"] = description

    return change


def _moved(key: str) -> Change:
    def change(config: dict[str, Any]) -> None:
        config[key] = config.pop("quantization_config")

    return change


def _kimi_k25(config: dict[str, Any]) -> None:
    """Kimi-K2.5: the same text model, its quantization included, under a wrapper with a vision tower."""
    text = {**config, "model_type": "kimi_k2"}
    vision = {
        "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 14,
        "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2,
    }  # fmt: skip
    config.clear()
    config |= {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text,
        "vision_config": vision, "projection_hidden_size": 64, "tie_word_embeddings": False,
        "image_token_id": 15, "video_token_id": 14, "vision_start_token_id": 13,
    }  # fmt: skip


GPTQ = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "desc_act": False,
    "group_size": 128,
    "quant_method": "gptq",
    "sym": True,
}
AWQ = {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}
NVFP4 = {
    "group_size": 16,
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "quant_algo": "NVFP4",
    "quant_method": "modelopt",
}
VARIANTS: dict[str, tuple[str, Change]] = {
    "glm-4 FP8 by channel": (
        "glm-4",
        _quantized(**compressed("float-quantized", FP8_CHANNEL, FP8_PER_TOKEN, ["lm_head", "re:.*mlp.gate$"])),
    ),
    "glm-4 NVFP4 of ModelOpt": (
        "glm-4",
        _quantized(**NVFP4, ignore=["lm_head", "model.layers.0*", "model.layers.*.self_attn*"]),
    ),
    "qwen3 NVFP4 of ModelOpt": ("qwen3", _quantized(**NVFP4, ignore=["lm_head", "model.layers.*.mlp.gate"])),
    "qwen3 GPTQ": ("qwen3", _quantized(**GPTQ, modules_to_not_convert=["mlp.gate", "lm_head"])),
    "qwen3 AWQ": ("qwen3", _quantized(**AWQ, modules_to_not_convert=["mlp.gate", "lm_head"])),
    "qwen3 FP8 in ragged blocks": (
        "qwen3",
        lambda config: config.update(hidden_size=192, moe_intermediate_size=160, head_dim=48),
    ),
    "mixtral FP8, one scale": ("mixtral", _quantized(**FP8_STATIC, modules_to_not_convert=["gate", "lm_head"])),
    "deepseek-v4 FP8 experts": ("deepseek-v4", lambda config: config.update(expert_dtype="fp8")),
    "kimi-k2 under compression_config": ("kimi-k2", _moved("compression_config")),
    "kimi-k2.5": ("kimi-k2", _kimi_k25),
}
"""Other quantizations of the families, and other places for their description: from which family, and what differs."""


def family(name: str) -> families.Family:
    """A family of models/families.py, or a variant of one."""
    base, change = VARIANTS.get(name, (name, lambda config: None))
    found = families.FAMILIES[base]()
    config = copy.deepcopy(found.config)
    change(config)
    renames = found.renames
    if config["model_type"] == "kimi_k25":
        renames = ((r"^model\.language_model\.", "language_model.model."), (r"^lm_head\.", "language_model.lm_head."))
    return replace(found, config=config, renames=renames)


def write(name: str, directory: Path) -> Path:
    """A checkpoint of a family or variant, with random weights."""
    torch.manual_seed(0)
    row = family(name)
    model = row.build()
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.1)  # untrained ones are 0, and would not be missed
    calibrated = {"layers.1.experts.gate_up": 4.0, "layers.1.experts.down": 2.0}
    return store(
        model, row.config, directory, renames=row.renames, float32=row.float32, unquantized=row.unquantized,
        largest_inputs=calibrated,
    )  # fmt: skip


def dequantized(path: Path, directory: Path, dtype: torch.dtype) -> Any:
    """Transformers' own model of a checkpoint, every weight dequantized to float32 before Transformers sees it."""
    checkpoint = Checkpoint.open(path)
    plain = {k: v for k, v in checkpoint.config.items() if k not in ("quantization_config", "compression_config")}
    if "text_config" in plain:
        plain["text_config"] = {k: v for k, v in plain["text_config"].items() if k != "quantization_config"}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(plain))
    others = {name: tensor[...].contiguous().clone() for name, tensor in checkpoint.others().items()}
    save_file(others, directory / "model.safetensors", {"format": "pt"})
    register_names()
    config = use_own_name(AutoConfig.from_pretrained(directory))
    model = auto_class(config).from_pretrained(directory, config=config, dtype=dtype, experts_implementation="eager")
    held = next(a for a in reversed(checkpoint.family.arrangements) if isinstance(a, Fused))
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            fill(module, checkpoint, int(name.split("layers.")[1].split(".")[0]), held)
    return model


def fill(module: Any, checkpoint: Checkpoint, layer: int, held: Fused) -> None:
    """Give an experts module of Transformers the numbers of a layer."""
    weights = checkpoint.weights(layer)
    gate_up, down = weights.dequantize()
    biases = (
        [torch.stack([getattr(e, f"{p}_bias") for e in weights]) for p in ("gate", "up", "down")]
        if weights.spec.bias
        else []
    )
    if held.order == "interleaved":
        gate_up = torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2)
    with torch.no_grad():
        for name, value in ((held.gate_up, gate_up), (held.down, down)):
            getattr(module, name).copy_(value.mT if held.k_first else value)
        if biases:
            getattr(module, f"{held.gate_up}_bias").copy_(torch.stack(biases[:2], 2).flatten(1, 2))
            getattr(module, f"{held.down}_bias").copy_(biases[2])


def fused_of(model: Any) -> list[FusedExperts]:
    """The packed experts of a model."""
    found = [module.fused for module in model.modules() if isinstance(module, PackedExperts)]
    assert all(fused is not None for fused in found)
    return found  # type: ignore[return-value]


def token_ids(rows: int = 8) -> Tensor:
    """Questions of one length, no padding."""
    return torch.randint(3, 16, (rows, 10), generator=torch.Generator().manual_seed(1))
