"""write_checkpoint: the tensors on disk are those of the real releases, and nothing is left half done."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from polymoe.checkpoint import Checkpoint, write_checkpoint
from polymoe.errors import ArgumentError, CheckpointError, CheckpointNotFound
from polymoe.formats import FORMATS, format_of
from polymoe.problem.tensors import Expert, ExpertWeights
from support.configs import CONFIGS, config
from support.written import LAYER, Library, random_layer, sizes, write

H, F, E, LATENT = 256, 192, 8, 64

# One expert's (stacked: all experts') tensors as the formats' description lists them: dtype and shape.
FP8_BLOCK = {"weight": ("F8_E4M3", [F, H]), "weight_scale_inv": ("F32", [2, 2])}
NVFP4 = {"weight": ("U8", [F, H // 2]), "weight_scale": ("F8_E4M3", [F, H // 16]), "weight_scale_2": ("F32", [])}
INT4 = {"weight_packed": ("I32", [F, H // 8]), "weight_scale": ("BF16", [F, H // 32]), "weight_shape": ("I64", [2])}
ON_DISK: dict[str, dict[str, tuple[str, list[int]]]] = {
    "gpt-oss-mxfp4": {
        "model.layers.3.mlp.experts.gate_up_proj_blocks": ("U8", [E, 2 * F, H // 32, 16]),
        "model.layers.3.mlp.experts.gate_up_proj_scales": ("U8", [E, 2 * F, H // 32]),
        "model.layers.3.mlp.experts.gate_up_proj_bias": ("BF16", [E, 2 * F]),
        "model.layers.3.mlp.experts.down_proj_blocks": ("U8", [E, H, F // 32, 16]),
        "model.layers.3.mlp.experts.down_proj_scales": ("U8", [E, H, F // 32]),
        "model.layers.3.mlp.experts.down_proj_bias": ("BF16", [E, H]),
    },
    "gpt-oss-bf16": {
        "model.layers.3.mlp.experts.gate_up_proj": ("BF16", [E, H, 2 * F]),
        "model.layers.3.mlp.experts.gate_up_proj_bias": ("BF16", [E, 2 * F]),
        "model.layers.3.mlp.experts.down_proj": ("BF16", [E, F, H]),
        "model.layers.3.mlp.experts.down_proj_bias": ("BF16", [E, H]),
    },
    "deepseek-v3-fp8": {f"model.layers.3.mlp.experts.5.gate_proj.{s}": v for s, v in FP8_BLOCK.items()},
    "deepseek-v4-fp4": {
        "layers.3.ffn.experts.5.w1.weight": ("I8", [F, H // 2]),
        "layers.3.ffn.experts.5.w1.scale": ("F8_E8M0", [F, H // 32]),
        "layers.3.ffn.experts.5.w2.weight": ("I8", [H, F // 2]),
        "layers.3.ffn.experts.5.w2.scale": ("F8_E8M0", [H, F // 32]),
    },
    "deepseek-v4-base-fp8": {
        "layers.3.ffn.experts.5.w3.weight": ("F8_E4M3", [F, H]),
        "layers.3.ffn.experts.5.w3.scale": ("F32", [2, 2]),
    },
    "deepseek-v4-nvfp4": {f"layers.3.ffn.experts.5.w1.{s}": v for s, v in NVFP4.items()},
    "kimi-k2-thinking-int4": {f"model.layers.3.mlp.experts.5.up_proj.{s}": v for s, v in INT4.items()},
    "kimi-k2.5-int4": {f"language_model.model.layers.3.mlp.experts.5.up_proj.{s}": v for s, v in INT4.items()},
    "nemotron-3-nvfp4": {
        "backbone.layers.3.mixer.experts.5.up_proj.weight": ("U8", [F, LATENT // 2]),
        "backbone.layers.3.mixer.experts.5.up_proj.weight_scale": ("F8_E4M3", [F, LATENT // 16]),
        "backbone.layers.3.mixer.experts.5.down_proj.weight": ("U8", [LATENT, F // 2]),
        "backbone.layers.3.mixer.experts.5.down_proj.weight_scale_2": ("F32", []),
    },
    "glm-4.7-fp8-channel": {"model.layers.3.mlp.experts.5.down_proj.weight_scale": ("BF16", [H, 1])},
    "glm-4.5-air-nvfp4-ct": {
        "model.layers.3.mlp.experts.5.up_proj.weight_packed": ("U8", [F, H // 2]),
        "model.layers.3.mlp.experts.5.up_proj.weight_global_scale": ("F32", [1]),
    },
    "qwen3-fp8": {"model.layers.3.mlp.experts.5.down_proj.weight_scale_inv": ("BF16", [2, 2])},
    "qwen3-gptq": {
        "model.layers.3.mlp.experts.5.up_proj.qweight": ("I32", [H // 8, 256]),
        "model.layers.3.mlp.experts.5.up_proj.qzeros": ("I32", [H // 128, 256 // 8]),
        "model.layers.3.mlp.experts.5.up_proj.scales": ("F16", [H // 128, 256]),
    },
    "qwen3-awq": {"model.layers.3.mlp.experts.5.up_proj.qweight": ("I32", [H, 256 // 8])},
    "qwen3-vl-bf16": {
        "model.language_model.layers.3.mlp.experts.gate_up_proj": ("BF16", [E, H, 2 * F]),
        "model.language_model.layers.3.mlp.experts.down_proj": ("BF16", [E, F, H]),
    },
    "qwen3.5-bf16": {
        "model.language_model.layers.3.mlp.experts.gate_up_proj": ("BF16", [E, 2 * F, H]),
        "model.language_model.layers.3.mlp.experts.down_proj": ("BF16", [E, H, F]),
    },
    "mixtral-bf16": {
        "model.layers.3.block_sparse_moe.experts.5.w1.weight": ("BF16", [F, H]),
        "model.layers.3.block_sparse_moe.experts.5.w2.weight": ("BF16", [H, F]),
    },
    "llama4-bf16": {
        "language_model.model.layers.3.feed_forward.experts.gate_up_proj": ("BF16", [E, H, 2 * F]),
        "language_model.model.layers.3.feed_forward.experts.down_proj": ("BF16", [E, F, H]),
    },
    "llama4-fp8-channel": {
        "language_model.model.layers.3.feed_forward.experts.5.gate_proj.weight": ("F8_E4M3", [F, H]),
        "language_model.model.layers.3.feed_forward.experts.5.gate_proj.weight_scale": ("BF16", [F, 1]),
    },
}


@pytest.mark.parametrize("name", ON_DISK)
def test_names_dtypes_and_shapes_are_those_of_the_releases(name: str, library: Library) -> None:
    with safe_open(library(name) / "model.safetensors", "pt") as file:
        for tensor, expected in ON_DISK[name].items():
            piece = file.get_slice(tensor)
            assert (piece.get_dtype(), list(piece.get_shape())) == expected, tensor


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_read_back_as_they_were_quantized(name: str, library: Library) -> None:
    """16-bit weights compared here with the floats themselves, others with their own quantization."""
    with Checkpoint.open(library(name)) as checkpoint:
        weights = checkpoint.weights(LAYER)
        gate_up, down, *biases = random_layer(checkpoint)
        spec = checkpoint.spec(LAYER)
    for e in (0, 7):
        expert = weights.expert(e)
        halves = dict(zip(("gate", "up"), gate_up[e].split(spec.intermediate), strict=False))
        floats = {"down": down[e]} | (halves if spec.gated else {"up": gate_up[e]})
        for projection, matrix in expert.projections.items():
            wanted = FORMATS["bf16"].quantize(floats[projection])
            if spec.format != "bf16":
                wanted = format_of(matrix.encoding).quantize(floats[projection])
            assert torch.equal(matrix.dequantize(), wanted.dequantize()), (e, projection)
        if biases:
            assert torch.equal(expert.vectors["down_bias"], biases[1][e].bfloat16())
            assert torch.equal(expert.vectors["gate_bias"], biases[0][e, : spec.intermediate].bfloat16())
            assert torch.equal(expert.vectors["up_bias"], biases[0][e, spec.intermediate :].bfloat16())


def test_gpt_oss_rows_alternate(library: Library) -> None:
    """Row 2i is gate i and row 2i + 1 is up i, in blocks, scales and biases."""
    tensors = load_file(library("gpt-oss-mxfp4") / "model.safetensors")
    stem = "model.layers.3.mlp.experts.gate_up_proj"
    with Checkpoint.open(library("gpt-oss-mxfp4")) as checkpoint:
        gate_up, _, bias, _ = random_layer(checkpoint)
    gate, up = FORMATS["mxfp4"].quantize(gate_up[2, :F]), FORMATS["mxfp4"].quantize(gate_up[2, F:])
    assert torch.equal(tensors[f"{stem}_blocks"][2, 0::2].flatten(1), gate.codes)
    assert torch.equal(tensors[f"{stem}_blocks"][2, 1::2].flatten(1), up.codes)
    assert gate.scales is not None
    assert torch.equal(tensors[f"{stem}_scales"][2, 0::2], gate.scales.view(torch.uint8))
    assert torch.equal(tensors[f"{stem}_bias"][2, 1::2], bias[2, F:].bfloat16())


def test_what_was_read_is_written_to_the_byte(library: Library, tmp_path: Path) -> None:
    for name in CONFIGS:
        source = library(name)
        with Checkpoint.open(source) as checkpoint:
            again = write_checkpoint(tmp_path / name, checkpoint.config, {LAYER: checkpoint.weights(LAYER)})
        assert (again / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes(), name


def experts_with_input_scales(seed: int) -> ExpertWeights:
    torch.manual_seed(seed)
    nvfp4 = FORMATS["nvfp4"]
    experts = [
        Expert(
            gate=nvfp4.quantize(torch.randn(F, H)),
            up=nvfp4.quantize(torch.randn(F, H) * 10),
            down=nvfp4.quantize(torch.randn(H, F)),
            gate_up_input_scale=torch.tensor(0.5 + e),
            down_input_scale=None if e == 3 else torch.tensor(0.25 + e),
        )
        for e in range(E)
    ]
    return ExpertWeights.of(experts)


@pytest.mark.parametrize("name", ["glm-4.7-nvfp4", "glm-4.5-air-nvfp4-ct"])
def test_global_and_input_scales_are_kept_for_each_projection(name: str, tmp_path: Path) -> None:
    """Gate and up have global scales of their own; an expert that saw no tokens has no input scale."""
    source = experts_with_input_scales(0)
    write_checkpoint(tmp_path / "c", config(name, **sizes(name)), {LAYER: source})
    with Checkpoint.open(tmp_path / "c") as checkpoint:
        weights = checkpoint.weights(LAYER)
        for e in range(E):
            wanted, got = source.expert(e), weights.expert(e)
            for projection, matrix in wanted.projections.items():
                torch.testing.assert_close(
                    got.projections[projection].global_scale, matrix.global_scale, rtol=2e-7, atol=0
                )
            torch.testing.assert_close(got.gate_up_input_scale, wanted.gate_up_input_scale, rtol=2e-7, atol=0)
            assert (got.down_input_scale is None) == (e == 3)


def test_shards_index_and_other_tensors(tmp_path: Path) -> None:
    described = config("qwen3-bf16", **sizes("qwen3-bf16"))
    alone = tmp_path / "config.json"
    alone.write_text(json.dumps(described), encoding="utf-8")
    layers = {i: random_layer(Checkpoint.open(alone), i) for i in (1, 2)}
    embedding = torch.randn(16, H)
    path = write_checkpoint(
        tmp_path / "c",
        described,
        layers,  # type: ignore[arg-type]
        other_tensors={"model.embed_tokens.weight": embedding, "lm_head.weight": embedding},
        max_shard_bytes=500_000,
    )
    index = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    shards = sorted(p.name for p in path.glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert sorted(set(index["weight_map"].values())) == shards
    tensors = {n: t for s in shards for n, t in load_file(path / s).items()}
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    assert all((path / s).stat().st_size < 520_000 for s in shards)
    assert torch.equal(tensors["lm_head.weight"], embedding)
    with Checkpoint.open(path) as checkpoint:
        for i in (1, 2):
            assert torch.equal(checkpoint.weights(i).dequantize()[1], layers[i][1].bfloat16().float())


def test_side_file(tmp_path: Path) -> None:
    described = config("nemotron-3-nvfp4", **sizes(""))
    section = described.pop("quantization_config")
    side = {
        "producer": section["producer"],
        "quantization": {k: section[k] for k in ("quant_algo", "quantized_layers")},
    }
    layer = random_layer(Checkpoint.open(write(tmp_path / "a", "nemotron-3-bf16")))
    write_checkpoint(tmp_path / "b", described, {LAYER: layer}, side=side)  # type: ignore[dict-item]
    with Checkpoint.open(tmp_path / "b") as checkpoint:
        assert checkpoint.spec(LAYER).format == "nvfp4"
    assert json.loads((tmp_path / "b" / "hf_quant_config.json").read_text(encoding="utf-8")) == side


def test_nothing_is_overwritten(library: Library, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="one that exists"):
        write_checkpoint(tmp_path / "there", config("gpt-oss-mxfp4"), {})
    assert not list((tmp_path / "there").iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"layers": {0: "good"}}, CheckpointNotFound, "a dense layer"),
        ({"layers": {99: "good"}}, CheckpointNotFound, "layer 99"),
        ({"layers": {LAYER: "narrow"}}, ArgumentError, "shapes"),
        ({"layers": {LAYER: "bf16"}}, ArgumentError, "fp8_block128"),
        ({"layers": {LAYER: "half the experts"}}, ArgumentError, "H, F, experts"),
        (
            {"other_tensors": {"model.layers.3.mlp.experts.0.up_proj.weight": torch.zeros(1)}},
            CheckpointError,
            "one tensor with this name",
        ),
        ({"config": {"model_type": "bert"}}, CheckpointError, "model_type"),
    ],
)
def test_bad_arguments_leave_nothing_behind(arguments: dict[str, Any], error, match: str, tmp_path: Path) -> None:
    described = config("deepseek-v3-fp8", **sizes(""))
    gate_up, down = torch.randn(E, 2 * F, H), torch.randn(E, H, F)
    layers = {
        "good": (gate_up, down),
        "narrow": (gate_up[..., :-32], down),
        "bf16": ExpertWeights.quantize(gate_up, down, "bf16"),
        "half the experts": ExpertWeights.quantize(gate_up[:4], down[:4], "fp8_block128"),
    }
    given = {layer: layers[kind] for layer, kind in arguments.get("layers", {LAYER: "good"}).items()}
    with pytest.raises(error, match=match):
        write_checkpoint(
            tmp_path / "c", arguments.get("config", described), given, other_tensors=arguments.get("other_tensors")
        )
    assert os.listdir(tmp_path) == []


def test_gate_and_up_in_one_tensor_need_scales_by_row(tmp_path: Path) -> None:
    """ModelOpt's FP8 Llama-4 has one number for all experts, which no two matrices share by chance."""
    described = config("llama4-bf16", **sizes(""))
    described["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    with pytest.raises(CheckpointError, match="separate scales for each row"):
        write_checkpoint(tmp_path / "c", described, {LAYER: (torch.randn(E, 2 * F, H), torch.randn(E, H, F))})


def test_a_config_without_tensors(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", config("gpt-oss-mxfp4"), {})
    assert [p.name for p in path.iterdir()] == ["config.json"]


def test_files_are_as_readable_as_others_are(tmp_path: Path) -> None:
    path = write(tmp_path / "c", "gpt-oss-mxfp4")
    (tmp_path / "plain").write_text("")
    assert {f.stat().st_mode for f in path.iterdir()} == {(tmp_path / "plain").stat().st_mode}
