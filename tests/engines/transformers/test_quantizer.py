"""Loading a packed checkpoint into a model: memory, dtypes, devices, reports, damaged files."""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polymoe.checkpoint import Checkpoint
from polymoe.errors import CheckpointError, FormatError, PolymoeError
from support.written import changed, damaged, patch_config, reshaped, without

pytest.importorskip("transformers")

from families import FAMILIES

from polymoe.engines.transformers import PackedQuantizer, load
from support.family_checkpoints import family, fused_of, stored_nbytes, token_ids

Checkpoints = Callable[[str], Path]


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_stay_packed(checkpoint: Checkpoints, pair: Any, name: str) -> None:
    _, model, _ = pair(name)
    opened = Checkpoint.open(checkpoint(name))
    for layer, fused in zip(opened.layers, fused_of(model), strict=True):
        stored = opened.spec(layer).local_experts * opened.spec(layer).expert_bytes
        assert stored <= stored_nbytes(fused) <= 1.01 * stored  # zero points are held in bytes, and input scales too
    named = (*model.state_dict(), *dict(model.named_parameters()))
    assert not [key for key in named if ".experts." in key]
    assert not [key for key, _ in model.named_buffers() if "reserved" in key]
    assert not model.training
    assert model.config.quantization_config.to_dict() == family(name).config["quantization_config"]


def test_the_dtype_is_the_checkpoints_own(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("mixtral"), tmp_path / "c")
    assert load(path, device="cpu")[0].dtype == torch.float16
    patch_config(path, torch_dtype=None)
    assert load(path, device="cpu")[0].dtype == torch.bfloat16


def test_other_matrices_that_are_quantized_are_said_once_with_their_bytes(
    checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "polymoe"):
        model, _ = load(checkpoint("nemotron-h"), device="cpu")
    (said,) = [record.getMessage() for record in caplog.records if record.name == "polymoe"]
    quantized = re.compile(r".*(in_proj|out_proj|shared_experts\.(up|down)_proj)\.weight")
    matrices = [value for key, value in model.state_dict().items() if quantized.fullmatch(key)]
    count = sum(m.numel() for m in matrices)
    assert f"{len(matrices)} matrices outside the experts are stored as fp8_tensor and run as bfloat16" in said
    assert f"{(count + 4 * len(matrices)) / 2**20:.1f} MiB stored, {2 * count / 2**20:.1f} MiB in memory" in said
    caplog.clear()
    with caplog.at_level(logging.WARNING, "polymoe"):
        load(checkpoint("kimi-k2"), device="cpu")  # nothing but experts
    assert not [record for record in caplog.records if record.name == "polymoe"]


def test_a_device_map_places_layers_and_counts_packed_experts(
    checkpoint: Checkpoints, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    path, (_, plain, _) = checkpoint("qwen3"), pair("qwen3")
    model, _ = load(path, device_map={"": "cpu"}, dtype=torch.float32)
    with torch.inference_mode():
        assert torch.equal(model(token_ids()).logits, plain(token_ids()).logits)

    class Enough(PolymoeError):
        pass

    chosen: dict[str, Any] = {}

    def stop(self: Any, model: Any, load_config: Any, tensors: Any) -> None:
        chosen.update(load_config.device_map)
        raise Enough("enough")

    monkeypatch.setattr(PackedQuantizer, "read_others", stop)
    layer = sum(p.numel() * 2 for p in plain.model.layers[0].parameters()) + stored_nbytes(fused_of(plain)[0])
    with pytest.raises(Enough):
        load(path, device_map="sequential", max_memory={0: int(3.5 * layer), 1: int(3.5 * layer), "cpu": 0})
    places = [chosen[f"model.layers.{i}"] for i in range(4)]
    assert places == [0, 0, 0, 1] or places == [0, 0, 1, 1], chosen


def test_an_adapter_beside_the_model_is_not_loaded_and_said(
    checkpoint: Checkpoints, pair: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tensors do not belong to the model, and its config may name a base model anywhere."""
    path = shutil.copytree(checkpoint("qwen3"), tmp_path / "c")
    _, plain, _ = pair("qwen3")
    rank, hidden, rows = 2, 256, 256
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    adapter = {f"{at}.lora_A.weight": torch.randn(rank, hidden), f"{at}.lora_B.weight": torch.randn(rows, rank)}
    save_file(adapter, path / "adapter_model.safetensors", {"format": "pt"})
    described = {
        "base_model_name_or_path": str(path), "peft_type": "LORA", "r": rank, "lora_alpha": rank,
        "target_modules": ["layers.0.self_attn.q_proj"], "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(described))
    model, _ = load(path, device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        difference = (model(token_ids()).logits - plain(token_ids()).logits).abs().max()
    assert difference == 0
    assert "the adapter beside the weights is not loaded" in caplog.text


def test_tensors_count_more_than_the_config_and_say_so_once(checkpoint: Checkpoints, pair: Any, tmp_path: Path) -> None:
    """The config says 16 bit for shared experts and INT4 for experts; in the files, all of them are NVFP4."""
    path = shutil.copytree(checkpoint("glm-4"), tmp_path / "c")
    _, plain, _ = pair("glm-4")
    described = json.loads((path / "config.json").read_text())["quantization_config"]
    described["ignore"].append("re:.*shared_experts.*")
    patch_config(path, quantization_config=described)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = load(path, device="cpu", dtype=torch.float32)
    (said,) = [str(w.message) for w in caught if "take precedence" in str(w.message)]
    assert "9 matrices outside the experts differ from the config" in said
    assert "config: bf16, plain; tensors: nvfp4" in said
    with torch.inference_mode():
        assert torch.equal(model(token_ids()).logits, plain(token_ids()).logits)

    described["config_groups"]["group_0"]["weights"] |= {"type": "int", "strategy": "group", "group_size": 32}
    described["config_groups"]["group_0"]["input_activations"] = None
    described["ignore"].append(r"re:.*layers\.0\.mlp\..*")  # so that experts alone are at odds
    patch_config(path, quantization_config=described)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = load(path, device="cpu", dtype=torch.float32)
    said = [str(w.message) for w in caught if "take precedence" in str(w.message) and "mlp.experts" in str(w.message)]
    assert len(said) == 1, said
    with torch.inference_mode():
        assert torch.equal(model(token_ids()).logits, plain(token_ids()).logits)


def one_file(path: Path, target: Path) -> Path:
    """A copy with all tensors in one file, to be damaged."""
    shutil.copytree(path, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: value for shard in sorted(path.glob("*.safetensors")) for name, value in load_file(shard).items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


SHARED = "model.layers.1.mlp.shared_experts.up_proj"


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (without(SHARED), CheckpointError, rf"{SHARED}\.weight"),
        (without(f"{SHARED}.weight_scale_inv"), FormatError, rf"{SHARED}\.weight: expected a scale beside"),
        (reshaped(f"{SHARED}.weight_scale_inv", 3, 7), FormatError, rf"{SHARED}\.weight_scale_inv"),
        (changed(f"{SHARED}.weight_scale_inv", lambda t: t.fill_(torch.nan)), FormatError, rf"{SHARED} scales"),
        (without("layers.1.mlp.gate.e_score_correction_bias"), CheckpointError, "e_score_correction_bias"),
        (without("layers.2.mlp.experts.3.up_proj.weight$"), CheckpointError, r"experts\.3\.up_proj\.weight"),
    ],
    ids=["shared expert", "its scale", "its scale's shape", "its scale is NaN", "router bias", "expert"],
)
def test_what_is_missing_or_wrong_is_named(
    checkpoint: Checkpoints, tmp_path: Path, change: Any, error: Any, says: str
) -> None:
    whole = one_file(checkpoint("deepseek-v3"), tmp_path / "whole")
    with pytest.raises(error, match=says):
        load(damaged(whole, tmp_path / "damaged", change), device="cpu")


def test_packed_words_without_their_scales(checkpoint: Checkpoints, tmp_path: Path) -> None:
    whole = one_file(checkpoint("mixtral"), tmp_path / "whole")
    path = damaged(whole, tmp_path / "damaged", without("layers.0.self_attn.q_proj.scales"))
    with pytest.raises(CheckpointError, match=r"self_attn\.q_proj\.scales: expected this tensor"):
        load(path, device="cpu")
