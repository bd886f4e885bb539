"""A call whose result would not carry a gradient that is required raises, in every way in which a layer is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polymoe.backends.reference import Reference
from polymoe.errors import UnsupportedProblem
from polymoe.formats.elements import encode_e4m3
from polymoe.layer.experts import FusedExperts
from polymoe.problem.activations import SwiGLU
from polymoe.problem.routing import Routing
from support.problems import plain_experts, problem_of, random_call, random_experts
from support.toys import choice, toys

Call = tuple[Tensor, Tensor, Tensor]
NAMES = {"x_TH": 0, "topk_weights_TA": 2}


@pytest.fixture
def call() -> Call:
    x, routing = random_call(6, 64, 5)
    return x, *routing


def reference(**kwargs: Any) -> FusedExperts:
    return FusedExperts.from_weights(random_experts(), SwiGLU(), top_k=2, device="cpu", **kwargs)


def without_backward() -> FusedExperts:
    weights = random_experts()
    return FusedExperts.pack(problem_of(weights), weights, choice(toys()))


def compiled(experts: Callable[..., Tensor], backend: str = "eager") -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(lambda *a, **kw: experts(*a, **kw), fullgraph=True, backend=backend)


def exported(experts: FusedExperts) -> Callable[..., Tensor]:
    x, routing = random_call(6, 64, 5)
    return torch.export.export(experts, (x, *routing)).module()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", [lambda e: e, compiled, exported], ids=["eager", "compiled", "exported"])
def test_a_backend_without_a_backward_refuses(call: Call, name: str, way: Any) -> None:
    experts = without_backward()
    run, expected = way(experts), experts(*call)
    call[NAMES[name]].requires_grad_()
    with pytest.raises(
        UnsupportedProblem, match=rf"{name}: expected no gradient: .*\n  hint: call under torch.no_grad()"
    ):
        run(*call)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(run(*call), expected)


def test_it_names_the_backend_and_one_that_has_a_backward(call: Call) -> None:
    weights, x = random_experts(), call[0].requires_grad_()
    table: Any = {**toys(), "reference": Reference()}
    experts = FusedExperts.pack(problem_of(weights), weights, choice(table))
    assert experts.explain().require().step(6).backend == "small"
    message = r"x_TH: expected no gradient: backend 'small' has no backward.*\n.* or load with backend=\"reference\""
    with pytest.raises(UnsupportedProblem, match=message):
        experts(x, *call[1:])


def test_the_callers_output(call: Call) -> None:
    experts, out = without_backward(), torch.zeros(6, 64, requires_grad=True)
    for run in (experts, compiled(experts)):
        with pytest.raises(UnsupportedProblem, match="out: expected no gradient"):
            run(*call, out=out * 1)
        with pytest.raises(UnsupportedProblem, match="x_TH: expected no gradient"):
            run(call[0].clone().requires_grad_(), *call[1:], out=torch.zeros(6, 64))


def test_a_graph_with_autograd_around_it(call: Call) -> None:
    """The error is raised where the graph runs, with or without a backward pass, and the graph is still compiled."""
    experts = without_backward()
    scale, run = torch.ones(64, requires_grad=True), compiled(lambda x, *a: experts(x * scale, *a), "aot_eager")
    with pytest.raises(UnsupportedProblem, match="x_TH: expected no gradient: a compiled graph has no backward"):
        run(*call)
    with torch.no_grad():
        assert torch.equal(run(*call), experts(*call))


def test_an_error_names_the_argument_in_a_whole_graph_too() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"ArgumentError\('x_TH'\)|Observed exception"):
        compiled(reference())(torch.zeros(2, 63), torch.zeros(2, 2).long(), torch.zeros(2, 2))


def test_gradients_of_the_reference(call: Call) -> None:
    """Against differences of results in float64."""
    experts, (x, ids, weights) = reference(), call
    along_x, along_y, along_weights = torch.randn_like(x), torch.randn_like(x), torch.randn_like(weights)

    def plain(step: float) -> Tensor:
        routing = Routing(ids, weights + step * along_weights)
        y = plain_experts(experts.weights, experts.problem, x + step * along_x, routing)
        return (y * along_y).sum()

    expected = (plain(1e-3) - plain(-1e-3)) / 2e-3
    for out in (None, torch.empty_like(x)):
        x_here, weights_here = x.clone().requires_grad_(), weights.clone().requires_grad_()
        (experts(x_here, ids, weights_here, out=out) * along_y).sum().backward()
        assert x_here.grad is not None
        assert weights_here.grad is not None
        got = (x_here.grad * along_x).sum() + (weights_here.grad * along_weights).sum()
        torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("weight_on", "weights_too"), [("output", False), ("input", True)])
def test_none_goes_through_quantized_inputs(call: Call, weight_on: Any, weights_too: bool) -> None:
    experts = reference(activations="fp8_token", weight_on=weight_on, dtype=torch.float32)
    x, ids, weights = call
    with pytest.raises(UnsupportedProblem, match="x_TH: expected no gradient: backend 'reference'"):
        experts(x.clone().requires_grad_(), ids, weights)
    weights.requires_grad_()
    if weights_too:
        with pytest.raises(UnsupportedProblem, match="topk_weights_TA: expected no gradient"):
            experts(x, ids, weights)
    else:
        experts(x, ids, weights).sum().backward()
        assert weights.grad is not None
    scales = (x.abs().amax(1, keepdim=True) / 448).requires_grad_()
    codes = encode_e4m3(x / scales.detach()).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedProblem, match="x_scales: expected no gradient"):
        experts(codes, ids, weights.detach(), x_scales=scales)
