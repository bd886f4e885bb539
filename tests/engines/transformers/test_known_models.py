"""Sizes that ship with the package are those of Transformers' models, which are built on the meta device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from polymoe.checkpoint.dense_size import _VISION, DenseSize, dense_size
from polymoe.checkpoint.known_models import known_models
from polymoe.checkpoint.load import Checkpoint

SUMS = Path(__file__).parents[3] / "models" / "sums-gpt-oss-mxfp4"
QUICK = ("openai/gpt-oss-20b",)
AS = {"kimi_k2": "deepseek_v3"}
"""Families that Transformers has under another name."""


def on_meta(config: Mapping[str, Any]) -> Any:
    """A model of Transformers in bfloat16, without memory."""
    fields = {k: v for k, v in config.items() if k != "quantization_config"}
    if text := fields.get("text_config"):
        fields["text_config"] = {**text, "model_type": AS.get(text["model_type"], text["model_type"])}
        fields["text_config"].pop("quantization_config", None)
    kind = AutoModelForImageTextToText if text else AutoModelForCausalLM
    model_type = fields.pop("model_type")
    parsed = CONFIG_MAPPING[AS.get(model_type, model_type)].from_dict(fields)
    with torch.device("meta"):
        return kind.from_config(parsed, dtype=torch.bfloat16, trust_remote_code=False)


def size_on_meta(model: Any) -> DenseSize:
    tensors = {name: t for name, t in model.state_dict(keep_vars=True).items() if ".experts." not in name}
    embedding = model.get_input_embeddings().weight
    unread = [t for name, t in tensors.items() if t is embedding or _VISION.search(name)]
    assert any(t is embedding for t in unread)
    return DenseSize(sum(t.nbytes for t in tensors.values()), sum(t.nbytes for t in unread))


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in known_models()]
)
def test_dense_bytes(name: str) -> None:
    model = known_models()[name]
    assert size_on_meta(on_meta(model.config)) == model.dense


def test_headers_give_the_same() -> None:
    """The number for a known model and the one for a checkpoint on disk mean the same."""
    checkpoint = Checkpoint.open(SUMS)
    config = {k: v for k, v in checkpoint.config.items() if not re.match("dtype|torch_dtype|transformers_", k)}
    assert size_on_meta(on_meta(config)) == dense_size(checkpoint)
