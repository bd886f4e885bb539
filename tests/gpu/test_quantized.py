"""Experts of a checkpoint, quantized together on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.quantized import QUANTIZED_FORMATS
from support.quantized import assert_same

MODELS = Path(__file__).parents[2] / "models"


@pytest.mark.parametrize("format", QUANTIZED_FORMATS)
@pytest.mark.parametrize("model", ["sums-olmoe", "sums-qwen3-next"])
def test_a_gpu_quantizes_a_checkpoint_as_a_cpu(model: str, format: str) -> None:
    with Checkpoint.open(MODELS / model, experts=format) as checkpoint:
        for layer in checkpoint.layers:
            alone = checkpoint.weights(layer)
            together = checkpoint.weights(layer, device="cuda")
            for e in range(alone.spec.local_experts):
                expert = together.peek(e)
                assert expert.up.device.type == "cuda"
                for name, projection in alone.expert(e).projections.items():
                    assert_same(expert.projections[name].to("cpu"), projection)
