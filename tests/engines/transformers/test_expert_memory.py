"""Models whose experts lie in host memory: the same answers, and what is refused."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from polymoe.checkpoint import Checkpoint
from polymoe.cli.output import speed_line
from polymoe.engines.transformers import PolymoeConfig, load, uninstall
from polymoe.engines.transformers.generator import Generator
from polymoe.engines.transformers.quantizer import PackedQuantizer
from polymoe.errors import ArgumentError, PlanError, PolymoeError, UnsupportedProblem
from polymoe.layer import host_store
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
    speed = generator.speed()
    assert speed["misses"] > 0
    assert 0 <= speed["hits"] / (speed["hits"] + speed["misses"]) < 1
    line = speed_line(speed)
    assert f"4 slots in each layer, {speed['hits'] / (speed['hits'] + speed['misses']):.0%} hits, " in line


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
        ({"expert_memory": "1slots"}, "expert_memory: expected 2 slots"),
        ({"expert_memory": "1000GiB"}, "less than all experts"),
        ({"expert_memory": "some"}, "32slots"),
        ({"expert_memory": 32}, "expert_memory: expected auto, 32slots, .*got 32"),
        ({"expert_memory": "auto"}, "a GPU for auto"),
        ({"expert_memory": "auto", "device_map": "auto"}, "32slots or 16GiB"),
    ],
)
def test_bad_arguments_are_found_before_anything_is_read(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        load(SUMS, **arguments)


def test_host_memory_is_checked_for_all_layers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for each layer, but not for all."""
    with Checkpoint.open(SUMS) as checkpoint:
        each = checkpoint.spec(0).local_bytes
    monkeypatch.setattr(host_store, "host_memory", lambda: (3 * each, 8 * each))
    monkeypatch.setattr(PackedQuantizer, "read_others", lambda *_, **__: pytest.fail("something was read"))
    with pytest.raises(PlanError, match=r"for all experts of 4 layers, got .* free of"):
        load(SUMS, device="cpu", expert_memory="4slots")


def test_a_layer_that_cannot_be_locked_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of four: those before it are gone with the model."""
    made: list[weakref.ref[host_store.PageLocked]] = []

    def locked(tensors: Any) -> host_store.PageLocked:
        if len(made) == 2:
            raise PlanError("host memory for experts", expected="page-locked memory", got="CUDA error 2")
        found = PageLocked(())
        made.append(weakref.ref(found))
        return found

    PageLocked = host_store.PageLocked
    monkeypatch.setattr(host_store, "PageLocked", locked)
    with pytest.raises(PlanError, match="CUDA error 2"):
        load(SUMS, device="cpu", expert_memory="4slots")
    gc.collect()
    assert [ref() for ref in made] == [None, None]


def offloaded_of(model: Any) -> list[OffloadedExperts]:
    return [m for m in model.modules() if isinstance(m, OffloadedExperts)]


def test_a_config_and_a_device_map() -> None:
    expected, tokenizer = load(SUMS, device="cpu")
    config = PolymoeConfig(expert_memory="4slots")
    load_model = functools.partial(AutoModelForCausalLM.from_pretrained, SUMS, dtype="auto", trust_remote_code=False)
    try:
        for place in ({}, {"device_map": {"": "cpu"}}):
            model = load_model(quantization_config=config, **place)
            assert [layer.slots for layer in offloaded_of(model)] == [4] * model.config.num_hidden_layers
            ids = tokenizer("123+456=", return_tensors="pt").input_ids
            with torch.no_grad():
                assert relative_error(model(ids).logits, expected(ids).logits) < 2e-2
        with pytest.raises(ArgumentError, match=r"slots: expected 2 .*to 7.*got 9"):
            load_model(quantization_config=PolymoeConfig(expert_memory="9slots"))
        with pytest.raises(ArgumentError, match="16GiB or 512MiB"):
            PolymoeConfig(expert_memory="auto")
    finally:
        uninstall()
    model, _ = load(SUMS, device_map={"": "cpu"}, expert_memory="4slots")
    assert offloaded_of(model)


@pytest.mark.parametrize("expert_memory", [None, "4slots"])
def test_layers_that_a_device_map_offloads(tmp_path: Path, expert_memory: str | None) -> None:
    """They are on "meta" until they run. What to use instead is said where it is not used yet."""
    pytest.importorskip("accelerate")
    try:
        with pytest.raises(UnsupportedProblem, match=r"model\.layers\.0\.mlp\.experts: .*a layer offloaded") as caught:
            AutoModelForCausalLM.from_pretrained(
                SUMS,
                quantization_config=PolymoeConfig(expert_memory=expert_memory),
                device_map={"": "disk"},
                offload_folder=tmp_path,
                trust_remote_code=False,
            )
    finally:
        uninstall()
    assert ("expert_memory" in str(caught.value)) == (expert_memory is None)


def test_device_maps_count_slots_and_two_whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two GPUs of which neither holds all slots, and each fewer layers than without experts in host memory."""
    pytest.importorskip("accelerate")

    class Enough(PolymoeError):
        pass

    chosen: dict[str, Any] = {}

    def stop(self: Any, model: Any, load_config: Any, tensors: Any) -> None:
        chosen.update(load_config.device_map)
        raise Enough("enough")

    plain, _ = load(SUMS, device="cpu")
    dense = sum(p.numel() * p.element_size() for p in plain.model.layers[0].parameters())
    rest = sum(p.numel() * p.element_size() for p in plain.parameters()) - 4 * dense
    with Checkpoint.open(SUMS) as checkpoint:
        spec = checkpoint.spec(0)
    memory = int(2 * spec.local_bytes + rest + 3.5 * (dense + 2 * spec.expert_bytes))
    monkeypatch.setattr(PackedQuantizer, "read_others", stop)
    on_first = []
    for slots in (2, 4, 7):
        with pytest.raises(Enough):
            load(
                SUMS,
                device_map="sequential",
                max_memory={0: memory, 1: 1 << 30, "cpu": 0},
                expert_memory=f"{slots}slots",
            )
        on_first.append([chosen[f"model.layers.{layer}"] for layer in range(4)].count(0))
    assert on_first[0] in (2, 3)
    assert on_first == sorted(on_first, reverse=True)
    assert on_first[0] > on_first[2]
