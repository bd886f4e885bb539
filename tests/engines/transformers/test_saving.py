"""torch.save of a whole model with packed experts."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from polymoe.engines.transformers import load
from support.packed_model import CHECKPOINT


def test_saved_and_copied_models_compute_the_same(tmp_path: Path) -> None:
    model, _ = load(CHECKPOINT, device="cpu", dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids).logits
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(ids).logits, expected)
    assert torch.equal(copy.deepcopy(model)(ids).logits, expected)
    assert model.hf_quantizer.checkpoint is not None  # of the model itself, which still names it in messages
