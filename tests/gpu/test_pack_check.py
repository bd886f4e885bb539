"""Every expert is checked on the GPU while it is packed."""

from __future__ import annotations

import pytest
import torch

from polymoe.errors import FormatError, VerificationError
from polymoe.layer.experts import FusedExperts
from polymoe.layouts import LAYOUTS
from polymoe.layouts.pack_check import pack_checked
from support.pack_faults import CELLS, FAULTY_CELLS, choice, faulty, layer
from support.problems import problem_of, random_experts


@pytest.mark.parametrize(("name", "format"), CELLS)
def test_a_layer_that_is_packed_as_it_was_read(name: str, format: str) -> None:
    weights = layer(format)
    experts = FusedExperts.pack(problem_of(weights), weights, choice(LAYOUTS[name], "cuda"))
    assert (experts.packed.layout, experts.device.type) == (name, "cuda")
    experts.update(weights, check=True)


@pytest.mark.parametrize(("name", "format", "fault"), FAULTY_CELLS)
def test_faults_while_packing_are_noticed(name: str, format: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, weights = LAYOUTS[name], layer(format)
    monkeypatch.setattr(type(layout), "pack", faulty(layout, fault))
    with pytest.raises(VerificationError, match=rf"expert \d+.*expected to be packed in layout '{name}'"):
        FusedExperts.pack(problem_of(weights), weights, choice(layout, "cuda"))


@pytest.mark.parametrize(
    ("format", "part", "byte"),
    [
        ("mxfp4", "scales", 0xFF), ("nvfp4", "scales", 0x7F), ("nvfp4", "scales", 0xFF),
        ("nvfp4", "global_scale", 0x7F), ("int4_g32", "scales", 0xFF),
        ("fp8_block128", "codes", 0x7F), ("fp8_block128", "codes", 0xFF), ("fp8_block128", "scales", 0x7F),
        ("fp16", "codes", 0xFF), ("bf16", "codes", 0x7F), ("bf16", "codes", 0xFF),
    ],
)  # fmt: skip
def test_what_is_no_number(format: str, part: str, byte: int) -> None:
    """The last element of one expert has the bytes of a NaN: ``byte`` behind 0xFF where it has several."""
    weights = random_experts(format, experts=9, hidden=128, intermediate=128)
    stored = weights.expert(4).down.parts()[part]
    element = (stored.view(-1) if stored.dim() else stored.view(1)).view(torch.uint8)[-stored.element_size() :]
    element[:-1], element[-1] = 0xFF, byte
    with pytest.raises(FormatError, match=rf"experts, expert 4 down {part.replace('_', ' ')}: expected finite numbers"):
        pack_checked(LAYOUTS["natural"], weights, torch.device("cuda"), "experts")


def test_large_tensors_have_the_same_checksums_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 1 MiB they are not joined. Nothing is looked at a second time."""
    monkeypatch.setattr("polymoe.layouts.pack_check.difference", lambda *_: pytest.fail("a difference"))
    for format, name in (("mxfp4", "w4a16_fragments"), ("mxfp4", "w4a8_fragments"), ("bf16", "w16_swizzle128")):
        weights = random_experts(format, experts=3, hidden=2048, intermediate=1536)
        pack_checked(LAYOUTS[name], weights, torch.device("cuda"), "experts")
