"""A method that was taken over keeps its name, its state and what is not replaced, and packs its layer."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polymoe.engines.serving import take_over as module
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.stand_aside import LayerPlan, judge_layer
from polymoe.engines.serving.take_over import TakenOver, take_over
from polymoe.errors import CheckpointError, FormatError
from polymoe.layer.packed_layer import PackedLayer
from support.stacked import CPU, facts_of, stacked

MODEL = "sums-qwen3-fp8"


class TheirMethod(nn.Module):
    """As an engine's may be: a Module, whose constructor must not run twice."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.bits, self.padded, self.plan = 4, True, "theirs"

    def create(self) -> str:
        return f"{self.bits} bits"

    def compute(self) -> str:
        return "theirs"


class OurBase(TakenOver):
    padded = False

    def compute(self) -> str:
        return f"ours, {self.packed.where}"


class Taken:
    """A method that was taken over, its layer, and what happened."""

    def __init__(self, *, dummy: bool = False, slots: int | None = None) -> None:
        plan = judge_layer(facts_of(MODEL), CPU, EngineSettings())
        assert isinstance(plan, LayerPlan)
        self.packed: list[PackedLayer] = []
        self.kinds: list[LayerPlan] = []
        self.theirs = TheirMethod()
        self.ours: Any = take_over(
            self.theirs,
            OurBase,
            plan,
            CPU,
            dummy=dummy,
            first_of_its_kind=lambda plan: not self.kinds.append(plan) and len(self.kinds) == 1,
            on_packed=lambda packed, _, __: self.packed.append(packed),
            slots=None if slots is None else lambda: slots,
        )
        self.layer = nn.Module()

    def create(self, **changed: Tensor) -> set[str]:
        tensors = {**stacked(MODEL), **changed}
        for name, tensor in tensors.items():
            self.layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        return self.ours.note_created({name: p for name, p in self.layer.named_parameters() if "packed_" not in name})

    def load(self) -> None:
        for name in self.ours.experts.names:
            self.ours.loaded.note(name, torch.empty(1), None, None)

    def pack(self) -> None:
        self.ours.pack(self.layer, lambda name: delattr(self.layer, name))


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """For each time that a layer is warmed up, the parameters that it has."""
    found: list[list[str]] = []
    monkeypatch.setattr(module, "warm_up", lambda _, layer, __: found.append([n for n, _ in layer.named_parameters()]))
    return found


def test_a_method_that_was_taken_over() -> None:
    made = TheirMethod.made
    taken = Taken()
    ours, theirs = taken.ours, taken.theirs
    assert type(ours).__name__ == "TheirMethod"
    assert isinstance(ours, TheirMethod)
    assert isinstance(ours.plan, LayerPlan)
    assert (ours.create(), ours.compute(), ours.padded) == ("4 bits", "ours, model.layers.1.mlp.experts", False)
    assert (TheirMethod.made, theirs.compute(), theirs.padded, theirs.plan) == (made + 1, "theirs", True, "theirs")


def test_the_engines_tensors_are_packed_and_gone(warmed: list[list[str]]) -> None:
    taken = Taken()
    assert taken.create(w13_bias=torch.zeros(5, 256)) == {"w13_bias"}
    with pytest.raises(CheckpointError, match="w13_weight"):
        taken.pack()
    taken.load()
    tensors = [weakref.ref(parameter) for parameter in taken.layer.parameters()]
    taken.pack()
    assert {name.partition("_")[0] for name, _ in taken.layer.named_parameters()} == {"packed"}
    assert [tensor() for tensor in tensors] == [None] * len(tensors)
    assert taken.packed == [taken.ours.packed]


def test_the_first_layer_of_its_kind_is_warmed_up_without_the_engines_tensors(warmed: list[list[str]]) -> None:
    taken = Taken()
    for _ in range(2):
        taken.create()
        taken.load()
        taken.pack()
    ((*names,),) = warmed
    assert all(name.startswith("packed_") for name in names)
    assert len(taken.kinds) == 2


def test_experts_in_host_memory_compute_the_same_also_after_an_update() -> None:
    torch.manual_seed(0)
    x, ids = (
        torch.randn(3, 256, dtype=torch.bfloat16),
        torch.tensor([[0, 3], [4, 1], [3, 2]]),
    )  # more experts than slots
    weights = torch.rand(3, 2)
    resident, offloaded = Taken(), Taken(slots=2)
    for factor in (1, 2):
        for taken in (resident, offloaded):
            tensors = stacked(MODEL)
            taken.create(w13_weight_scale_inv=factor * tensors["w13_weight_scale_inv"])
            taken.load()
            taken.pack()
        assert not [*offloaded.layer.parameters(), *offloaded.layer.buffers(), *offloaded.layer.children()]
        expected = resident.ours.run_experts(resident.layer, x, ids, weights)
        torch.testing.assert_close(offloaded.ours.run_experts(offloaded.layer, x, ids, weights), expected)
    whole = Taken(slots=5)
    whole.create()
    whole.load()
    whole.pack()
    assert whole.ours.offloaded == ()
    (experts,) = offloaded.ours.offloaded
    assert experts.slots == 2
    assert experts.cache_stats()["sweeps"] == 2
    assert len(offloaded.packed) == 2


def test_dummy_weights_need_no_checkpoint(warmed: list[list[str]]) -> None:
    taken = Taken(dummy=True)
    taken.create()
    taken.pack()
    assert taken.packed


def test_tensors_that_are_not_those_of_the_plan() -> None:
    with pytest.raises(FormatError, match="expected fp8_block128 and fp8_block128, got fp8_block64"):
        Taken().create(w13_weight_scale_inv=torch.zeros(5, 4, 4), w2_weight_scale_inv=torch.zeros(5, 4, 2))
