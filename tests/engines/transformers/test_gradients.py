"""Whole models outside of no_grad: their hidden states require gradients, which not every backend has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polymoe.layer.load
from polymoe.errors import UnsupportedProblem

pytest.importorskip("transformers")

from polymoe.engines.transformers import load
from support.packed_model import CHECKPOINT, batch
from support.toys import LAYOUTS, Toy


@pytest.fixture
def without_backward(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A packed model whose only backend has no backward, and a batch for it."""
    monkeypatch.setattr(polymoe.layer.load, "BACKENDS", {"any": Toy("any")})
    monkeypatch.setattr(polymoe.layer.load, "LAYOUTS", LAYOUTS)
    model, tokenizer = load(CHECKPOINT, device="cpu", dtype=torch.float32)
    return model, batch(tokenizer, 2)


def test_a_packed_model_refuses_where_gradients_are_recorded(without_backward: Any) -> None:
    model, inputs = without_backward
    expected = model(**inputs).logits  # nothing requires a gradient unless somebody asks for it
    model.get_input_embeddings().requires_grad_(True)
    with pytest.raises(UnsupportedProblem, match="x_TH: expected no gradient: backend 'any' has no backward for it"):
        model(**inputs)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected)


def test_gradients_through_the_reference() -> None:
    model, tokenizer = load(CHECKPOINT, device="cpu", dtype=torch.float32)
    assert not any(p.requires_grad for p in model.parameters())
    for p in model.parameters():
        p.requires_grad_(p.is_floating_point() and p.dtype == torch.float32)
    model(**batch(tokenizer, 2)).logits.sum().backward()
    routers = [p for name, p in model.named_parameters() if "router" in name]
    assert len(routers) >= 4
    assert all(p.grad is not None and p.grad.any() for p in (model.get_input_embeddings().weight, *routers))
