"""Every expert of a layer is checked while it is packed: that it is in its place, as it was read."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from polymoe.errors import FormatError, VerificationError
from polymoe.layer.experts import FusedExperts
from polymoe.layouts import LAYOUTS, Packed, staging
from polymoe.layouts import pack_check as module
from polymoe.layouts.checksums import Checksums
from polymoe.layouts.pack_check import difference, pack_checked
from polymoe.layouts.staging import PartOffsets, expert_of, in_buffer, kept, of_buffer
from polymoe.problem.scale_range import measure_scales
from polymoe.problem.tensors import Expert, ExpertWeights
from support.pack_faults import AFTER, BEFORE, CELLS, FAULTY_CELLS, choice, faulty, layer, reading
from support.problems import problem_of, random_experts

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def layers() -> dict[str, ExpertWeights]:
    return {format: layer(format) for format in {format for _, format in CELLS}}


def test_every_layout_is_among_those_that_are_tested() -> None:
    assert {name for name, _ in CELLS} == set(LAYOUTS)


@pytest.mark.parametrize(("name", "format"), CELLS)
def test_a_layer_that_is_packed_as_it_was_read(
    layers: dict[str, ExpertWeights], name: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No expert is looked at a second time."""
    monkeypatch.setattr(module, "difference", lambda *_: pytest.fail("a difference"))
    experts = FusedExperts.pack(problem_of(layers[format]), layers[format], choice(LAYOUTS[name]))
    assert experts.packed.layout == name
    experts.update(layers[format], check=True)


@pytest.mark.parametrize(("name", "format", "fault"), FAULTY_CELLS)
def test_faults_while_packing_are_noticed(
    layers: dict[str, ExpertWeights], name: str, format: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, weights = LAYOUTS[name], layers[format]
    monkeypatch.setattr(type(layout), "pack", faulty(layout, fault))
    with pytest.raises(VerificationError, match=rf"layer 3, expert \d+.*expected to be packed in layout '{name}'"):
        FusedExperts.pack(problem_of(weights), weights, choice(layout), where="layer 3")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("twelve as expert 0", r"layer 3, expert 101: expected .*, got the weights of expert 100\n"),
        ("two swapped", r"layer 3, expert 101 gate\.codes: expected .*, got the weights of expert 102\n"),
        ("bias of another", r"layer 3, expert 103 up_bias: expected .*, got other bytes\n"),
        ("global scale of another", r"layer 3, expert 103 down\.global_scale: expected .*, got other bytes\n"),
        ("stale memory", r"layer 3, expert 107 gate\.codes: expected .*, got other bytes\n"),
    ],
)
def test_the_message_names_expert_and_part(layers: dict[str, ExpertWeights], fault: str, message: str) -> None:
    weights = layers["nvfp4"]
    weights = replace(weights, spec=replace(weights.spec, experts=200, first_expert=100))
    layout = type("Faulty", (type(LAYOUTS["natural"]),), {"pack": faulty(LAYOUTS["natural"], fault)})()
    with pytest.raises(VerificationError, match=message):
        pack_checked(layout, weights, CPU, "layer 3")


def test_an_update_is_compared_if_it_is_checked(
    layers: dict[str, ExpertWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, layout = layers["nvfp4"], LAYOUTS["natural"]
    experts = FusedExperts.pack(problem_of(weights), weights, choice(layout))
    monkeypatch.setattr(type(layout), "pack", faulty(layout, "one packed twice"))
    experts.update(weights)
    with pytest.raises(VerificationError, match=r"update, expert 3"):
        experts.update(weights, check=True)


def test_scales_of_groups_of_zeros_may_change() -> None:
    """``w4a8_fragments`` clamps them. The bytes differ, the weights do not."""
    weights = random_experts("mxfp4", experts=4, hidden=128, intermediate=128)
    expert = weights.expert(2)
    codes, scales = expert.down.codes.clone(), expert.down.scales.clone()  # type: ignore[union-attr]
    codes[3, 16:32], scales.view(torch.uint8)[3, 1] = 0x80, 7
    zeros = replace(expert, down=replace(expert.down, codes=codes, scales=scales))
    weights = ExpertWeights.of([zeros if e == 2 else x for e, x in enumerate(weights)])
    packed = pack_checked(LAYOUTS["w4a8_fragments"], weights, CPU, "experts")
    found = LAYOUTS["w4a8_fragments"].unpack(packed).expert(2)
    assert not torch.equal(found.down.scales.view(torch.uint8), scales.view(torch.uint8))  # type: ignore[union-attr]
    assert difference(zeros, found) is None
    assert difference(zeros, replace(found, up=expert.gate)) == "up.codes"


@pytest.mark.parametrize("together", [True, False])
def test_checksums(together: bool) -> None:
    """They depend on every byte and its place, and neither on strides nor on where tensors begin in memory."""
    expert, offsets = random_experts("nvfp4", experts=1, hidden=96, intermediate=64, bias=True).expert(0), PartOffsets()
    checksums = Checksums(CPU, offsets)

    def of(expert: Expert) -> int:
        if together:
            return int(checksums.of_buffer(in_buffer(expert, offsets)))
        return int(checksums.of({name: part[None] for name, part in expert.parts().items()}))

    before = of(expert)
    assert of(expert.map(torch.clone)) == before
    strided = expert.map(
        lambda part: part.repeat_interleave(2, 0)[::2] if part.dim() and part.dtype.itemsize > 1 else part
    )
    assert of(strided) == before
    for name, part in expert.parts().items():
        for byte in (0, -1):
            flat = part.view(-1).view(torch.uint8) if part.dim() else part.view(1).view(torch.uint8)
            flat[byte] ^= 0x80
            assert of(expert) != before, name
            flat[byte] ^= 0x80
    rows = expert.down.codes
    rows[[0, 1]] = rows[[1, 0]]
    assert of(expert) != before


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts arrive in buffers, and numbers are read at the end of a layer."""

    def staged(
        weights: ExpertWeights, device: torch.device, arrived: Any, offsets: PartOffsets, _: Any
    ) -> ExpertWeights:
        def read(e: int) -> Expert:
            expert = weights.read(e)
            with _disable_current_modes():  # the host's work
                buffer = in_buffer(expert, offsets)
            expert = of_buffer(buffer, expert, offsets)
            arrived(e, expert, buffer)
            return expert

        return replace(weights, read=read)

    monkeypatch.setattr(module, "staged", staged)
    monkeypatch.setattr(module, "_measured", torch.Tensor.flatten)
    monkeypatch.setattr("polymoe.layouts.checksums._sums", lambda words, multipliers: (words * multipliers).sum(1))


@pytest.mark.parametrize("fault", [None, "two swapped", "bias of another"])
def test_experts_that_arrive_in_buffers(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(module, "difference", lambda *_: pytest.fail("a difference") if fault is None else "a part")
    weights = layer("nvfp4")
    layout: Any = LAYOUTS["natural"]
    if fault is not None:
        layout = type("Faulty", (type(layout),), {"pack": faulty(layout, fault)})()
    with pytest.raises(VerificationError) if fault else nullcontext():
        pack_checked(layout, weights, CPU, "layer 3")


def test_parts_of_one_kind_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is wrong with one of them is said of it."""
    on_a_gpu(monkeypatch)
    weights = random_experts("mxfp4", experts=3, hidden=128, intermediate=256)
    expert = weights.expert(1)
    buffer = in_buffer(expert, offsets := PartOffsets())
    together = module._stacked(of_buffer(buffer, expert, offsets).parts())
    assert {kind for names, _ in together if (kind := tuple(names))} == {
        ("gate.codes", "up.codes", "down.codes"),
        ("gate.scales", "up.scales", "down.scales"),
    }
    expert.up.scales.view(torch.uint8)[3, 1] = 0xFF  # type: ignore[union-attr]
    with pytest.raises(FormatError, match=r"layer 3, expert 1.* up"):
        pack_checked(
            LAYOUTS["natural"],
            ExpertWeights.of([expert if e == 1 else x for e, x in enumerate(weights)]),
            CPU,
            "layer 3",
        )


class Launches(TorchDispatchMode):
    """Counts the operations that are more than a view."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.found[name] += not func.is_view and "view" not in name and "empty" not in name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "format", "most"),
    [
        ("natural", "mxfp4", 16), ("w4a16_fragments", "mxfp4", 68), ("w4a8_fragments", "mxfp4", 90),
        ("w8_swizzle128", "fp8_block128", 41), ("w16_swizzle128", "bf16", 35),
    ],
)  # fmt: skip
def test_launches_of_an_expert(name: str, format: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each takes some microseconds, and the device is waited for at the end of the layer only."""
    on_a_gpu(monkeypatch)
    counts = []
    for experts in (2, 6):
        weights = random_experts(format, experts=experts, hidden=128, intermediate=256)
        monkeypatch.setattr(module, "_BLOCK_BYTES", 2 * weights.spec.expert_bytes)
        pack_checked(LAYOUTS[name], weights, CPU, "experts")  # makes tables
        with Launches() as launches:
            pack_checked(LAYOUTS[name], weights, CPU, "experts")
        counts.append(launches.found)
    waits = [found["_local_scalar_dense"] for found in counts]
    assert waits[0] == waits[1]
    assert (counts[1].total() - counts[0].total()) / 4 <= most, counts[1] - counts[0]


@pytest.mark.parametrize(
    ("name", "format", "most"),
    [
        ("w4a16_fragments", "mxfp4", 60), ("w4a16_fragments", "int4_g32", 90), ("w8_swizzle128", "fp8_block128", 48),
        ("w16_swizzle128", "bf16", 40),
    ],
)  # fmt: skip
def test_launches_of_a_block(name: str, format: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as one expert takes, however many experts there are in one, but for copies of those on a CPU."""
    monkeypatch.setattr(staging, "_IN_BLOCKS", ("cpu",))
    monkeypatch.setattr(module, "_measured", torch.Tensor.flatten)

    def quietly(*arguments: Any) -> None:
        with _disable_current_modes():  # the host's work
            in_buffer(*arguments)

    monkeypatch.setattr(staging, "in_buffer", quietly)
    monkeypatch.setattr(module._PackCheck, "require_numbers", lambda *_: None)
    monkeypatch.setattr(module._PackCheck, "require_in_place", lambda *_: None)
    counts = []
    for experts in (4, 12):
        weights = random_experts(format, experts=experts, hidden=256, intermediate=256)
        monkeypatch.setattr(staging, "_BLOCK_BYTES", 4 * weights.spec.expert_bytes)
        stored = list(weights)
        pack_checked(LAYOUTS[name], ExpertWeights(weights.spec, stored.__getitem__), CPU, "experts")
        with Launches() as launches:
            pack_checked(LAYOUTS[name], ExpertWeights(weights.spec, stored.__getitem__), CPU, "experts")
        counts.append(launches.found)
    assert (counts[1].total() - counts[0].total()) / 2 <= most, counts[1] - counts[0]


@pytest.mark.parametrize(("name", "format"), CELLS)
def test_several_experts_are_unpacked_at_once_as_each_alone(name: str, format: str) -> None:
    weights = random_experts(format, experts=7, hidden=256, intermediate=256, bias=True)
    packed = LAYOUTS[name].unpack(LAYOUTS[name].pack(weights, CPU))
    assert packed.read_stacked is not None
    for first, last in ((0, 7), (2, 5), (6, 7)):
        found = packed.read_stacked(first, last)
        assert {len(part) for part in found.values()} == {last - first}
        for e in range(first, last):
            expert = expert_of(weights.spec, found, e - first)
            assert difference(expert, packed.expert(e)) is None
            assert difference(expert, weights.expert(e)) is None


@pytest.mark.parametrize("name", ["w4a16_fragments", "w4a8_fragments", "w16_swizzle128"])
def test_rows_of_no_whole_group_are_unpacked_one_expert_at_a_time(name: str) -> None:
    format = "bf16" if name == "w16_swizzle128" else "mxfp4"
    multiple = 64 if name == "w4a8_fragments" else 16
    spec = random_experts(format, experts=2, hidden=128 + multiple, intermediate=64).spec
    packed = LAYOUTS[name].unpack(Packed(name, spec, {}))
    assert (packed.read_stacked is None) == bool((128 + multiple) % 64)


def test_experts_that_were_peeked_at_are_not_looked_up_again() -> None:
    weights, read = random_experts("mxfp4"), []

    def quiet(e: int) -> Expert:
        read.append(e)
        return weights.expert(e)

    lazily = kept(ExpertWeights(weights.spec, weights.read, quiet))
    measure_scales(lazily)
    pack_checked(LAYOUTS["natural"], lazily, CPU, "experts")
    assert read == [0, 1, 2, 3, 4]
    assert kept(weights) is weights


def test_without_comparing_nothing_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Checksums, "of", lambda self, parts: pytest.fail("a checksum"))
    packed = pack_checked(LAYOUTS["natural"], random_experts(), CPU, "experts", compare=False)
    assert packed.layout == "natural"


def test_faults_are_faults() -> None:
    """The table's changes change what is packed."""
    weights = layer("nvfp4")
    for name, change in BEFORE.items():
        assert any(difference(a, b) for a, b in zip(weights, change(weights), strict=True)), name
    assert set(AFTER) & set(BEFORE) == set()
    assert all(difference(a, b) is None for a, b in zip(weights, reading(lambda e: e)(weights), strict=True))
