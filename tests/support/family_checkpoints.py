"""Checkpoints of every family: the trained ones of models/, and variants with random weights, stored otherwise."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import torch
from store import store
from sums import token_table
from torch import Tensor

from polymoe.engines.transformers import PackedExperts
from polymoe.layer.experts import FusedExperts
from support.configs import AWQ, FP8_CHANNEL, FP8_PER_TOKEN, FP8_STATIC, GLM_NVFP4, compressed

MODELS = Path(families.__file__).parent
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
    "bits": 4, "checkpoint_format": "gptq", "desc_act": False, "group_size": 128, "quant_method": "gptq", "sym": True,
}  # fmt: skip
GLM_IGNORE = ["lm_head", "model.layers.0*", "model.layers.*.self_attn*"]
VARIANTS: dict[str, tuple[str, Change]] = {
    "glm-4 FP8 by channel": (
        "glm-4",
        _quantized(**compressed("float-quantized", FP8_CHANNEL, FP8_PER_TOKEN, ["lm_head", "re:.*mlp.gate$"])),
    ),
    "glm-4 NVFP4 of ModelOpt": ("glm-4", _quantized(**GLM_NVFP4 | {"ignore": GLM_IGNORE})),
    "qwen3 NVFP4 of ModelOpt": ("qwen3", _quantized(**GLM_NVFP4 | {"ignore": ["lm_head", "model.layers.*.mlp.gate"]})),
    "qwen3 GPTQ": ("qwen3", _quantized(**GPTQ, modules_to_not_convert=["mlp.gate", "lm_head"])),
    "qwen3 AWQ": ("qwen3", _quantized(**AWQ | {"modules_to_not_convert": ["mlp.gate", "lm_head"]})),
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


def family(name: str) -> families.TrainedFamily:
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
    """A checkpoint of a family or variant: the trained one, or one with random weights."""
    if name not in VARIANTS:
        return MODELS / family(name).directory
    torch.manual_seed(0)
    row = family(name)
    model = row.build()
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.1)  # untrained ones are 0, and would not be missed
    calibrated = {"layers.1.experts.gate_up": 4.0, "layers.1.experts.down": 2.0}
    return store(model, row, directory, largest_inputs=calibrated)


def fused_of(model: Any) -> list[FusedExperts]:
    """The packed experts of a model."""
    found = [module.fused for module in model.modules() if isinstance(module, PackedExperts)]
    assert all(fused is not None for fused in found)
    return found  # type: ignore[return-value]


def stored_nbytes(fused: FusedExperts) -> int:
    """Bytes of a packed layer but for the float32 matrices that a CPU multiplies by."""
    return sum(t.nbytes for name, t in fused.packed.tensors.items() if not name.startswith("dequantized."))


def token_ids(rows: int = 8) -> Tensor:
    """Held-out questions of one length with their answers, no padding."""
    lines = (MODELS / "sums-heldout.jsonl").read_text().splitlines()
    asked = [row for row in map(json.loads, lines) if len(row["prompt"] + row["answer"]) == 11]
    return token_table([(row["prompt"], row["answer"]) for row in asked[:rows]])[:, :11].long()
