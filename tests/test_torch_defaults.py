"""Engines load models with another default dtype of torch, and programs set a default device: both change nothing."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import polymoe
import polymoe.layouts
from polymoe.backends import torch_cpu
from polymoe.backends.flashinfer.routes import swiglu_constants
from polymoe.backends.reference import emulate_activations
from polymoe.formats import FORMATS
from polymoe.layouts import LAYOUTS
from polymoe.layouts.cuda import bits, w4a16_fragments
from polymoe.problem.activations import SwiGLU
from support.problems import random_experts

MODELS = sorted(p for p in (Path(__file__).parent.parent / "models").glob("sums-*") if p.is_dir())


CPU = torch.device("cpu")


@contextmanager
def other_defaults() -> Iterator[None]:
    """On the meta device nothing can be computed: what is made there by accident fails."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_layers_are_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed bytes and results; and the load-time check calls backends with the dtypes that kernels read."""
    layer = 2  # the first one with experts in some models
    expected = polymoe.load_experts(path, layer=layer, device="cpu")
    seen = []
    run = torch_cpu.TorchRunner.run

    def recorded(self: Any, call: Any, config: Any) -> Any:
        seen.append((call.x_TH.dtype, call.topk_ids_TA.dtype, call.topk_weights_TA.dtype))
        return run(self, call, config)

    monkeypatch.setattr(torch_cpu.TorchRunner, "run", recorded)
    spec = expected.problem.spec
    x = torch.randn(3, spec.hidden).bfloat16()
    ids, weights = torch.tensor([[0, 1], [1, 2], [3, 0]]), torch.rand(3, 2)
    with other_defaults():
        experts = polymoe.load_experts(path, layer=layer, device="cpu")
        y = experts(x, ids, weights)
    assert set(seen) == {(torch.bfloat16, torch.int64, torch.float32)}
    for name, tensor in expected.packed.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), experts.packed.tensors[name].view(torch.uint8)), name
    assert torch.equal(y, expected(x, ids, weights))


def test_every_layout_is_the_same() -> None:
    tables = bits._tables, w4a16_fragments.e4m3_codes
    packed = 0
    for format in FORMATS:
        weights = random_experts(format, hidden=256, intermediate=256, experts=2)
        for layout in LAYOUTS.values():
            if layout.check(weights.spec):
                continue
            expected = layout.pack(weights, CPU).tensors
            for table in tables:
                table.cache_clear()
            with other_defaults():
                got = layout.pack(weights, CPU)
                unpacked = layout.unpack(got).expert(1)
            assert got.tensors.keys() == expected.keys()
            for name, tensor in expected.items():
                assert got.tensors[name].dtype == tensor.dtype, (layout.name, name)
                assert torch.equal(got.tensors[name].view(torch.uint8), tensor.view(torch.uint8)), (layout.name, name)
            assert torch.equal(unpacked.up.dequantize(), weights.expert(1).up.dequantize())
            packed += 1
    assert packed > len(FORMATS)


def test_no_cache_keeps_tensors_of_a_device() -> None:
    """vLLM's sleep mode discards what was allocated while it loaded a model: packing after it would read garbage."""
    caches = {
        f"{name}.{key}": value.__wrapped__.__annotations__
        for name in (module.name for module in pkgutil.walk_packages(polymoe.layouts.__path__, "polymoe.layouts."))
        for key, value in vars(importlib.import_module(name)).items()
        if hasattr(value, "cache_info")
    }
    assert "polymoe.layouts.cuda.bits._tables" in caches
    kept = [name for name, types in caches.items() if "Tensor" in types["return"] and "device" in types]
    assert not kept


def test_constants_and_rounding_are_the_same() -> None:
    x = torch.randn(3, 64)
    expected = emulate_activations(x, "nvfp4")
    with other_defaults():
        alpha, beta, limit = swiglu_constants(SwiGLU(1.702, 1.0, 7.0), 4, CPU)
        assert torch.equal(emulate_activations(x, "nvfp4"), expected)
    for constant, value in ((alpha, 1.702), (beta, 1.0), (limit, 7.0)):
        assert constant is not None
        assert torch.equal(constant, torch.full((4,), value))
