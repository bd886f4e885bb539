"""What an engine did not load is found, by name, however it loads: one shard at a time, stacked, or whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polymoe.engines.serving.loading import LoadedParts
from polymoe.errors import CheckpointError
from support.stacked import experts_of

MATRIX = torch.zeros(2, 2)


def parts() -> LoadedParts:
    """Of eight gated experts, each with a matrix and its scales."""
    return LoadedParts(experts_of("sums-deepseek-v4-mxfp4", (0, 1), (0, 1)))


def load_all(loaded: LoadedParts, weight: Tensor = MATRIX, count: int = 8) -> None:
    for name in ("weight", "weight_scale"):
        for expert in range(count):
            for shard in ("w1", "w3"):
                loaded.note(f"w13_{name}", weight, shard, expert)
            loaded.note(f"w2_{name}", weight, "w2", expert)


def test_one_shard_of_one_expert_at_a_time() -> None:
    loaded = parts()
    load_all(loaded)
    assert loaded.missing == ()
    loaded.require_all()


def test_the_same_shard_twice_is_one_part() -> None:
    loaded = parts()
    load_all(loaded, count=7)
    load_all(loaded, count=7)
    assert loaded.missing == ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    with pytest.raises(CheckpointError, match="got 14 of 16 parts, 14 of 16 parts, 7 of 8 parts, 7 of 8 parts"):
        loaded.require_all()


def test_stacked_experts_and_whole_tensors() -> None:
    loaded = parts()
    loaded.note("w13_weight", torch.zeros(8, 2, 2), "w1", 0)
    loaded.note("w13_weight", torch.zeros(8, 2, 2), "w3", 0)
    loaded.note("w13_weight_scale", torch.zeros(8, 2, 2), "w13", None)
    loaded.note("w2_weight", torch.zeros(8, 2, 2), None, None)
    assert loaded.missing == ("w2_weight_scale",)
    loaded.forget("w13_weight")
    assert loaded.missing == ("w13_weight", "w2_weight_scale")
