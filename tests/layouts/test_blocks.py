"""Layouts that pack several experts at once, as on GPUs, here on a CPU: the same bytes, checks and messages."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from polymoe.errors import ArgumentError, FormatError, PlanError, VerificationError
from polymoe.formats import FORMATS, format_of
from polymoe.layouts import LAYOUTS, staging
from polymoe.layouts.cuda.matrices import MatrixLayout
from polymoe.layouts.pack_check import pack_checked
from polymoe.problem.tensors import Expert, ExpertWeights
from support.problems import random_experts, with_input_scales

CPU = torch.device("cpu")
E8M0_BLOCKS = format_of(replace(FORMATS["fp8_block128"].encoding, scale_dtype="e8m0"))
FORMS = [
    "bf16",
    "mxfp4",
    "nvfp4",
    "int4_g32",
    "int4_g128_zp",
    "mxfp8",
    "fp8_tensor",
    "fp8_channel",
    "fp8_block128",
    E8M0_BLOCKS,
]
STACKING = [name for name, layout in LAYOUTS.items() if isinstance(layout, MatrixLayout) and layout.stacks]


@pytest.fixture(params=[2, 5])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pack as many experts at once."""
    monkeypatch.setattr(staging, "_IN_BLOCKS", ("cpu",))
    return request.param


def blocks_of(weights: ExpertWeights, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_BLOCK_BYTES", count * weights.spec.expert_bytes)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", STACKING)
def test_the_bytes_are_those_of_one_by_one(
    name: str, form: str, gated: bool, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = random_experts(form, hidden=128, intermediate=256, gated=gated, bias=form == "mxfp4")
    if LAYOUTS[name].check(weights.spec):
        pytest.skip("not in this layout")
    blocks_of(weights, together, monkeypatch)
    packed = pack_checked(LAYOUTS[name], weights, CPU, "layer 3")
    monkeypatch.setattr(staging, "_IN_BLOCKS", ())
    alone = LAYOUTS[name].pack(weights, CPU)
    assert packed.tensors.keys() == alone.tensors.keys()
    for part, tensor in alone.tensors.items():
        assert torch.equal(packed.tensors[part].view(torch.uint8), tensor.view(torch.uint8)), part


def changed(weights: ExpertWeights, at: int, change: str) -> ExpertWeights:
    def read(e: int) -> Expert:
        expert = weights.expert(e)
        if e != at:
            return expert
        if change == "no input scale":
            return replace(expert, down_input_scale=None)
        if change == "another dtype":
            assert expert.up_bias is not None
            return replace(expert, up_bias=expert.up_bias.float())
        scales = expert.up.scales
        assert scales is not None
        bytes_ = scales.clone().view(torch.uint8)
        rows = slice(None) if change == "zeros" else slice(3, 4)
        bytes_[rows] = {"NaN": 0xFF, "too large": 200, "zeros": 0}[change]
        return replace(expert, up=replace(expert.up, scales=bytes_.view(scales.dtype)))

    return ExpertWeights(weights.spec, read)


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(
    ("change", "form", "error", "says"),
    [
        ("NaN", "int4_g32", FormatError, "layer 3, expert {at} up"),
        ("zeros", "nvfp4", FormatError, "layer 3, expert {at} up"),
        ("too large", "mxfp4", FormatError, "expert {at} up scales: expected E8M0 scales of at most"),
        ("another dtype", "mxfp4", PlanError, "expert {at}.*up_bias"),
    ],
)
def test_what_is_wrong_is_said_of_its_expert(
    at: int, change: str, form: str, error: type[Exception], says: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = random_experts(form, hidden=64, intermediate=128, bias=True)
    blocks_of(weights, together, monkeypatch)
    with pytest.raises(error, match=says.format(at=at)):
        pack_checked(LAYOUTS["w4a16_fragments"], changed(weights, at, change), CPU, "layer 3")


@pytest.mark.parametrize("at", [0, 1, 4])
def test_an_expert_that_was_never_calibrated(at: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = changed(with_input_scales(random_experts("nvfp4", hidden=64, intermediate=128)), at, "no input scale")
    blocks_of(weights, together, monkeypatch)
    packed = pack_checked(LAYOUTS["w4a16_fragments"], weights, CPU, "layer 3")
    assert packed.tensors["down_input_scale"].isnan().nonzero().flatten().tolist() == [at]


def test_an_expert_in_a_wrong_place_is_found(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_experts("mxfp4", hidden=64, intermediate=128)
    blocks_of(weights, together, monkeypatch)
    layout = LAYOUTS["w4a16_fragments"]

    class Swapped(type(layout)):  # type: ignore[misc]
        def pack_matrix(self, halves):  # type: ignore[no-untyped-def]
            parts, largest = super().pack_matrix(halves)
            if halves[0].codes.dim() == 3:
                parts["codes"] = parts["codes"].view(len(halves[0].codes), -1).roll(1, 0).flatten()
            return parts, largest

    with pytest.raises(VerificationError, match=r"layer 3, expert 0 .*got (the weights of expert|other bytes)"):
        pack_checked(Swapped(), weights, CPU, "layer 3")


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize(("at", "found"), [(0, True), (1, False), (2, True), (5, True)])
def test_a_sample_is_compared_if_the_user_asks(
    at: int, found: bool, in_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts 0, 2, 3 and 5 of six."""
    monkeypatch.setenv("POLYMOE_CHECK", "sample")
    monkeypatch.setattr(staging, "_IN_BLOCKS", ("cpu",) if in_blocks else ())
    weights = random_experts("mxfp4", experts=6, hidden=64, intermediate=128)
    blocks_of(weights, 2, monkeypatch)
    layout = LAYOUTS["w4a16_fragments"]

    class Damaged(type(layout)):  # type: ignore[misc]
        def pack(self, *arguments):  # type: ignore[no-untyped-def]
            packed = super().pack(*arguments)
            packed.tensors["down.codes"][at, 5] ^= 1
            return packed

    with pytest.raises(VerificationError, match=f"expert {at} ") if found else nullcontext():
        pack_checked(Damaged(), weights, CPU, "layer 3")


def test_another_word_for_the_check_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYMOE_CHECK", "some")
    with pytest.raises(ArgumentError, match="POLYMOE_CHECK: expected every or sample"):
        pack_checked(LAYOUTS["natural"], random_experts(), CPU, "layer 3")
