"""load(experts=...): experts in 16 bits, quantized while loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.quantized import QUANTIZED_FORMATS
from polymoe.errors import ArgumentError, CheckpointError, FormatError
from polymoe.formats import FORMATS
from polymoe.layer.experts import FusedExperts

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from polymoe.engines.transformers import PackedExperts, PolymoeConfig, load
from support.requantized import SOURCE


def packed_of(model: Any) -> list[FusedExperts]:
    return [module.fused for module in model.modules() if isinstance(module, PackedExperts)]


@pytest.mark.parametrize("format", QUANTIZED_FORMATS)
def test_logits_are_those_of_the_dequantized_weights(bf16: Path, format: str) -> None:
    model, tokenizer = load(bf16, experts=format, device="cpu", dtype=torch.float32)
    wanted = AutoModelForCausalLM.from_pretrained(
        bf16, dtype=torch.float32, experts_implementation="eager", trust_remote_code=False
    )
    layers = [m for m in wanted.modules() if type(m).__name__ == "Qwen3MoeExperts"]
    found = packed_of(model)
    assert len(layers) == len(found) == 4
    quantize = FORMATS[format].quantize
    for theirs, ours in zip(layers, found, strict=True):
        assert ours.weights.spec.format == format
        # NVFP4's global scale is that of gate and up together; the other formats see no difference.
        gate_up, down = (quantize(p.data).dequantize() for p in (theirs.gate_up_proj, theirs.down_proj))
        for got, expected in zip(ours.weights.dequantize(), (gate_up, down), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
        theirs.gate_up_proj.data, theirs.down_proj.data = gate_up, down
    inputs = tokenizer(["123+456=", "7+8="], return_tensors="pt", padding=True)
    with torch.inference_mode():
        expected, got = wanted(**inputs).logits, model(**inputs).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_slices_are_those_of_the_whole_quantized_layer(bf16: Path) -> None:
    """Every rank has the codes that a file would give it."""
    checkpoint = Checkpoint.open(bf16, experts="nvfp4")
    whole = checkpoint.weights(0).expert(1)
    halves = [checkpoint.weights(0, tp=(rank, 2)).expert(1) for rank in (0, 1)]
    assert torch.equal(torch.cat([x.down.codes for x in halves], 1), whole.down.codes)
    assert torch.equal(torch.cat([x.up.codes for x in halves]), whole.up.codes)
    assert torch.equal(halves[1].up.global_scale, whole.gate.global_scale)


def test_polymoe_config(bf16: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        bf16, quantization_config=PolymoeConfig(experts="int4_g32"), trust_remote_code=False
    )
    assert [experts.weights.spec.format for experts in packed_of(model)] == ["int4_g32"] * 4


def test_experts_that_are_quantized_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"(?s)expected experts in 16 bits, got fp8_block128.*load as they are"):
        load(SOURCE, experts="mxfp4", device="cpu")


@pytest.mark.parametrize("name", ["mxpf4", "bf16"])
def test_unknown_formats_are_refused(bf16: Path, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"experts.*{name}"):
        load(bf16, experts=name, device="cpu")
    with pytest.raises(ArgumentError, match=f"experts.*{name}"):
        PolymoeConfig(experts=name)


def test_sizes_that_cut_a_group_are_refused(bf16: Path) -> None:
    checkpoint = Checkpoint.open(bf16 / "config.json", experts="int4_g128")
    checkpoint.moe = checkpoint.moe.__class__(**{
        **{name: getattr(checkpoint.moe, name) for name in checkpoint.moe.__slots__}, "intermediate": 96
    })  # fmt: skip
    with pytest.raises(
        CheckpointError, match=r"(?s)H=256, F=96.*these sizes allow mxfp4, nvfp4, int4_g32, fp8_block128"
    ):
        checkpoint.spec(0)


def test_weights_that_are_not_numbers_are_named(bf16: Path, tmp_path: Path) -> None:
    for file in bf16.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(bf16 / "model.safetensors")
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    tensors[name][5, 7] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"layers\.2\.mlp\.experts\.3\.up_proj.*finite.*NaN"):
        load(tmp_path, experts="mxfp4", device="cpu")
