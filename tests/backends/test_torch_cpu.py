"""The backend of CPUs against the plainest loop in float64; where it runs, and what its memory does to the choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polymoe
from polymoe.backends import BACKENDS
from polymoe.formats import FORMATS
from polymoe.layer.experts import FusedExperts
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS
from polymoe.machine import DEVICES, Machine
from polymoe.planning.select import select
from polymoe.problem.activations import GeGLU, SwiGLU
from polymoe.problem.numerics import relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import ExpertWeights
from polymoe.problem.verdict import Accepted, Rejected
from support.problems import GPT_OSS, plain_experts, problem_of, random_call, random_experts

SUMS = Path(__file__).parents[2] / "models" / "sums-gpt-oss-mxfp4"


def fused(weights: ExpertWeights, **options: Any) -> FusedExperts:
    request = PlanRequest(Machine.of("cpu"), "mixed", "torch", BACKENDS, LAYOUTS)
    return FusedExperts.pack(problem_of(weights, **{"dtype": "fp32", **options}), weights, request)


def check(weights: ExpertWeights, x: Tensor, routing: Routing, **options: Any) -> None:
    experts = fused(weights, **options)
    expected = plain_experts(weights, experts.problem, x, routing)
    assert relative_error(experts(x, *routing), expected) < 2e-6


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_formats(format: str, gated: bool, tokens: int) -> None:
    check(random_experts(format, gated=gated, bias=not gated), *random_call(tokens, 64, 5))


@pytest.mark.parametrize("activation", [GPT_OSS, SwiGLU(limit=0.5), GeGLU("tanh")], ids=lambda a: a.name)
@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_activations_bias_and_weight(activation: Any, weight_on: str, tokens: int) -> None:
    check(random_experts(bias=True), *random_call(tokens, 64, 5, 3), activation=activation, weight_on=weight_on)


@pytest.mark.parametrize("tokens", [1, 33])
def test_an_expert_may_come_many_times_in_one_token(tokens: int) -> None:
    check(random_experts(), *random_call(tokens, 64, 5, 22))


@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_sentinels_contribute_exactly_nothing_even_beside_nan(tokens: int, weight_on: str) -> None:
    experts = fused(random_experts(bias=True), weight_on=weight_on)
    x, _ = random_call(tokens, 64, 5)
    ids = torch.tensor([[2, -1], [-1, 5], [5, 5], [5, 3]], dtype=torch.int32)
    nan = torch.full((4, 2), float("nan"))
    nan[0, 0] = nan[3, 1] = 0.5
    y = experts(x, ids[:tokens], nan[:tokens])
    alone = experts(x[:1], torch.tensor([[2]]), torch.tensor([[0.5]]))
    torch.testing.assert_close(y[:1], alone)
    assert not y[1:3].any()
    assert not experts(x[:1], ids[1:2], nan[1:2]).any()


def test_experts_of_other_ranks_and_a_map() -> None:
    whole = list(random_experts(bias=True, experts=5))
    rank = fused(ExpertWeights.of(whole[2:4], total=5, first_expert=2), ep=2)
    expert_map = torch.tensor([1, -1, -1, 0, -1])
    for tokens in (1, 6):
        x, (ids, weights) = random_call(tokens, 64, 5, 4)
        here = torch.where((ids == 2) | (ids == 3), ids, -1)
        full = fused(ExpertWeights.of(whole))
        torch.testing.assert_close(rank(x, ids, weights), full(x, here, weights))
        mapped = torch.where(ids == 0, 3, torch.where(ids == 3, 2, -1))
        torch.testing.assert_close(rank(x, ids, weights, expert_map=expert_map), full(x, mapped, weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_and_autocast_are_computed_in_float32(dtype: torch.dtype) -> None:
    experts = fused(random_experts("nvfp4"))
    x, routing = random_call(3, 64, 5, dtype=dtype)
    for tokens in (1, 3):
        call = x[:tokens], *(part[:tokens] for part in routing)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = experts(*call)
        assert got.dtype == dtype
        assert torch.equal(got, experts(call[0].float(), *call[1:]).to(dtype))


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_gradients_are_those_of_the_reference(weight_on: str, tokens: int) -> None:
    """Also where the runner was bound in inference mode."""
    weights = random_experts(bias=True)
    x, (ids, w) = random_call(tokens, 64, 5)
    found = []
    for backend in ("torch", "reference"):
        request = PlanRequest(Machine.of("cpu"), "mixed", backend, BACKENDS, LAYOUTS)
        with torch.inference_mode():
            experts = FusedExperts.pack(problem_of(weights, weight_on=weight_on, dtype="fp32"), weights, request)
        x_here, w_here = x.clone().requires_grad_(), w.clone().requires_grad_()
        experts(x_here, ids, w_here).square().sum().backward()
        found.append((x_here.grad, w_here.grad))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_dequantized_matrices_follow_an_update_in_place() -> None:
    """Every expert's, not only those that the check at load computes with."""
    experts, other = fused(random_experts("int4_g32", experts=16)), random_experts("int4_g32", experts=16, seed=3)
    addresses = {name: t.data_ptr() for name, t in experts.packed.tensors.items()}
    experts.update(other)
    tensors = experts.packed.tensors
    assert {name: t.data_ptr() for name, t in tensors.items()} == addresses
    for name, expected in zip(("gate_up", "down"), other.dequantize(), strict=True):
        assert torch.equal(tensors[f"dequantized.{name}"], expected)


def test_memory_decides() -> None:
    """A layer's share must hold the float32 matrices, and every reason says how much that is."""
    problem = problem_of(random_experts())
    needed = LAYOUTS["dequantized"].nbytes(problem.spec)
    for free, backend in ((2 * needed, "torch"), (needed, "reference"), (None, "torch")):
        machine = Machine(DEVICES["cpu"], layer_bytes=free)
        assert {step.backend for step in select(problem, machine).require().steps} == {backend}
    short = Machine(DEVICES["cpu"], layer_bytes=4 * needed).shared_by(4)
    verdict = BACKENDS["torch"].check(problem, short)
    assert isinstance(verdict, Rejected)
    assert [str(reason) for reason in verdict.reasons] == [
        "free memory: expects 407.8 KiB for each layer, got 407.8 KiB, of which 90% may be taken"
    ]
    gpu = BACKENDS["torch"].check(problem, Machine(DEVICES["h200"]))
    assert isinstance(gpu, Rejected)
    assert [str(reason) for reason in gpu.reasons] == ["device: expects a CPU, got a GPU"]


def test_all_layers_of_a_model_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    one = polymoe.explain(SUMS, device="cpu").rows[0]
    each = one.memory_bytes // len(one.layers)
    for layers, backend in ((5, "torch"), (4, "reference")):  # 90 % of it may be taken
        monkeypatch.setattr("polymoe.machine.machine.host_memory", lambda layers=layers: (layers * each, 2**40))
        found = polymoe.explain(SUMS, device="cpu")
        assert {step.backend for step in found.rows[0].selection.require().steps} == {backend}
        model, _ = polymoe.load(SUMS, device="cpu")
        experts = [m.explain().require().steps[0].backend for m in model.modules() if isinstance(m, FusedExperts)]
        assert experts == [backend] * 4
    with pytest.raises(polymoe.UnsupportedProblem, match=r"torch: free memory: expects .* for each layer"):
        polymoe.explain(SUMS, device="cpu", backend="torch")


def test_explain_says_what_it_takes() -> None:
    found = polymoe.explain(SUMS, device="cpu")
    (row,) = found.rows
    assert isinstance(row.selection.candidates[0].verdict, Accepted)  # the reference stays there, and below it
    model, _ = polymoe.load(SUMS, device="cpu")
    held = sum(m.packed.nbytes for m in model.modules() if isinstance(m, FusedExperts))
    assert held == row.memory_bytes == found.to_dict()["rows"][0]["memory_bytes"]
    assert found.conclusion()[0] == "2.6 MiB of weights, and 13.6 MiB for dequantized experts"
    assert "1.8 MiB packed, 15.4 MiB in memory (layout dequantized)" in str(found)


def test_quantized_inputs_and_batch_invariance_are_not_for_it() -> None:
    weights = random_experts()
    for options, reason in (({"activations": "fp8_token"}, "activations"), ({"batch_invariant": True}, "batch")):
        found = select(problem_of(weights, **options), Machine.of("cpu"))
        verdict = next(c.verdict for c in found.candidates if c.backend == "torch")
        assert isinstance(verdict, Rejected)
        assert verdict.reasons[0].what.startswith(reason)
