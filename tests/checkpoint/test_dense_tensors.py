"""Tensors outside the experts: one a matrix, whatever it is stored as; everything else as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.config import parse_quantization
from polymoe.checkpoint.dense_tensors import DenseTensors
from polymoe.checkpoint.dialects import DIALECTS
from polymoe.checkpoint.files import CheckpointFiles
from polymoe.errors import CheckpointError, FormatError
from polymoe.formats import FORMATS, PerGroup, format_of
from polymoe.formats.encoding import Encoding
from support.configs import KIMI_IGNORE, config

Q_PROJ = "model.layers.3.self_attn.q_proj"
SIZES = {"hidden": 256, "intermediate": 128, "experts": 8, "top_k": 1, "layers": 4}
ENCODINGS = {
    "deepseek": FORMATS["fp8_block128"].encoding,
    "ct_float": FORMATS["fp8_channel"].encoding,
    "modelopt_fp8": FORMATS["fp8_tensor"].encoding,
    "ct_int4": FORMATS["int4_g32"].encoding,
    "ct_mxfp4": FORMATS["mxfp4"].encoding,
    "minimax_mxfp8": FORMATS["mxfp8"].encoding,
    "ct_nvfp4": FORMATS["nvfp4"].encoding,
    "modelopt_nvfp4": FORMATS["nvfp4"].encoding,
    "gptq": FORMATS["int4_g128"].encoding,
    "awq": Encoding(element="int4", granularity=PerGroup(1, 128), scale_dtype="float16", zero_points=True),
}


def opened(tmp_path: Path, name: str, tensors: dict[str, torch.Tensor], **changed: Any) -> Checkpoint:
    """A checkpoint of configuration ``name`` that holds ``tensors`` only."""
    (tmp_path / "config.json").write_text(json.dumps(config(name, **SIZES) | changed))
    save_file({k: t.contiguous() for k, t in tensors.items()}, tmp_path / "model.safetensors")
    return Checkpoint.open(tmp_path)


def stored(dialect: str, generator: torch.Generator, rows: int = 192) -> dict[str, torch.Tensor]:
    matrix = format_of(ENCODINGS[dialect]).quantize(torch.randn(rows, 256, generator=generator))
    return {f"{Q_PROJ}.{suffix}": tensor for suffix, tensor in DIALECTS[dialect].write(matrix).items()}


@pytest.mark.parametrize("dialect", ENCODINGS)
def test_a_quantized_matrix_is_one_tensor_of_numbers(tmp_path: Path, dialect: str, generator: torch.Generator) -> None:
    matrix = format_of(ENCODINGS[dialect]).quantize(torch.randn(192, 256, generator=generator))
    written = {f"{Q_PROJ}.{s}": t for s, t in DIALECTS[dialect].write(matrix).items()}
    dense = opened(tmp_path, "deepseek-v3-fp8", written).dense_tensors()
    assert list(dense) == [f"{Q_PROJ}.weight"]
    tensor = dense[f"{Q_PROJ}.weight"]
    assert (tensor.get_dtype(), tensor.get_shape()) == ("F32", [192, 256])
    torch.testing.assert_close(tensor[...], matrix.dequantize(), rtol=1e-7, atol=0)  # a divisor's last bit
    assert torch.equal(tensor[:3], tensor[...][:3])
    (read,) = dense.matrices_read
    assert (read.module, read.numel) == (Q_PROJ, 192 * 256)
    if dialect != "gptq":  # always stores zero points; that they mean nothing is said by its own config alone
        assert (read.encoding.name, read.nbytes) == (ENCODINGS[dialect].name, matrix.nbytes)
    assert read.as_configured == (dialect == "deepseek")


def test_everything_else_is_as_it_is_stored(tmp_path: Path) -> None:
    tensors = {
        "model.norm.weight": torch.randn(8).bfloat16(),
        "model.layers.0.hc_attn_scale": torch.randn(3),
        "model.layers.0.gate.tid2eid": torch.arange(6, dtype=torch.int32),
        "model.layers.0.post.weight": torch.randn(8),
        "model.layers.0.post.scale": torch.randn(8),  # a module of its own, not a weight's scale: see its dtype
    }
    del tensors["model.layers.0.post.weight"]
    dense = opened(tmp_path, "deepseek-v3-fp8", tensors).dense_tensors()
    assert set(dense) == set(tensors)
    assert len(dense) == len(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(dense[name][...], tensor)
        assert dense[name].get_shape() == list(tensor.shape)
    assert dense["model.norm.weight"].get_dtype() == "BF16"
    assert not dense.matrices_read


def test_experts_and_scales_of_a_kv_cache_are_left_out(tmp_path: Path, generator: torch.Generator) -> None:
    experts = {
        f"model.layers.3.mlp.experts.{e}.{p}_proj.{s}": t
        for e in range(8)
        for p, rows, columns in (("gate", 128, 256), ("up", 128, 256), ("down", 256, 128))
        for s, t in DIALECTS["deepseek"]
        .write(FORMATS["fp8_block128"].quantize(torch.randn(rows, columns, generator=generator)))
        .items()
    }
    kept = {"model.layers.3.mlp.shared_experts.up_proj.weight": torch.zeros(2, 2, dtype=torch.bfloat16)}
    cache = {"model.layers.3.self_attn.k_proj.k_scale": torch.ones(())}
    assert set(opened(tmp_path, "deepseek-v3-fp8", experts | kept | cache).dense_tensors()) == set(kept)


def test_the_config_decides_only_what_tensors_leave_open(tmp_path: Path, generator: torch.Generator) -> None:
    """A grid of 2 x 2 scales over 192 x 192 could be blocks of 96, 128 or 160; the config says 128."""
    matrix = FORMATS["fp8_block128"].quantize(torch.randn(192, 192, generator=generator))
    written = {f"{Q_PROJ}.{s}": t for s, t in DIALECTS["deepseek"].write(matrix).items()}
    dense = opened(tmp_path, "deepseek-v3-fp8", written).dense_tensors()
    assert torch.equal(dense[f"{Q_PROJ}.weight"][...], matrix.dequantize())


def test_a_matrix_the_config_leaves_out_is_read_as_it_is(tmp_path: Path, generator: torch.Generator) -> None:
    assert any("self_attn" in pattern for pattern in KIMI_IGNORE)
    dense = opened(tmp_path, "kimi-k2-thinking-int4", stored("ct_int4", generator)).dense_tensors()
    assert dense[f"{Q_PROJ}.weight"][...].shape == (192, 256)
    (read,) = dense.matrices_read
    assert not read.as_configured
    assert read.configured == "bf16, plain"


@pytest.mark.parametrize(
    ("dialect", "without", "error", "says"),
    [
        ("deepseek", "weight_scale_inv", FormatError, r"q_proj\.weight: expected a scale beside"),
        ("modelopt_nvfp4", "weight_scale_2", CheckpointError, r"q_proj\.weight_scale_2: expected this tensor"),
        ("ct_int4", "weight_scale", CheckpointError, r"q_proj\.weight_scale: expected this tensor"),
        ("awq", "qzeros", CheckpointError, r"q_proj\.qzeros: expected this tensor"),
    ],
)
def test_a_missing_part_is_named(
    tmp_path: Path, generator: torch.Generator, dialect: str, without: str, error: Any, says: str
) -> None:
    written = stored(dialect, generator)
    del written[f"{Q_PROJ}.{without}"]
    name = {"modelopt_nvfp4": "qwen3-fp8", "awq": "qwen3-awq", "ct_int4": "kimi-k2-thinking-int4"}
    changed: dict[str, Any] = {}
    if dialect == "modelopt_nvfp4":
        changed["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if dialect == "ct_int4":
        changed["quantization_config"] = {
            **config("kimi-k2-thinking-int4")["quantization_config"],
            "ignore": ["lm_head"],
        }
    dense = opened(tmp_path, name.get(dialect, "deepseek-v3-fp8"), written, **changed).dense_tensors()
    with pytest.raises(error, match=says):
        dense[f"{Q_PROJ}.weight"][...]


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, generator: torch.Generator) -> None:
    written = stored("deepseek", generator)
    written[f"{Q_PROJ}.weight_scale_inv"][0, 1] = torch.nan
    dense = opened(tmp_path, "deepseek-v3-fp8", written).dense_tensors()
    with pytest.raises(
        FormatError, match=rf"{Q_PROJ} scales: expected finite numbers, got NaN or infinity at \[0, 1\]"
    ):
        dense[f"{Q_PROJ}.weight"][...]


def test_the_number_of_quantized_matrices_is_bounded(tmp_path: Path) -> None:
    """Each is compared with every pattern of the config; no header is read for that."""
    names = [f"layers.{i}.q_proj.{suffix}" for i in range(20_001) for suffix in ("weight", "weight_scale_inv")]
    files = CheckpointFiles(tmp_path, {}, None, dict.fromkeys(names, "model.safetensors"))
    with pytest.raises(CheckpointError, match="at most 20000 quantized matrices outside the experts, got 20001"):
        DenseTensors(files, parse_quantization(config("qwen3-fp8")))
