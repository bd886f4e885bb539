"""Models whose sizes ship with the package."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polymoe.checkpoint.hub import HUB_ID
from polymoe.checkpoint.known_models import KnownModel, known_models

MODELS = known_models()
COUNTED = {name: model.parameters for name, model in MODELS.items() if model.parameters is not None}


def experts_parameters(model: KnownModel) -> int:
    checkpoint = model.checkpoint()
    specs = [checkpoint.spec(layer) for layer in checkpoint.layers]
    weights = sum(n * k for s in specs for n, k in (s.matrix_shape(p) for p in s.encodings) for _ in range(s.experts))
    return weights + sum(s.experts * s.matrix_shape(p)[0] for s in specs if s.bias for p in s.encodings)


def test_well_known_models() -> None:
    assert len(MODELS) >= 60
    assert all(HUB_ID.fullmatch(name) and model.source for name, model in MODELS.items())
    formats = {(c := model.checkpoint()).spec(c.layers[0]).format for model in MODELS.values()}
    assert formats >= {"bf16", "fp8_block128", "fp8_tensor", "int4_g32", "int4_g128", "int4_g128_zp", "mxfp4", "nvfp4"}


@pytest.mark.parametrize("name", COUNTED)
def test_the_number_of_parameters(name: str) -> None:
    """Experts by the config and everything else by its bytes add up to what others have counted. A few vectors, and
    the tables of DeepSeek V4, have more than two bytes for each number."""
    model = MODELS[name]
    found = experts_parameters(model) + model.dense.total_bytes / 2
    assert found == pytest.approx(COUNTED[name], rel=1e-4)


def test_a_model_like_another() -> None:
    fp8, bf16 = MODELS["Qwen/Qwen3-30B-A3B-FP8"], MODELS["Qwen/Qwen3-30B-A3B"]
    assert (fp8.dense, fp8.parameters) == (bf16.dense, bf16.parameters)
    assert {k: v for k, v in fp8.config.items() if k != "quantization_config"} == bf16.config
    assert fp8.checkpoint().spec(0).format == "fp8_block128"


def test_a_release_that_changed_is_not_described() -> None:
    model = MODELS["openai/gpt-oss-20b"]
    checkpoint = model.checkpoint()
    assert model.describes(checkpoint)
    changed = replace(model, config={**model.config, "num_local_experts": 64}).checkpoint()
    assert not model.describes(changed)
    checkpoint.name = "somebody/gpt-oss-20b"
    assert not model.describes(checkpoint)
