"""A method that was taken over keeps its name, its state and what is not replaced, and packs its layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polymoe.engines.serving import take_over as module
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.stand_aside import LayerPlan, judge_layer
from polymoe.engines.serving.take_over import TakenOver, take_over
from polymoe.errors import CheckpointError, FormatError, UnsupportedProblem
from polymoe.layer.packed_layer import PackedLayer
from polymoe.problem.tensors import ExpertWeights
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

    def __init__(self, *, dummy: bool = False, slots: int | None = None, model: str = MODEL) -> None:
        self.model = model
        plan = judge_layer(facts_of(model), CPU, EngineSettings())
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
        tensors = {**stacked(self.model), **changed}
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


E, H, F = 8, 192, 192  # of sums-gpt-oss-mxfp4
Part = tuple[Tensor, str, str | None, int | None]


def plain(seed: int) -> dict[str, Tensor]:
    """gpt-oss' tensors of one layer in BF16, by their names, with gate and up alternating."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "gate_up_proj": (E, H, 2 * F),
        "gate_up_proj_bias": (E, 2 * F),
        "down_proj": (E, F, H),
        "down_proj_bias": (E, H),
    }
    return {name: 0.1 * torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def quantized(weights: dict[str, Tensor]) -> ExpertWeights:
    def rows(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:, 0::2], tensor[:, 1::2]], 1)

    return ExpertWeights.quantize(
        rows(weights["gate_up_proj"].mT),
        weights["down_proj"].mT,
        "mxfp4",
        gate_up_bias_EF=rows(weights["gate_up_proj_bias"]),
        down_bias_EH=weights["down_proj_bias"],
    )


def at_once(weights: dict[str, Tensor]) -> list[Part]:
    """As vLLM 0.33 and SGLang hand them over: reshaped as if two codes were in each byte."""
    return [
        (weights["gate_up_proj"].view(E, 2 * F, -1), "w13_weight", None, None),
        (weights["down_proj"].view(E, -1, F // 2), "w2_weight", None, None),
        (weights["gate_up_proj_bias"], "w13_bias", None, None),
        (weights["down_proj_bias"], "w2_bias", None, None),
    ]


def one_by_one(weights: dict[str, Tensor]) -> list[Part]:
    found: list[Part] = []
    for e in range(E):
        for half, shard in enumerate(("w1", "w3")):
            found.append((weights["gate_up_proj"][e].mT[half::2], "w13_weight", shard, e))
            found.append((weights["gate_up_proj_bias"][e, half::2], "w13_bias", shard, e))
        found.append((weights["down_proj"][e].mT, "w2_weight", "w2", e))
        found.append((weights["down_proj_bias"][e], "w2_bias", "w2", e))
    return found


@pytest.fixture
def gpt_oss() -> Taken:
    taken = Taken(model="sums-gpt-oss-mxfp4")
    taken.create()
    taken.load()
    taken.pack()
    return taken


def is_ready(taken: Taken) -> bool:
    module = nn.Module()
    module.quant_method = taken.ours
    try:
        taken.ours.updates.require_whole([module])
    except UnsupportedProblem:
        return False
    return True


@pytest.mark.parametrize("biases_first", [False, True])
@pytest.mark.parametrize("parts", [at_once, one_by_one])
def test_biases_are_part_of_new_weights_in_16_bits(gpt_oss: Taken, parts: Any, biases_first: bool) -> None:
    """Whatever comes first. A sender uses its buffers again."""
    for seed in (1, 2):
        weights = plain(seed)
        given = sorted(parts(weights), key=lambda part: part[1].endswith("bias") != biases_first)
        ends = []
        for tensor, name, shard, place in given:
            buffer = tensor.clone()
            ends.append(gpt_oss.ours.take(buffer, name, shard, place, (0, 1)))
            buffer.fill_(9)
            assert ends[-1] or not is_ready(gpt_oss)
        assert ends == [False] * (len(given) - 1) + [True]
        gpt_oss.ours.pack_incoming(gpt_oss.layer, in_place=True)
        assert is_ready(gpt_oss)
        expected, found = quantized(weights), gpt_oss.ours.packed.weights(gpt_oss.layer)
        for e in range(E):
            wanted, got = expected.expert(e).parts(), found.expert(e).parts()
            assert {"gate_bias", "up_bias", "down_bias"} < wanted.keys() == got.keys()
            assert all(torch.equal(got[name], part) for name, part in wanted.items())


def test_biases_alone_are_no_update(gpt_oss: Taken) -> None:
    """Of weights in 16 bits they are a part; with quantized ones they are loaded as the engine does."""
    for tensor, name, shard, place in at_once(plain(1))[2:]:
        assert not gpt_oss.ours.take(tensor, name, shard, place, (0, 1))
    assert not is_ready(gpt_oss)
    gpt_oss.create()
    gpt_oss.load()
    gpt_oss.pack()  # all of them as the checkpoint stores them
    assert is_ready(gpt_oss)
    for tensor, name, shard, place in at_once(plain(1))[2:]:
        gpt_oss.ours.take(tensor, name, shard, place, (0, 1))
    with pytest.raises(CheckpointError, match="got none for gate of expert 0, up of expert 0"):
        gpt_oss.ours.require_incoming()


BAD: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "NaN": (lambda ours: ours.take(torch.full((E, H), torch.nan).bfloat16(), "w2_bias", None, None, (0, 1)),
            FormatError, "w2_bias of expert 0: expected finite numbers"),
    "twice": (lambda ours: ours.take(plain(1)["down_proj"].view(E, -1, F // 2), "w2_weight", None, None, (0, 1)),
              CheckpointError, "w2_weight of expert 0: expected each tensor once"),
    "size": (lambda ours: ours.take(plain(1)["down_proj"][:, :96], "w2_weight", None, None, (0, 1)),
             FormatError, r"w2_weight: expected as many elements as \[8, 192, 192\] has, got \[8, 96, 192\]"),
    "float32": (lambda ours: ours.take(torch.zeros(E, H), "w2_bias", None, None, (0, 1)),
                FormatError, "w2_bias of expert 0: expected bfloat16 or float16, got torch.float32"),
    "tensor parallelism": (lambda ours: ours.take(torch.zeros(E, F).bfloat16(), "w13_bias", None, None, (0, 2)),
                           UnsupportedProblem, "w13_bias of all experts in 16 bits, cut by the engine"),
    "shard": (lambda ours: ours.take(torch.zeros(F).bfloat16(), "w13_bias", "w13", 0, (0, 1)),
              CheckpointError, "w13_bias: expected single experts' matrices in 16 bits"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_bad_new_weights_with_biases_are_refused(gpt_oss: Taken, bad: str) -> None:
    """After which all of the layer must come again."""
    send, kind, message = BAD[bad]
    parts = at_once(plain(1))
    assert not gpt_oss.ours.take(*parts[1], (0, 1))
    with pytest.raises(kind, match=message):
        send(gpt_oss.ours)
    assert not is_ready(gpt_oss)
    if bad == "shard":  # nothing was taken
        parts = [parts[0], *parts[2:]]
    assert [gpt_oss.ours.take(*part, (0, 1)) for part in parts][-1]
    gpt_oss.ours.pack_incoming(gpt_oss.layer, in_place=True)
    assert is_ready(gpt_oss)
