"""The trained GPT-OSS checkpoint, packed and as Transformers dequantizes it, and questions for both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config

from polymoe.engines.transformers import PackedExperts

MODELS = Path(__file__).parents[2] / "models"
CHECKPOINT = MODELS / "sums-gpt-oss-mxfp4"
HELDOUT = [json.loads(line) for line in (MODELS / "sums-heldout.jsonl").read_text().splitlines()]


def dequantized(dtype: torch.dtype) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        CHECKPOINT, quantization_config=Mxfp4Config(dequantize=True), dtype=dtype, trust_remote_code=False
    )
    model.set_experts_implementation("eager")
    # Before 5.23 Transformers keeps dequantized experts in bfloat16, whatever the dtype asked for.
    return model.to(dtype)


def batch(tokenizer: Any, rows: int = 32) -> dict[str, Tensor]:
    return dict(tokenizer([row["prompt"] for row in HELDOUT[:rows]], return_tensors="pt", padding=True))


def experts_of(model: Any) -> list[PackedExperts]:
    return [module for module in model.modules() if isinstance(module, PackedExperts)]
