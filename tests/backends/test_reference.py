"""The reference against the plainest possible loop in float64, over formats, activations and ragged calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polymoe.backends import BACKENDS
from polymoe.backends.reference import emulate_activations, layer_input_scales, run_experts
from polymoe.errors import CheckpointError, UnsupportedProblem
from polymoe.formats import FORMATS
from polymoe.formats.elements import E2M1_VALUES
from polymoe.machine import Machine
from polymoe.planning.select import select
from polymoe.problem.activations import GeGLU, SwiGLU
from polymoe.problem.numerics import relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import ExpertsSpec, ExpertWeights
from polymoe.problem.verdict import Accepted
from support.problems import GPT_OSS, plain_experts, problem_of, random_call, random_experts


def check(weights: ExpertWeights, routing: Routing, x: torch.Tensor, **kwargs: object) -> None:
    problem = problem_of(weights, **kwargs)  # type: ignore[arg-type]
    expected = plain_experts(weights, problem, x, routing)
    assert relative_error(run_experts(problem, weights, x, routing), expected) < 2e-6
    assert relative_error(run_experts(problem, weights, x, routing, torch.float64), expected) < 1e-14


def test_autocast_does_not_round_the_oracle() -> None:
    weights = random_experts("mxfp4")
    x, routing = random_call(7, 64, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(weights, routing, x)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_formats(format: str, gated: bool) -> None:
    weights = random_experts(format, gated=gated)
    x, routing = random_call(7, 64, 5)
    check(weights, routing, x)


@pytest.mark.parametrize(
    "activation", [SwiGLU(), GPT_OSS, SwiGLU(limit=0.5), GeGLU(), GeGLU("tanh")], ids=lambda a: a.name
)
@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("bias", [True, False])
def test_activations_bias_and_weight(activation: SwiGLU, weight_on: str, bias: bool) -> None:
    weights = random_experts(bias=bias)
    x, routing = random_call(9, 64, 5)
    check(weights, routing, x, activation=activation, weight_on=weight_on)


@pytest.mark.parametrize("top_k", [1, 3, 22])
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_token_counts_and_top_k(tokens: int, top_k: int) -> None:
    """k = 22 of 5 experts has every id many times over in one token."""
    weights = random_experts()
    x, routing = random_call(tokens, 64, 5, top_k)
    check(weights, routing, x)


def test_one_expert_gets_everything() -> None:
    weights = random_experts()
    x, routing = random_call(6, 64, 5)
    check(weights, Routing(torch.full_like(routing.topk_ids_TA, 4), routing.topk_weights_TA), x)


@pytest.mark.parametrize(("hidden", "intermediate"), [(2880, 64), (96, 336), (64, 192)])
def test_odd_sizes(hidden: int, intermediate: int) -> None:
    weights = random_experts("nvfp4", experts=3, hidden=hidden, intermediate=intermediate)
    x, routing = random_call(3, hidden, 3)
    check(weights, routing, x)


def test_sentinels_contribute_exactly_nothing_even_beside_nan() -> None:
    weights = random_experts(bias=True)
    x, _ = random_call(4, 64, 5)
    ids = torch.tensor([[-1, 5], [-1, -1], [5, 5], [2, -1]])
    nan = torch.full((4, 2), float("nan"))
    nan[3, 0] = 1.0
    y = run_experts(problem_of(weights), weights, x, Routing(ids, nan))
    assert torch.equal(y[:3], torch.zeros(3, 64))
    assert torch.isfinite(y[3]).all()
    assert y[3].norm() > 0


def test_ranks_add_up_to_the_whole() -> None:
    whole = random_experts(bias=True)
    x, routing = random_call(11, 64, 5, 3)
    expected = run_experts(problem_of(whole), whole, x, routing)
    total = torch.zeros_like(expected)
    for first, count in ((0, 2), (2, 3)):
        s = whole.spec
        spec = ExpertsSpec(
            hidden=s.hidden,
            intermediate=s.intermediate,
            experts=5,
            gate=s.gate,
            up=s.up,
            down=s.down,
            bias=True,
            first_expert=first,
            local_experts=count,
        )
        part = ExpertWeights(spec, lambda e, first=first: whole.expert(first + e))
        total += run_experts(problem_of(part, ep=2), part, x, routing)
    assert relative_error(total, expected) < 1e-6


def test_only_experts_with_tokens_are_read() -> None:
    weights = random_experts()
    read: list[int] = []

    def spy(e: int):  # type: ignore[no-untyped-def]
        read.append(e)
        return weights.expert(e)

    x, _ = random_call(3, 64, 5)
    ids = torch.tensor([[1, 3], [3, 3], [1, -1]])
    run_experts(problem_of(weights), ExpertWeights(weights.spec, spy), x, Routing(ids, torch.ones(3, 2)))
    assert read == [1, 3]


class TestActivationModes:
    def test_16bit_is_exact(self) -> None:
        x = torch.randn(3, 200)
        assert emulate_activations(x, "16bit") is x

    @pytest.mark.parametrize(("mode", "blocks"), [("fp8_token", [(0, 200)]), ("fp8_group128", [(0, 128), (128, 200)])])
    def test_dynamic_scales(self, mode: str, blocks: list[tuple[int, int]]) -> None:
        x = torch.randn(3, 200) * torch.tensor([[1e-3], [1.0], [1e3]])
        x[0, :128] = 0
        expected = torch.empty_like(x)
        for row in range(3):
            for start, stop in blocks:
                block = x[row, start:stop]
                scale = block.abs().max() / 448 if block.abs().max() > 0 else torch.tensor(1.0)
                expected[row, start:stop] = (block / scale).to(torch.float8_e4m3fn).float() * scale
        got = emulate_activations(x, mode)
        assert torch.equal(got, expected)
        assert 0 < relative_error(got, x) < 0.04

    def test_mxfp8_scales_are_the_next_powers_of_two(self) -> None:
        """448 fits at scale 1, anything above it needs 2; OCP's element rounding is that of E4M3."""
        x = torch.zeros(2, 70)
        x[0, :2], x[0, 32:34], x[1, 64:66] = torch.tensor((448.0, 1.07)), torch.tensor((449.0, 1.07)), 2.0**-140
        got = emulate_activations(x, "mxfp8")
        assert got[0, :2].tolist() == [448.0, 1.125]  # a step of 1/8
        assert got[0, 32:34].tolist() == [448.0, 1.125]  # at scale 2: 224.5 to 224, and 0.535 to 0.5625
        assert not got[1].any()  # below the smallest scale's numbers

    def test_ue8m0_groups_of_128_are_mxfp8_with_four_equal_scales(self) -> None:
        """Where each group of 32 has the largest number of its 128, both round alike; else 128 columns share it."""
        x = torch.randn(3, 300)
        x[:, ::32] = torch.tensor([[5.0], [300.0], [2000.0]])
        assert torch.equal(emulate_activations(x, "fp8_group128_ue8m0"), emulate_activations(x, "mxfp8"))
        x[:, ::128] *= 1000
        got, scale = emulate_activations(x, "fp8_group128_ue8m0"), torch.tensor([[16.0], [1024.0], [8192.0]])
        assert torch.equal(got, (x / scale).to(torch.float8_e4m3fn).float() * scale)

    def test_nvfp4_by_its_definition(self) -> None:
        """Element by element in float64, with a global scale that no tie depends on."""
        x, g = torch.randn(3, 40) * torch.tensor([[1e-2], [1.0], [30.0]]), 0.0137
        x[0, 16:32] = 0
        grid = torch.tensor(E2M1_VALUES, dtype=torch.float64)
        expected = torch.zeros_like(x)
        for row in range(3):
            for start in range(0, 40, 16):
                block = x[row, start : start + 16].double()
                scale = (block.abs().max() / g / 6).clamp(max=448).to(torch.float8_e4m3fn).double()
                if scale:
                    nearest = (block[:, None] / g / scale - grid).abs().argmin(1)
                    expected[row, start : start + 16] = (grid[nearest] * scale * g).float()
        got = emulate_activations(x, "nvfp4", torch.tensor(g))
        assert torch.allclose(got, expected, rtol=1e-6, atol=0)
        assert not got[0, 16:32].any()
        assert 0.05 < relative_error(got[1], x[1]) < 0.12
        assert got[2].abs().max() == pytest.approx(6 * 448 * g)  # the largest number that there is
        assert torch.equal(emulate_activations(x, "nvfp4"), emulate_activations(x, "nvfp4", torch.tensor(1.0)))
        clipped = emulate_activations(torch.full((1, 16), 1e5), "nvfp4")
        assert clipped.unique().tolist() == [6 * 448.0]

    def test_the_largest_input_scale_is_the_global_one(self) -> None:
        weights = random_experts("nvfp4", experts=3, hidden=64, intermediate=32)

        def of(*scales: float | None) -> list[float]:
            found = [None if s is None else torch.tensor(s) for s in scales]
            experts = [replace(weights.expert(e), gate_up_input_scale=s) for e, s in enumerate(found)]
            return [float(scale) for scale in layer_input_scales(ExpertWeights.of(experts))]

        assert of(0.5, 2.0, 1.0) == [2.0, 1.0]
        assert of(0.5, None, 1.0) == of(0.5, float("nan"), 1.0) == of(None, None, None) == [1.0, 1.0]
        x, routing = random_call(8, 64, 3)
        plain, calibrated = (
            run_experts(problem_of(weights, activations="nvfp4"), some, x, routing)
            for some in (
                weights,
                ExpertWeights.of([replace(x, down_input_scale=torch.tensor(0.0123)) for x in weights]),
            )
        )
        assert 1e-3 < relative_error(calibrated, plain) < 0.2

    def test_static_scale_clips(self) -> None:
        got = emulate_activations(torch.tensor([[1.0, 1000.0, -1000.0]]), "fp8_static", torch.tensor(1.0))
        assert got.tolist() == [[1.0, 448.0, -448.0]]

    def test_static_without_a_scale_is_refused(self) -> None:
        with pytest.raises(CheckpointError, match="input scale"):
            emulate_activations(torch.ones(1, 4), "fp8_static")

    def test_the_mode_is_part_of_the_problem(self) -> None:
        weights = random_experts("fp8_block128", hidden=256, intermediate=128)
        x, routing = random_call(8, 256, 5)
        exact = run_experts(problem_of(weights), weights, x, routing)
        emulated = run_experts(problem_of(weights, activations="fp8_group128"), weights, x, routing)
        assert 1e-3 < relative_error(emulated, exact) < 5.5e-2

    @pytest.mark.parametrize("mode", ["fp8_token", "fp8_group128"])
    def test_a_weight_on_the_input_does_not_move_ties(self, mode: str) -> None:
        """Of x in bfloat16 many numbers are halfway between two of E4M3."""
        weights = random_experts("fp8_channel", hidden=256, intermediate=128)
        x, routing = random_call(64, 256, 5, 1, torch.bfloat16)
        problem = problem_of(weights, activations=mode, weight_on="input")
        rounded = emulate_activations(x.float(), mode)
        expected = run_experts(problem, weights, rounded, routing, quantize_x=False)
        assert torch.equal(run_experts(problem, weights, x, routing), expected)


def test_auto_takes_the_reference_only_without_a_gpu() -> None:
    problem = problem_of(random_experts())
    without_memory = replace(Machine.of("cpu"), layer_bytes=0)  # for the matrices of backend torch
    assert select(problem, without_memory).require().steps[0].backend == "reference"
    on_gpu = select(problem, Machine.of("h200"))
    if set(BACKENDS) == {"reference"}:
        with pytest.raises(UnsupportedProblem, match='backend="reference"'):
            on_gpu.require()
    assert select(problem, Machine.of("h200"), backend="reference").require().steps[0].backend == "reference"
    assert not isinstance(on_gpu.candidates[0].verdict, type(None))
    assert isinstance(on_gpu.candidates[0].verdict, Accepted)
