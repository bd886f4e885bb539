"""What a call may bring: its own output, quantized x, an expert map; and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polymoe.backends.reference import emulate_activations
from polymoe.errors import ArgumentError
from polymoe.formats.elements import encode_e4m3
from polymoe.layer.experts import FusedExperts
from polymoe.problem.activations import SwiGLU
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import ExpertWeights
from support.problems import problem_of, random_call, random_experts
from support.toys import choice, toys


def fused(weights: ExpertWeights | None = None, **kwargs: Any) -> FusedExperts:
    return FusedExperts.from_weights(weights or random_experts(bias=True), SwiGLU(), top_k=2, device="cpu", **kwargs)


@pytest.fixture
def call() -> tuple[Tensor, Routing]:
    return random_call(6, 64, 5)


def test_the_callers_output(call: tuple[Tensor, Routing]) -> None:
    experts, (x, routing) = fused(), call
    out = torch.full_like(x, float("nan"))
    assert experts(x, *routing, out=out) is out
    assert torch.equal(out, experts(x, *routing))
    assert experts.workspace_bytes(6) == 0


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(6, 64).half(), "out: expected torch.float32, got torch.float16"),
        (torch.empty(5, 64), r"out: expected \[6, 64\], got \[5, 64\]"),
        (torch.empty(64, 6).T, r"out: expected a contiguous tensor, got strides \[1, 6\]"),
    ],
)
def test_a_wrong_output(call: tuple[Tensor, Routing], out: Tensor, message: str) -> None:
    x, routing = call
    with pytest.raises(ArgumentError, match=message):
        fused()(x, *routing, out=out)


def test_an_expert_map_says_where_experts_are(call: tuple[Tensor, Routing]) -> None:
    """Global ids of eight experts, of which five are here, in another order and with gaps."""
    here = list(random_experts(bias=True))
    experts, (x, routing) = fused(ExpertWeights.of(here, total=8, first_expert=2)), call
    expert_map = torch.tensor([4, -1, 0, 1, -1, 2, 3, -1], dtype=torch.int32)
    ids = torch.randint(-1, 9, routing.topk_ids_TA.shape)
    local = torch.where((ids < 0) | (ids > 7), -1, expert_map.long()[ids.clamp(0, 7)])
    got = experts(x, ids, routing.topk_weights_TA, expert_map=expert_map)
    assert torch.equal(got, fused(ExpertWeights.of(here))(x, local, routing.topk_weights_TA))
    with pytest.raises(ArgumentError, match="topk_ids_TA: expected 0 to 7, or -1 or 8 for none, got"):
        experts(x, ids + 9, routing.topk_weights_TA, expert_map=expert_map)


@pytest.mark.parametrize(
    ("expert_map", "message"),
    [
        (torch.arange(5).float(), "expected torch.int32 or torch.int64, got torch.float32"),
        (torch.arange(0), r"expected \[5\], got \[0\]"),
        (torch.arange(4), r"expected \[5\], got \[4\]"),
        (torch.tensor([0, 1, 2, 3, 4, -1]), r"expected \[5\], got \[6\]"),
        (torch.arange(5)[None], r"expected \[5\], got \[1, 5\]"),
        (torch.tensor([0, 1, 5, 2, 3]), "expected 0 to 4, or -1 for experts of other ranks, got 0 to 5"),
        (torch.tensor([0, 1, -2, 2, 3]), "expected 0 to 4, .* got -2 to 3"),
    ],
)
def test_a_wrong_expert_map(call: tuple[Tensor, Routing], expert_map: Tensor, message: str) -> None:
    x, routing = call
    with pytest.raises(ArgumentError, match=f"expert_map: {message}"):
        fused()(x, *routing, expert_map=expert_map)


@pytest.mark.parametrize("mode", ["fp8_token", "fp8_group128"])
def test_x_that_is_quantized_already(call: tuple[Tensor, Routing], mode: str) -> None:
    x, routing = call
    experts = fused(activations=mode, dtype=torch.float32)
    scales = x.abs().amax(1, keepdim=True) / 448
    codes = encode_e4m3(x / scales).to(torch.float8_e4m3fn)
    assert torch.equal(codes.float() * scales, emulate_activations(x, mode))
    y = experts(codes, *routing, x_scales=scales)
    assert y.dtype == torch.float32
    assert torch.allclose(y, experts(x, *routing), rtol=1e-5, atol=1e-6)
    twice = experts(codes, *routing, x_scales=scales * 2)  # the caller's scales count, not those of the numbers
    assert not torch.allclose(y, twice, rtol=1e-2)
    for bad, message in (
        (scales[:5], r"x_scales: expected \[6, 1\], got \[5, 1\]"),
        (scales.half(), "x_scales: expected"),
    ):
        with pytest.raises(ArgumentError, match=message):
            experts(codes, *routing, x_scales=bad)
    with pytest.raises(ArgumentError, match="x_TH: expected float8_e4m3fn, as x_scales is given"):
        experts(x, *routing, x_scales=scales)


def test_scales_for_experts_whose_inputs_are_not_quantized(call: tuple[Tensor, Routing]) -> None:
    x, routing = call
    with pytest.raises(ArgumentError, match="x_scales: expected none"):
        fused()(x.to(torch.float8_e4m3fn), *routing, x_scales=torch.ones(6, 1))


def test_what_a_backend_does_not_take_is_refused_by_name(call: tuple[Tensor, Routing]) -> None:
    weights, (x, routing) = random_experts(), call
    table = toys()
    experts = FusedExperts.pack(problem_of(weights), weights, choice(table))
    for name, value in {"workspace": torch.empty(64, dtype=torch.uint8), "expert_map": torch.arange(5)}.items():
        with pytest.raises(ArgumentError, match=f"{name}: expected none: backend 'small' does not support it"):
            experts(x, *routing, **{name: value})


def test_compiled_graphs_take_them_too(call: tuple[Tensor, Routing]) -> None:
    experts, (x, routing) = fused(), call
    expert_map = torch.tensor([4, -1, 0, 1, 2])
    expected = experts(x, *routing, expert_map=expert_map)
    compiled = torch.compile(lambda *a, **kw: experts(*a, **kw) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, *routing, expert_map=expert_map), expected + 1)
    out = torch.zeros_like(x)
    assert torch.equal(compiled(x, *routing, expert_map=expert_map, out=out), expected + 1)
    assert torch.equal(out, expected)


def test_mapped_ids_are_contiguous_whatever_the_ids_are() -> None:
    from polymoe.backends.base import mapped_ids

    ids_TA = torch.tensor([[0, 1, 2], [3, 4, 9]]).t()
    found = mapped_ids(ids_TA, torch.tensor([4, 3, 2, 1, 0]))
    assert found.is_contiguous()
    assert found.tolist() == [[4, 1], [3, 0], [2, -1]]
