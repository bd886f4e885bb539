"""Engines load models with another default dtype of torch: it changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import polymoe
from polymoe.backends import torch_cpu

MODELS = sorted(p for p in (Path(__file__).parent.parent / "models").glob("sums-*") if p.is_dir())


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
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

    def recorded(self: Any, x: Any, routing: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((x.dtype, routing.topk_ids_TA.dtype, routing.topk_weights_TA.dtype))
        return run(self, x, routing, *args, **kwargs)

    monkeypatch.setattr(torch_cpu.TorchRunner, "run", recorded)
    spec = expected.problem.spec
    x = torch.randn(3, spec.hidden).bfloat16()
    ids, weights = torch.tensor([[0, 1], [1, 2], [3, 0]]), torch.rand(3, 2)
    with default_dtype(torch.bfloat16):
        experts = polymoe.load_experts(path, layer=layer, device="cpu")
        y = experts(x, ids, weights)
    assert set(seen) == {(torch.bfloat16, torch.int64, torch.float32)}
    for name, tensor in expected.packed.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), experts.packed.tensors[name].view(torch.uint8)), name
    assert torch.equal(y, expected(x, ids, weights))
