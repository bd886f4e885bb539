"""Models whose experts lie in host memory: the same answers, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from polymoe.engines.transformers import load
from polymoe.engines.transformers.generator import Generator
from polymoe.errors import ArgumentError
from polymoe.layer.offload import OffloadedExperts, slots_of
from polymoe.problem.numerics import relative_error
from support.problems import random_experts

MODELS = Path(__file__).parents[3] / "models"
SUMS = str(MODELS / "sums-gpt-oss-mxfp4")


def test_a_model_computes_the_same() -> None:
    resident, tokenizer = load(SUMS, device="cpu")
    model, _ = load(SUMS, device="cpu", expert_memory="4slots")
    layers = [m for m in model.modules() if isinstance(m, OffloadedExperts)]
    assert layers
    assert all(layer.slots == 4 for layer in layers)
    ids = tokenizer("123+456=", return_tensors="pt").input_ids
    with torch.no_grad():
        assert relative_error(model(ids).logits, resident(ids).logits) < 2e-2
    assert sum(layer.cache_stats()["misses"] for layer in layers)


def test_answers() -> None:
    generator = Generator.load(SUMS, device="cpu", expert_memory="4 slots")
    assert generator.answer(["123+456="], max_tokens=8)[0].text == "579"


def test_slots_of_a_memory() -> None:
    spec = random_experts(experts=8).spec
    layers, each = [spec] * 3, spec.local_bytes / 8
    assert slots_of("5slots", layers, 2) == 5
    memory = (2 * spec.local_bytes + 2.5 * 3 * each) / 2**20
    assert slots_of(f"{memory:.6f}MiB", layers, 2) == 2
    with pytest.raises(ArgumentError, match="two whole layers, and 3 slots"):
        slots_of(f"{memory:.6f}MiB", layers, 3)
    with pytest.raises(ArgumentError, match=re.escape("less than all experts")):
        slots_of("1GiB", layers, 2)
    for wrong in ("", "auto?", "16GB", "-1slots", "16"):
        with pytest.raises(ArgumentError, match="auto, 32slots, 16GiB or 512MiB"):
            slots_of(wrong, layers, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"expert_memory": "1slots"}, "slots: expected 2"),
        ({"expert_memory": "1000GiB"}, "less than all experts"),
        ({"expert_memory": "some"}, "32slots"),
        ({"expert_memory": "auto"}, "a GPU for auto"),
        ({"expert_memory": "4slots", "device_map": "auto"}, "one device"),
    ],
)
def test_bad_arguments_are_found_before_anything_is_read(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        load(SUMS, **arguments)
