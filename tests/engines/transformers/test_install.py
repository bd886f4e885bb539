"""install() makes everything that loads a model pack its experts; uninstall() leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import polymoe
from polymoe.errors import ArgumentError, CheckpointError, UnsupportedProblem
from support.written import patch_config

pytest.importorskip("transformers")

from dequantized import auto_class
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    modeling_utils,
    pipeline,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoQuantizationConfig

from polymoe.engines.transformers import PackedExperts, PackedQuantizer, install, uninstall
from polymoe.engines.transformers.loading import installed
from support.family_checkpoints import token_ids
from support.packed_model import CHECKPOINT, batch, dequantized, experts_of

Checkpoints = Callable[[str], Path]


@pytest.mark.usefixtures("installed")
def test_from_pretrained_packs_once_installed() -> None:
    model, info = AutoModelForCausalLM.from_pretrained(CHECKPOINT, output_loading_info=True, trust_remote_code=False)
    assert len(experts_of(model)) == 4
    assert not any(info.values()), info
    # As lm-eval calls it.
    again = AutoModelForCausalLM.from_pretrained(
        str(CHECKPOINT),
        revision="main",
        dtype="auto",
        trust_remote_code=False,
        quantization_config=AutoQuantizationConfig.from_dict({"quant_method": "mxfp4"}),
    )
    assert len(experts_of(again)) == 4


@pytest.mark.usefixtures("installed")
def test_models_without_a_head_pack_too(packed: tuple[Any, Any]) -> None:
    model = AutoModel.from_pretrained(CHECKPOINT, trust_remote_code=False)
    assert next(name for name, m in model.named_modules() if isinstance(m, PackedExperts)) == "layers.0.mlp.experts"
    inputs = batch(packed[1], rows=2)
    with torch.inference_mode():
        expected = packed[0].model(**inputs).last_hidden_state
        assert torch.equal(model(**inputs).last_hidden_state, expected)


@pytest.mark.usefixtures("installed")
def test_pipelines_pack() -> None:
    answer = pipeline("text-generation", model=str(CHECKPOINT), device="cpu", trust_remote_code=False)
    assert len(experts_of(answer.model)) == 4
    assert answer("12+34=", return_full_text=False)[0]["generated_text"] == "46"


@pytest.mark.usefixtures("installed")
def test_transformers_serve_packs() -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    pytest.importorskip("accelerate")  # its `device_map`
    from transformers.cli.serving.model_manager import ModelManager

    manager = ModelManager(device="cpu", force_model=str(CHECKPOINT))
    (served,) = manager.loaded_models.values()
    assert len(experts_of(served.model)) == 4
    manager.shutdown()


@pytest.mark.usefixtures("installed")
def test_asking_for_dequantized_weights_still_gets_them() -> None:
    model = dequantized(torch.bfloat16)
    assert not experts_of(model)
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (8, 192, 384)


def test_install_twice_and_uninstall_leave_nothing_behind() -> None:
    quantizers, chooser = dict(AUTO_QUANTIZER_MAPPING), modeling_utils.get_hf_quantizer
    assert "kimi_k2" not in CONFIG_MAPPING
    install()
    install(backend="reference")
    assert modeling_utils.get_hf_quantizer is not chooser
    assert "kimi_k2" in CONFIG_MAPPING
    uninstall()
    uninstall()
    assert modeling_utils.get_hf_quantizer is chooser
    assert "kimi_k2" not in CONFIG_MAPPING
    assert {**AUTO_QUANTIZER_MAPPING, **quantizers} == AUTO_QUANTIZER_MAPPING
    with pytest.raises(ValueError, match="polymoe"):
        AutoModelForCausalLM.from_pretrained(CHECKPOINT, experts_implementation="polymoe", trust_remote_code=False)


def test_a_config_packs_one_model() -> None:
    chooser = modeling_utils.get_hf_quantizer
    try:
        config = polymoe.PolymoeConfig(backend="reference")
        model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, quantization_config=config, trust_remote_code=False)
        assert len(experts_of(model)) == 4
        assert not installed()
        assert not experts_of(dequantized(torch.bfloat16))
        with pytest.raises(CheckpointError, match="expected a mixture-of-experts model, got 'llama'"):
            modeling_utils.get_hf_quantizer(LlamaConfig(), config, None, False, {})
        unquantized = AutoConfig.from_pretrained(CHECKPOINT, trust_remote_code=False)
        del unquantized.quantization_config
        with pytest.raises(UnsupportedProblem, match="a checkpoint with quantized experts"):
            modeling_utils.get_hf_quantizer(unquantized, config, None, False, {})
        config = polymoe.PolymoeConfig(backend="tritn")
        with pytest.raises(ArgumentError, match="tritn"):
            AutoModelForCausalLM.from_pretrained(CHECKPOINT, quantization_config=config, trust_remote_code=False)
    finally:
        uninstall()
    assert modeling_utils.get_hf_quantizer is chooser


def test_install_names_a_backend() -> None:
    install(backend="tritn")
    try:
        with pytest.raises(ArgumentError, match="tritn"):
            AutoModelForCausalLM.from_pretrained(CHECKPOINT, trust_remote_code=False)
    finally:
        uninstall()


@pytest.mark.usefixtures("installed")
def test_a_state_dict_in_memory_is_refused() -> None:
    config = AutoConfig.from_pretrained(CHECKPOINT, trust_remote_code=False)
    with pytest.raises(ArgumentError, match="state dict"):
        GptOssForCausalLM.from_pretrained(None, config=config, state_dict={}, trust_remote_code=False)


@pytest.mark.usefixtures("installed")
def test_layers_that_are_offloaded_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{layer}": "disk" if layer == 2 else "cpu" for layer in range(4)}
    with pytest.raises(UnsupportedProblem, match=r"model\.layers\.2\.mlp\.experts.*offloaded"):
        AutoModelForCausalLM.from_pretrained(
            CHECKPOINT, device_map=places, offload_folder=tmp_path, trust_remote_code=False
        )


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["kimi-k2", "nemotron-h", "mixtral", "kimi-k2.5", "kimi-k2 under compression_config"])
def test_other_families_pack_once_installed(checkpoint: Checkpoints, pair: Any, name: str) -> None:
    path = checkpoint(name)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    model = auto_class(config).from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    _, expected, _ = pair(name)
    with torch.inference_mode():
        assert torch.equal(model(input_ids=token_ids()).logits, expected(input_ids=token_ids()).logits)


@pytest.mark.usefixtures("installed")
def test_models_of_other_families_load_as_ever(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, dtype="float32"
    )
    plain = LlamaForCausalLM(config)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    weight = "model.layers.0.mlp.up_proj.weight"
    state[weight], state[f"{weight}_scale_inv"] = state[weight].to(torch.float8_e4m3fn), torch.full((1, 1), 2.0)
    config.save_pretrained(tmp_path)
    patch_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    assert not isinstance(model.hf_quantizer, PackedQuantizer) if hasattr(model, "hf_quantizer") else True
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight.float(), 2 * state[weight].float())
