"""SGLang's methods and schemes create tensors that polymoe reads, also those that SGLang itself makes on GPUs only."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

if importlib.util.find_spec("sglang") is None:
    pytest.skip("scripts/test --engines has it", allow_module_level=True)

from polymoe.engines.serving.sources import SGLANG, StackedExperts
from polymoe.engines.sglang.facts import create_tensors, storing

QUANTIZATION = "sglang.srt.layers.quantization"
E, H, F = 8, 256, 128
_FP8: dict[str, Any] = {"weight_block_size": [128, 128], "is_checkpoint_fp8_serialized": True}
_FP8 |= {"activation_scheme": "dynamic"}
_BLOCKS = {"block_quant": True, "use_mxfp8": False, "weight_block_size": [128, 128], "quant_config": _FP8}
_INT4 = {"packed_factor": 8, "num_bits": 4, "strategy": "group", "group_size": 32, "actorder": None, "sym": True}
_GPTQ = {"pack_factor": 8, "group_size": 128, "desc_act": False, "is_sym": True}
_NVFP4: dict[str, Any] = {
    "is_checkpoint_nvfp4_serialized": True,
    "group_size": 16,
    "is_checkpoint_fp8_serialized": False,
}
_NVFP4 |= {"get_name": lambda: "modelopt_fp4"}

METHODS: list[tuple[str, str, dict[str, Any], str]] = [
    ("fp8", "Fp8MoEMethod", {**_BLOCKS, "is_fp4_expert": False}, "fp8_block128"),
    ("fp8", "Fp8MoEMethod", {**_BLOCKS, "is_fp4_expert": True}, "mxfp4"),
    (
        "modelopt_quant",
        "ModelOptNvFp4FusedMoEMethod",
        {"quant_config": _NVFP4, "enable_flashinfer_trtllm_moe": False},
        "nvfp4",
    ),
    ("compressed_tensors.schemes", "CompressedTensorsW4A4Nvfp4MoE", {"group_size": 16}, "nvfp4"),
    ("compressed_tensors.schemes", "CompressedTensorsWNA16MoE", _INT4, "int4_g32"),
    ("compressed_tensors.schemes", "CompressedTensorsWNA16TritonMoE", _INT4, "int4_g32"),
    ("awq.schemes", "AWQMoEScheme", {"quant_config": {"pack_factor": 8, "group_size": 128}}, "int4_g128_zp"),
    ("gptq.schemes", "GPTQMarlinMoEScheme", {"quant_config": _GPTQ, "kernel": SimpleNamespace()}, "int4_g128"),
]


class Layer(nn.Module):
    """What the methods ask of a layer."""

    num_experts = num_local_experts = E
    moe_tp_size = 1
    moe_runner_config = SimpleNamespace(is_gated=True)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(("module", "name", "state", "encoding"), METHODS, ids=lambda value: str(value)[:40])
def test_created_tensors_are_read(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, state: dict[str, Any], encoding: str, device: str
) -> None:
    kind = getattr(importlib.import_module(f"{QUANTIZATION}.{module}"), name)
    fp8 = importlib.import_module(f"{QUANTIZATION}.fp8")
    monkeypatch.setattr(fp8, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    method = object.__new__(kind)  # the constructors look for a GPU
    given = {key: SimpleNamespace(**value) if key == "quant_config" else value for key, value in state.items()}
    if name == "Fp8MoEMethod":
        given["quant_config"].is_fp4_experts = given["is_fp4_expert"]
    method.__dict__.update(given)
    tensors = create_tensors(
        method.create_weights,
        Layer(),
        device,
        num_experts=E,
        hidden_size=H,
        intermediate_size_per_partition=F,
        params_dtype=torch.bfloat16,
        weight_loader=lambda *_, **__: None,
        with_bias=False,
        moe_intermediate_size=F,
    )
    assert {tensor.device.type for tensor in tensors.values()} == {device}
    experts = StackedExperts(
        where="layer",
        source=SGLANG[name],
        tensors=tensors,
        hidden=H,
        intermediate=F,
        k_first=any(getattr(tensor, "is_transposed", False) for tensor in tensors.values()),
        symmetric=bool(getattr(given.get("quant_config"), "is_sym", False)),
    )
    assert [str(found.name) for found in experts.encodings()] == [encoding] * 2


def test_gptqs_scheme_is_found_before_its_method_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gptq = importlib.import_module(f"{QUANTIZATION}.gptq.gptq")
    monkeypatch.setattr(gptq, "GPTQMarlinMoEScheme", type("GPTQMarlinMoEScheme", (), {"__init__": lambda *_: None}))
    config = object.__new__(gptq.GPTQMarlinConfig)
    method = gptq.GPTQMarlinMoEMethod(config)
    assert type(storing(method, Layer())).__name__ == "GPTQMarlinMoEScheme"
