"""NaN, infinity and matrices without scales are refused in any expert while a layer is packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polymoe.errors import FormatError
from polymoe.formats import FORMATS
from polymoe.layer.experts import FusedExperts
from polymoe.layer.load import load_experts
from polymoe.layouts import LAYOUTS
from polymoe.layouts.pack_check import pack_checked
from polymoe.problem.tensors import Expert, ExpertWeights
from support.pack_faults import choice
from support.problems import problem_of, random_experts
from support.written import LAYER, Library, damaged

NAN, INFINITY = float("nan"), float("inf")
BAD = [
    *((f, "down", "codes", byte) for f in ("fp8_tensor", "fp8_channel", "fp8_block128") for byte in (0x7F, 0xFF)),
    *((f, "gate", "codes", bits) for f in ("bf16", "fp16") for bits in (0x7FFF, 0xFFC0, 0x7F80, 0xFF80)),
    ("fp16", "up", "codes", 0x7C00), ("fp16", "up", "codes", 0xFC00),
    ("mxfp4", "down", "scales", 0xFF),
    ("nvfp4", "up", "scales", 0x7F), ("nvfp4", "up", "scales", 0xFF),
    *((f, "down", "scales", x) for f in ("fp8_tensor", "fp8_block128", "int4_g32") for x in (NAN, INFINITY, -INFINITY)),
    ("nvfp4", "gate", "global_scale", NAN), ("nvfp4", "gate", "global_scale", INFINITY),
]  # fmt: skip
ZEROS = [(f, "scales") for f in FORMATS if FORMATS[f].encoding.granularity is not None] + [("nvfp4", "global_scale")]


def changed(weights: ExpertWeights, e: int, projection: str, part: str, change: Callable[[Tensor], object]) -> Expert:
    """Expert ``e`` with a part of a projection changed in place."""
    expert = weights.expert(e).map(torch.clone)
    change(expert.projections[projection].parts()[part])
    return expert


def with_expert(weights: ExpertWeights, e: int, expert: Expert) -> ExpertWeights:
    return ExpertWeights.of([expert if i == e else x for i, x in enumerate(weights)])


def last(value: float) -> Callable[[Tensor], object]:
    """Set the last number to a value, or to a byte or pair of bytes."""

    def change(part: Tensor) -> None:
        flat = part.view(-1) if part.dim() else part.view(1)
        if isinstance(value, float):
            flat[-1] = value
        elif part.dtype.itemsize == 2:
            flat.view(torch.int16)[-1] = value - (value >> 15 << 16)
        else:
            flat.view(torch.uint8)[-1] = value

    return change


@pytest.mark.parametrize(("format", "projection", "part", "value"), BAD)
def test_what_is_no_number(format: str, projection: str, part: str, value: float) -> None:
    weights = random_experts(format, experts=9, hidden=128, intermediate=128)
    weights = with_expert(weights, 4, changed(weights, 4, projection, part, last(value)))
    message = rf"layer 3, expert 4 {projection} {part.replace('_', ' ')}: expected finite numbers, got NaN or infinity"
    for name, layout in LAYOUTS.items():
        if not layout.check(weights.spec):
            with pytest.raises(FormatError, match=message):
                FusedExperts.pack(problem_of(weights), weights, choice(layout), where="layer 3", check=False)
            if name == "natural":
                with pytest.raises(FormatError, match=message):
                    pack_checked(layout, weights, torch.device("cpu"), "layer 3")


@pytest.mark.parametrize(("format", "part"), ZEROS)
def test_scales_that_are_all_zero(format: str, part: str) -> None:
    weights = random_experts(format, experts=9, hidden=128, intermediate=128)
    bad = with_expert(weights, 7, changed(weights, 7, "up", part, lambda t: t.view(-1).view(torch.uint8).zero_()))
    with pytest.raises(FormatError, match=rf"expert 7 up {part.replace('_', ' ')}: expected a scale other than 0"):
        FusedExperts.pack(problem_of(bad), bad, choice(LAYOUTS["natural"]), check=False)


@pytest.mark.parametrize("format", [f for f in FORMATS if FORMATS[f].encoding.granularity is not None])
def test_single_scales_of_zero_are_legal(format: str) -> None:
    weights = random_experts(format, experts=9, hidden=128, intermediate=256)
    if weights.expert(0).up.scales.numel() == 1:  # type: ignore[union-attr]
        pytest.skip("one scale for the matrix")
    few = changed(weights, 7, "up", "scales", lambda scales: scales.view(torch.uint8)[0].zero_())
    pack_checked(LAYOUTS["natural"], with_expert(weights, 7, few), torch.device("cpu"), "experts")


@pytest.mark.parametrize("bias", ["gate_bias", "up_bias", "down_bias"])
def test_biases(bias: str) -> None:
    weights = random_experts(experts=9, bias=True)
    expert = weights.expert(4).map(torch.clone)
    getattr(expert, bias)[3] = float("nan")
    weights = with_expert(weights, 4, expert)
    with pytest.raises(FormatError, match=rf"experts, expert 4 {bias}: expected finite numbers"):
        pack_checked(LAYOUTS["natural"], weights, torch.device("cpu"), "experts")


def test_codes_whose_sum_is_too_large_are_legal() -> None:
    """In float16 the sum of 16,384 weights of 8 is infinite."""
    weights = random_experts("fp16", experts=2, hidden=128, intermediate=128)
    large = changed(weights, 1, "up", "codes", lambda codes: codes.fill_(8))
    assert large.up.codes.sum().isinf()
    pack_checked(LAYOUTS["natural"], with_expert(weights, 1, large), torch.device("cpu"), "experts")


def test_numbers_that_change_on_their_way_are_noticed() -> None:
    """A second reading is good, what was packed is not."""
    weights = random_experts("bf16", experts=4, hidden=128, intermediate=128)
    first = [changed(weights, 1, "down", "codes", last(0x7FFF))]
    once = ExpertWeights(weights.spec, lambda e: first.pop() if e == 1 and first else weights.expert(e))
    with pytest.raises(FormatError, match="experts, expert 1, packed, down codes: expected finite numbers"):
        pack_checked(LAYOUTS["natural"], once, torch.device("cpu"), "experts", compare=False)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory.mktemp("library"))


def _zero_gate(tensors: dict[str, Tensor]) -> None:
    tensors[f"model.layers.{LAYER}.mlp.experts.gate_up_proj_scales"][6, 0::2] = 0


def _nan_code(tensors: dict[str, Tensor]) -> None:
    name = next(n for n in tensors if n.endswith("experts.6.up_proj.weight"))
    tensors[name].view(torch.uint8)[5, 7 * tensors[name].element_size() :][:2] = 0xFF


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt-oss-mxfp4", _zero_gate, r"gate_up_proj\[6\] gate scales: expected a scale other than 0, got only zeros"),
        ("deepseek-v3-fp8", _nan_code, r"experts\.6\.up_proj codes: expected finite .*NaN or infinity at \[5, 7\]"),
        ("qwen3-bf16", _nan_code, r"experts\.6\.up_proj codes: expected finite .*NaN or infinity at \[5, 7\]"),
        ("glm-4.7-fp8-channel", _nan_code, r"experts\.6\.up_proj codes: expected finite .*at \[5, 7\]"),
    ],
)  # fmt: skip
def test_tensors_of_files_are_named(
    library: Library, tmp_path: Path, name: str, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    path = damaged(library(name), tmp_path / name, change)
    with pytest.raises(FormatError, match=rf"layers\.{LAYER}\..*{message}"):
        load_experts(path, LAYER, device="cpu", check=False)


def test_a_slice_may_have_no_other_scales_than_zeros(library: Library, tmp_path: Path) -> None:
    def zero_half(tensors: dict[str, Tensor]) -> None:
        tensors[f"model.layers.{LAYER}.mlp.experts.down_proj_scales"][6, :, :3] = 0

    path = damaged(library("gpt-oss-mxfp4"), tmp_path / "half", zero_half)
    for rank in (0, 1):
        load_experts(path, LAYER, device="cpu", tp=(rank, 2))


def test_an_update_with_them_leaves_the_layer_unusable() -> None:
    weights = random_experts("bf16", experts=4, hidden=128, intermediate=128)
    experts = FusedExperts.pack(problem_of(weights), weights, choice(LAYOUTS["natural"]))
    bad = with_expert(weights, 1, changed(weights, 1, "down", "codes", last(0x7FFF)))
    with pytest.raises(FormatError, match="update, expert 1 down codes"):
        experts.update(bad)
    with pytest.raises(RuntimeError):
        _ = experts.weights
    experts.update(replace(weights))
    assert experts.weights.spec == weights.spec
