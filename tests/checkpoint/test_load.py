"""Checkpoint: every family from files to experts, on one rank and on several; tensors against configs; bad files."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from polymoe.checkpoint import Checkpoint
from polymoe.errors import ArgumentError, CheckpointError, CheckpointNotFound, FormatError
from polymoe.layer.load import load_experts
from polymoe.problem.activation_quantization import (
    FP8_GROUP128,
    FP8_STATIC,
    FP8_TOKEN,
    UNQUANTIZED,
    ActivationQuantization,
)
from polymoe.problem.activations import SwiGLU
from support.configs import CONFIGS, FP8_BLOCK, config
from support.written import LAYER, Library, cast, damaged, patch_config, reshaped, sizes, without, write

H, F, E = 256, 192, 8
GPT_OSS = "model.layers.3.mlp.experts"


@pytest.mark.parametrize("name", CONFIGS)
def test_slices_of_every_family_are_slices_of_the_whole(name: str, library: Library) -> None:
    """Two tensor-parallel by three expert-parallel ranks, bit for bit."""
    with Checkpoint.open(library(name)) as checkpoint:
        whole = checkpoint.weights(LAYER)
        gate_up, down = whole.dequantize()
        halves = gate_up.split(whole.spec.intermediate, 1)
        first = 0
        for ep_rank in range(3):
            for tp_rank in range(2):
                weights = checkpoint.weights(LAYER, tp=(tp_rank, 2), ep=(ep_rank, 3))
                spec = weights.spec
                assert spec == checkpoint.spec(LAYER, tp=(tp_rank, 2), ep=(ep_rank, 3))
                assert spec.first_expert == first
                experts = slice(first, first + spec.local_experts)
                f = slice(tp_rank * spec.intermediate, (tp_rank + 1) * spec.intermediate)
                part_gate_up, part_down = weights.dequantize()
                assert torch.equal(part_gate_up, torch.cat([h[experts, f] for h in halves], 1))
                assert torch.equal(part_down, down[experts, :, f])
            first += spec.local_experts
        assert first == whole.spec.experts


def test_down_bias_is_on_the_first_rank_only(library: Library) -> None:
    with Checkpoint.open(library("gpt-oss-mxfp4")) as checkpoint:
        whole = checkpoint.weights(LAYER).expert(6).vectors
        ranks = [checkpoint.weights(LAYER, tp=(r, 3)).expert(6).vectors for r in range(3)]
    assert torch.equal(ranks[0]["down_bias"], whole["down_bias"])
    assert not any(r["down_bias"].any() for r in ranks[1:])
    for name in ("gate_bias", "up_bias"):
        assert torch.equal(torch.cat([r[name] for r in ranks]), whole[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_alone_says_the_same(name: str, library: Library) -> None:
    """All but static activation scales, which only tensors can show to be missing."""
    with (
        Checkpoint.open(library(name)) as full,
        Checkpoint.open(library(name) / "config.json") as alone,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        assert alone.layers == full.layers
        assert alone.problem(LAYER, tp=2, ep=(1, 2)) == full.problem(LAYER, tp=2, ep=(1, 2))
        static = alone.recipe(LAYER).static
        assert full.recipe(LAYER) == (UNQUANTIZED if static else alone.recipe(LAYER))
        with pytest.raises(CheckpointNotFound, match="tensors"):
            alone.weights(LAYER)


RECIPES = {
    "deepseek-v3-fp8": "fp8_group128",
    "deepseek-v4-fp4": "fp8_group128",
    "glm-4.7-fp8-channel": "fp8_token",
    "glm-4.7-nvfp4": "16bit",
    "gpt-oss-mxfp4": "16bit",
    "mixtral-fp8-static": "fp8_static",
    "qwen3-bf16": "16bit",
    "qwen3-mxfp8": "mxfp8",
}


@pytest.mark.parametrize(("name", "expected"), RECIPES.items())
def test_recipes(name: str, expected: str, library: Library) -> None:
    assert Checkpoint.open(library(name), config_only=True).recipe(LAYER) == ActivationQuantization.of(expected)


def test_static_scales_make_a_static_recipe(library: Library, tmp_path: Path) -> None:
    def calibrate(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(".weight")]:
            scale = 0.25 if ".w1." in name else 0.5
            tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(scale)

    path = damaged(library("mixtral-fp8-static"), tmp_path / "c", calibrate)
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.recipe(LAYER) == FP8_STATIC
        expert = checkpoint.weights(LAYER).expert(1)
    assert expert.gate_up_input_scale == 0.5  # the larger of gate's and up's
    assert expert.down_input_scale == 0.5


@pytest.mark.parametrize("value", [None, 0.0, float("nan")])
def test_p10_experts_that_were_never_calibrated(value: float | None, library: Library, tmp_path: Path) -> None:
    def calibrate_some(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(".weight")]:
            scale = value if ".experts.2." in name else 0.5
            if scale is not None:
                tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(scale)

    path = damaged(library("mixtral-fp8-static"), tmp_path / "c", calibrate_some)
    experts = load_experts(path, LAYER, device="cpu")
    assert [x.down_input_scale is None for x in experts.weights] == [e == 2 for e in range(8)]
    with Checkpoint.open(path) as checkpoint:
        # From the headers alone: a scale that is there but not a number is seen when it is read.
        assert checkpoint.recipe(LAYER) == (UNQUANTIZED if value is None else FP8_STATIC)
    with pytest.raises(CheckpointError, match=r"layer 3, expert 2: expected static input scales(.|\n)*fp8_token"):
        load_experts(path, LAYER, device="cpu", activations="fp8_static")
    load_experts(path, LAYER, device="cpu", activations="fp8_static", ep=(1, 2))  # experts 4 to 7


def test_problem(library: Library) -> None:
    with Checkpoint.open(library("gpt-oss-mxfp4")) as checkpoint:
        problem = checkpoint.problem(
            LAYER, tp=(1, 2), ep=2, dtype="fp16", activations="fp8_token", batch_invariant=True
        )
        assert checkpoint.model_type == "gpt_oss"
        assert checkpoint.name == str(library("gpt-oss-mxfp4"))
        assert "gpt_oss" in repr(checkpoint)
    assert problem.activation == SwiGLU(1.702, 1.0, 7.0)
    assert (problem.top_k, problem.tp, problem.ep, problem.dtype) == (2, 2, 2, "fp16")
    assert (problem.activations, problem.batch_invariant, problem.weight_on) == (FP8_TOKEN, True, "output")
    assert (problem.spec.hidden, problem.spec.intermediate, problem.spec.local_experts) == (H, 96, 4)
    with Checkpoint.open(library("llama4-bf16")) as checkpoint:
        assert checkpoint.problem(LAYER).weight_on == "input"


def test_experts_are_views_of_the_mapped_files(library: Library) -> None:
    """Neighbours of a stack lie one expert apart in memory, so nothing was copied."""
    with Checkpoint.open(library("gpt-oss-mxfp4")) as checkpoint:
        weights = checkpoint.weights(LAYER)
        one, two = weights.expert(1), weights.expert(2)
        for name, rows in (("gate", 2 * F), ("up", 2 * F), ("down", H)):
            a, b = one.projections[name], two.projections[name]
            assert b.codes.data_ptr() - a.codes.data_ptr() == rows * a.codes.shape[1]
        assert one.projections["up"].codes.data_ptr() - one.projections["gate"].codes.data_ptr() == H // 2


def test_files_may_hold_some_layers_only(library: Library) -> None:
    with Checkpoint.open(library("qwen3-bf16")) as checkpoint:
        assert checkpoint.layers == (0, 1, 2, 3)
        assert checkpoint.layers_here == (LAYER,)
        assert checkpoint.spec(1) == checkpoint.spec(LAYER)  # by the config
        with pytest.raises(CheckpointNotFound, match=r"experts of layer 1.*mlp\.experts\.0\.gate_proj"):
            checkpoint.weights(1)


def test_unequal_slices_are_said(tmp_path: Path) -> None:
    path = write(tmp_path / "c", "gpt-oss-mxfp4", config("gpt-oss-mxfp4", **(sizes("") | {"intermediate": 160})))
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.notes(tp=3) == ("tp=3: F=160 in slices of whole groups: 64 on 2 ranks, 32 on the last",)
        assert checkpoint.notes() == checkpoint.notes(tp=5) == ()
        assert [checkpoint.spec(LAYER, tp=(r, 3)).intermediate for r in range(3)] == [64, 64, 32]


def test_other_containers_and_arrangements_are_found(library: Library, tmp_path: Path) -> None:
    """The same experts stacked as Transformers saves them, in natural order and under its own prefix."""
    with Checkpoint.open(library("qwen3-bf16")) as source:
        gate_up, down = source.weights(LAYER).dequantize()

    def stack(tensors: dict[str, Tensor]) -> None:
        tensors.clear()
        tensors[f"{GPT_OSS}.gate_up_proj"], tensors[f"{GPT_OSS}.down_proj"] = gate_up.bfloat16(), down.bfloat16()

    path = damaged(library("qwen3-bf16"), tmp_path / "stacked", stack)
    with Checkpoint.open(path) as checkpoint:
        again = checkpoint.weights(LAYER).dequantize()
    assert torch.equal(again[0], gate_up)
    assert torch.equal(again[1], down)


def test_stacked_experts_without_a_gate(library: Library, tmp_path: Path) -> None:
    with Checkpoint.open(library("nemotron-3-bf16")) as source:
        up, down = source.weights(LAYER).dequantize()

    def stack(tensors: dict[str, Tensor]) -> None:
        tensors.clear()
        stem = "backbone.layers.3.mixer.experts"
        tensors[f"{stem}.up_proj"], tensors[f"{stem}.down_proj"] = up.bfloat16(), down.bfloat16()

    with Checkpoint.open(damaged(library("nemotron-3-bf16"), tmp_path / "stacked", stack)) as checkpoint:
        weights = checkpoint.weights(LAYER)
    assert weights.expert(0).gate is None
    assert torch.equal(weights.dequantize()[0], up)


def test_one_fp8_scale_for_all_stacked_experts(library: Library, tmp_path: Path) -> None:
    """Llama-4 by ModelOpt: transposed matrices, single numbers shared by all experts."""
    stem = "language_model.model.layers.3.feed_forward.experts"

    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in ("gate_up_proj", "down_proj"):
            tensors[f"{stem}.{name}"] = tensors[f"{stem}.{name}"].to(torch.float8_e4m3fn)
            tensors[f"{stem}.{name}_weight_scale"] = torch.tensor(0.5)
            tensors[f"{stem}.{name}_input_scale"] = torch.tensor(0.25)

    path = damaged(library("llama4-bf16"), tmp_path / "c", quantize)
    patch_config(path, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    with Checkpoint.open(library("llama4-bf16")) as source, Checkpoint.open(path) as checkpoint:
        gate_up, down = source.weights(LAYER).dequantize()
        weights = checkpoint.weights(LAYER)
        assert checkpoint.recipe(LAYER) == FP8_STATIC
    assert weights.spec.format == "fp8_tensor"
    assert weights.expert(0).down_input_scale == 0.25
    assert torch.equal(weights.dequantize()[0], gate_up.to(torch.float8_e4m3fn).float() * 0.5)
    assert torch.equal(weights.dequantize()[1], down.to(torch.float8_e4m3fn).float() * 0.5)


@pytest.mark.parametrize(
    ("stored", "claimed", "expected"),
    [
        ("qwen3-bf16", FP8_BLOCK, "bf16"),
        ("qwen3-fp8", None, "fp8_block128"),
        ("qwen3-fp8", {"quant_method": "gptq", "bits": 4, "group_size": 128}, "fp8_block128"),
        ("qwen3-fp8", FP8_BLOCK | {"weight_block_size": [64, 64]}, "fp8_block128"),
        ("deepseek-v4-fp4", FP8_BLOCK, "mxfp4"),
    ],
)
def test_tensors_count_more_than_the_config(stored, claimed, expected, library: Library, tmp_path: Path) -> None:
    path = shutil.copytree(library(stored), tmp_path / "c")
    patch_config(path, quantization_config=claimed, expert_dtype="fp8" if stored == "deepseek-v4-fp4" else None)
    with Checkpoint.open(path) as checkpoint, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert checkpoint.spec(LAYER).format == expected
        assert checkpoint.recipe(LAYER) in (UNQUANTIZED, FP8_GROUP128)
        weights = checkpoint.weights(LAYER)
    assert len(seen) == 1
    assert expected in str(seen[0].message)
    with Checkpoint.open(library(stored)) as original:
        assert torch.equal(weights.dequantize()[1], original.weights(LAYER).dequantize()[1])


def set_first(name: str, value: float) -> Any:
    """Put ``value`` into a tensor's last element; bytes of an 8-bit float for an integer value."""

    def change(tensors: dict[str, Tensor]) -> None:
        flat = tensors[name].reshape(-1)
        if flat.element_size() == 1:
            flat.view(torch.uint8)[-1] = int(value)
        else:
            flat[-1] = value

    return change


NAN = float("nan")
DEEPSEEK = "model.layers.3.mlp.experts.7.down_proj"


@pytest.mark.parametrize(
    ("name", "change", "where", "got"),
    [
        ("gpt-oss-mxfp4", set_first(f"{GPT_OSS}.down_proj_scales", 255), "down_proj", "NaN"),
        ("gpt-oss-mxfp4", set_first(f"{GPT_OSS}.gate_up_proj_bias", NAN), "gate_up_proj_bias", "NaN"),
        ("deepseek-v3-fp8", set_first(f"{DEEPSEEK}.weight_scale_inv", NAN), DEEPSEEK, "NaN"),
        ("glm-4.7-nvfp4", set_first(f"{DEEPSEEK}.weight_scale", 0x7F), DEEPSEEK, "NaN"),
        ("glm-4.7-nvfp4", set_first(f"{DEEPSEEK}.weight_scale_2", NAN), DEEPSEEK, "NaN"),
        ("glm-4.5-air-nvfp4-ct", set_first(f"{DEEPSEEK}.weight_global_scale", 0), "weight_global_scale", "0.0"),
        ("kimi-k2-thinking-int4", set_first(f"{DEEPSEEK}.weight_scale", float("inf")), DEEPSEEK, "infinity"),
    ],
)
def test_bad_tensors_are_found_when_their_expert_is_read(
    name: str, change: Any, where: str, got: str, library: Library, tmp_path: Path
) -> None:
    with Checkpoint.open(damaged(library(name), tmp_path / "c", change)) as checkpoint:
        weights = checkpoint.weights(LAYER)
        weights.expert(0)
        with pytest.raises((CheckpointError, FormatError)) as refusal:
            weights.expert(7)
    assert where in refusal.value.where
    assert got in (refusal.value.got or "")


@pytest.mark.parametrize(
    ("name", "change", "where", "got"),
    [
        ("deepseek-v3-fp8", cast(f"{DEEPSEEK}.weight$", torch.bfloat16), f"{DEEPSEEK}.weight", "BF16"),
        ("deepseek-v3-fp8", reshaped(f"{DEEPSEEK}.weight_scale_inv", 4, 3), f"{DEEPSEEK}.weight_scale_inv", "[4, 3]"),
        ("deepseek-v3-fp8", without(f"{DEEPSEEK}.weight_scale_inv"), f"{DEEPSEEK}.weight_scale_inv", "only weight"),
        ("mixtral-bf16", without(r"\.7\."), "experts.7.w1", "none"),
    ],
)
def test_every_expert_is_stored_as_the_first_before_any_is_read(
    name: str, change: Any, where: str, got: str, library: Library, tmp_path: Path
) -> None:
    """A config may claim any number of experts; nobody should allocate memory for those that are not there."""
    with Checkpoint.open(damaged(library(name), tmp_path / "c", change)) as checkpoint:
        with pytest.raises((CheckpointError, FormatError)) as refusal:
            checkpoint.weights(LAYER)
        assert where in refusal.value.where
        assert got in (refusal.value.got or "")
        if "deepseek" in name:  # the last expert is no matter to the other rank
            assert checkpoint.weights(LAYER, ep=(0, 2)).expert(0)


@pytest.mark.parametrize(
    ("name", "change", "where", "got"),
    [
        ("gpt-oss-mxfp4", reshaped("down_proj_bias", E, H + 1), "down_proj_bias", "257"),
        ("gpt-oss-mxfp4", without("gate_up_proj_scales"), f"{GPT_OSS}.gate_up_proj_scales", "only blocks"),
        ("gpt-oss-mxfp4", without("down_proj_blocks"), "down_proj_blocks", "scales"),
        ("gpt-oss-mxfp4", without("down_proj_bias"), "down_proj_bias", "no such"),
        ("gpt-oss-mxfp4", reshaped("gate_up_proj_scales", E, 2 * F, 5), f"{GPT_OSS}.gate_up_proj_scales", "5"),
        ("gpt-oss-mxfp4", reshaped("gate_up_proj_scales", E, F, 8), f"{GPT_OSS}.gate_up_proj_scales", "[192, 8]"),
        ("gpt-oss-mxfp4", reshaped("down_proj_scales", 7, H, F // 32), f"{GPT_OSS}.down_proj_scales", "[7, 256, 6]"),
        ("gpt-oss-mxfp4", cast("down_proj_scales", torch.float32), f"{GPT_OSS}.down_proj_scales", "F32"),
        ("qwen3-fp8", without("scale_inv$"), "experts.0.gate_proj.weight_scale_inv", "only weight"),
        ("mixtral-bf16", reshaped("experts.0.w2.weight", H, F - 32), "w2", "160"),
        ("mixtral-bf16", cast("", torch.float32), "experts.0.w1.weight", "F32"),
        ("mixtral-bf16", without(r"\.w3\."), "experts.0.w3.weight", "none"),
    ],
)
def test_bad_layers_are_found_from_the_headers(
    name: str, change: Any, where: str, got: str, library: Library, tmp_path: Path
) -> None:
    with Checkpoint.open(damaged(library(name), tmp_path / "c", change)) as checkpoint:
        with pytest.raises((CheckpointError, FormatError)) as refusal:
            checkpoint.spec(LAYER)
        with pytest.raises(type(refusal.value)):
            checkpoint.weights(LAYER)
    assert where in refusal.value.where
    assert got in (refusal.value.got or "")


def test_a_quantization_that_only_experts_one_by_one_have(tmp_path: Path) -> None:
    described = config("gpt-oss-mxfp4") | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.spec(LAYER).format == "nvfp4"


def test_tensors_of_another_family(library: Library, tmp_path: Path) -> None:
    """They are all there and agree with the quantization, and this family does not store its experts so."""
    directory = damaged(library("gpt-oss-mxfp4"), tmp_path / "c", lambda tensors: None)
    patch_config(directory, model_type="mixtral", num_experts_per_tok=2)
    with Checkpoint.open(directory) as checkpoint, pytest.raises(FormatError) as refusal:
        checkpoint.spec(LAYER)
    assert str(refusal.value) == (
        f"{GPT_OSS}.gate_up_proj_blocks: expected tensors of dialect plain, got blocks, scales of dialect gpt_oss"
    )


@pytest.mark.parametrize(("layer", "got"), [(0, "dense"), (-1, "no such"), (4, "no such"), (61, "no such")])
def test_layers_without_experts_are_named_as_such(layer: int, got: str, library: Library) -> None:
    with Checkpoint.open(library("deepseek-v3-fp8")) as checkpoint:
        for call in (checkpoint.spec, checkpoint.weights, checkpoint.problem, checkpoint.recipe):
            with pytest.raises(CheckpointNotFound, match=rf"routed experts \(3\), got .*{got}"):
                call(layer)


def test_slices_that_cut_groups_are_refused(library: Library) -> None:
    with Checkpoint.open(library("nemotron-3-nvfp4")) as checkpoint:
        for call in (checkpoint.spec, checkpoint.weights, checkpoint.problem):
            with pytest.raises(ArgumentError, match="24 is not a multiple of 16"):
                call(LAYER, tp=8)
        with pytest.raises(ArgumentError, match="ep=9"):
            checkpoint.weights(LAYER, ep=9)


def test_the_real_nemotron_cannot_be_split_over_16_ranks(tmp_path: Path) -> None:
    described = config("nemotron-3-nvfp4", hidden=4096, intermediate=2688, latent=1024)
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    with Checkpoint.open(tmp_path / "config.json") as checkpoint:
        assert checkpoint.spec(LAYER, tp=8).intermediate == 336
        with pytest.raises(ArgumentError, match=r"168 is not a multiple of 16.*\n.*1, 2, 3, 4, 6, 7, 8, 12, 14"):
            checkpoint.spec(LAYER, tp=16)


def test_a_truncated_shard_is_named(library: Library, tmp_path: Path) -> None:
    path = shutil.copytree(library("mixtral-bf16"), tmp_path / "c")
    shard = path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*complete"):
        Checkpoint.open(path).spec(LAYER)


def test_a_shard_of_other_layers_may_be_missing(library: Library, tmp_path: Path) -> None:
    """An index that lists them is enough to open; asking for theirs says which file is missing."""
    path = shutil.copytree(library("gpt-oss-mxfp4"), tmp_path / "c")
    (path / "model.safetensors").rename(path / "model-00002-of-00002.safetensors")
    with Checkpoint.open(library("gpt-oss-mxfp4")) as checkpoint:
        names = checkpoint.files.names
    weight_map = dict.fromkeys(names, "model-00002-of-00002.safetensors")
    weight_map |= {n.replace("layers.3", "layers.2"): "model-00001-of-00002.safetensors" for n in names}
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.weights(LAYER).expert(0).nbytes == checkpoint.spec(LAYER).expert_bytes
        assert checkpoint.layers_here == (LAYER,)
        with pytest.raises(CheckpointNotFound, match="model-00001-of-00002"):
            checkpoint.weights(2)


def test_no_experts_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3-bf16")), encoding="utf-8")
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(CheckpointNotFound, match="gate_proj"):
        checkpoint.weights(LAYER)
