"""Every architecture of the installed Transformers that has its experts interface: found, not listed.

Each is built tiny from its own config class, saved as its releases are, loaded by polymoe and compared with
Transformers' own experts in float32.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from polymoe import load
from polymoe.checkpoint.architectures.config import model_class
from polymoe.checkpoint.architectures.interface import has_interface
from polymoe.errors import PolymoeError
from support.tiny_models import architectures, tiny_config

TOKENIZER = Path(__file__).parents[3] / "models" / "sums-qwen3-fp8"

REFUSED = {
    "diffusion_gemma": "return_dict_in_generate: expected no such field",  # it generates in its own way
    "inkling2": "Inkling2Experts: expected an activation equal to .*, got another gate",  # soft caps
    "muse_spark": "expected MuseSparkExperts with has_post_expert_norm=False",
    "openai_privacy_filter": "expected a model that generates text",
}
"""What is not loaded, and the words that name the reason."""


def build(model_type: str) -> Any:
    """A random model in float32, whose weights bfloat16 can hold."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    try:
        model = model_class(config)._from_config(config, dtype=torch.float32).eval()
    except ModuleNotFoundError as error:
        pytest.skip(f"{model_type}: {error}")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name:
                nn.init.normal_(parameter, std=0.2)
            parameter.copy_(parameter.bfloat16())
    return model.requires_grad_(False)


def save(model: Any, path: Path) -> None:
    """As ``save_pretrained`` does in bfloat16, and a tokenizer."""
    copy.deepcopy(model).bfloat16().save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, path / name)


def logits(model: Any) -> Tensor:
    ids = torch.tensor([[3, 5, 8, 13, 2, 7]])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def error(got: Any, expected: Tensor) -> float:
    """The largest difference of logits, relative to the largest logit."""
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", architectures())
def test_bf16(model_type: str, tmp_path: Path) -> None:
    if model_type in REFUSED:
        tiny_config(model_type).save_pretrained(tmp_path)
        if model_type == "diffusion_gemma":
            save(build(model_type), tmp_path)
        with pytest.raises(PolymoeError, match=REFUSED[model_type]):
            load(tmp_path, device="cpu", dtype=torch.bfloat16)
        return
    model = build(model_type)
    save(model, tmp_path)
    loaded, _ = load(tmp_path, device="cpu", dtype=torch.bfloat16)
    # Everything but the experts in float32, so that a difference is theirs.
    for module in loaded.modules():
        if not has_interface(module):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.float() if buffer.is_floating_point() else buffer
    assert error(logits(loaded), logits(model)) < 1e-4
