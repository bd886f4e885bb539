"""Updates of a layer in place: refused before anything changes, whole, or failed; a layer then does not answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polymoe.errors import CheckpointError, PlanError, VerificationError
from polymoe.layer.experts import FusedExperts
from polymoe.layouts import Packed
from polymoe.problem.activations import SwiGLU
from polymoe.problem.tensors import Expert, ExpertWeights
from support.problems import problem_of, random_call, random_experts, torn
from support.toys import LAYOUTS, Flipped, Toy, choice

Call = tuple[Tensor, Tensor, Tensor]
MIXTURE = "experts: expected weights of one whole update, got a mixture"


@pytest.fixture
def call() -> Call:
    x, routing = random_call(6, 64, 5)
    return x, *routing


def layer(weights: ExpertWeights | None = None, **kwargs: Any) -> FusedExperts:
    return FusedExperts.from_weights(weights or random_experts(), SwiGLU(), top_k=2, device="cpu", **kwargs)


def calibrated(weights: ExpertWeights, without: int | None = None, value: float = 1.0) -> ExpertWeights:
    """The same experts with static input scales; expert ``without`` has the scale ``value``, or none if that is 0."""

    def read(e: int) -> Expert:
        scale = torch.tensor(1.0 if e != without else value)
        return replace(
            weights.expert(e),
            gate_up_input_scale=scale if e != without or value else None,
            down_input_scale=torch.tensor(1.0),
        )

    return ExpertWeights(weights.spec, read)


def compiled(experts: FusedExperts) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(lambda *a: experts(*a), backend="eager")


def broken(experts: FusedExperts) -> FusedExperts:
    with pytest.raises(CheckpointError, match="expert 2"):
        experts.update(torn(random_experts(seed=5)))
    return experts


class TestFailed:
    """An expert cannot be read when others have been packed."""

    @pytest.fixture
    def experts(self, call: Call) -> FusedExperts:
        experts = layer()
        experts(*call)
        return broken(experts)

    def test_the_layer_does_not_answer(self, experts: FusedExperts, call: Call) -> None:
        for use in (lambda: experts(*call), lambda: experts(*call, out=torch.empty(6, 64)), experts.check):
            with pytest.raises(PlanError, match=MIXTURE):
                use()
        with pytest.raises(PlanError, match=MIXTURE):
            _ = experts.weights

    def test_a_state_dict_does_not_mend_it(self, experts: FusedExperts, call: Call) -> None:
        experts.load_state_dict(layer().state_dict())
        with pytest.raises(PlanError, match=MIXTURE):
            experts(*call)


def test_graphs_compiled_before_do_not_answer_either(call: Call) -> None:
    experts = layer()
    run, exported = compiled(experts), torch.export.export(experts, call).module()
    y = experts(*call)
    assert torch.equal(run(*call), y)
    assert torch.equal(exported(*call), y)
    broken(experts)
    for use in (run, exported):
        with pytest.raises(PlanError, match=MIXTURE):
            use(*call)
    experts.update(random_experts())
    for use in (run, exported):
        assert torch.equal(use(*call), y)


def test_what_is_refused_changes_nothing(call: Call) -> None:
    experts = layer(calibrated(random_experts("fp8_tensor")), activations="fp8_static")
    y = experts(*call)
    other = random_experts("fp8_tensor", seed=5)
    wide = random_experts("fp8_tensor", hidden=128)
    for weights, error, message in (
        (calibrated(wide), PlanError, "update: expected"),
        (calibrated(other, 3, 0.0), CheckpointError, "update, expert 3: expected static input scales.* got none"),
        (calibrated(other, 4, float("nan")), CheckpointError, "update, expert 4: .* got nan"),
    ):
        with pytest.raises(error, match=message):
            experts.update(weights)
        assert torch.equal(experts(*call), y)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_input_scales_are_required_before_anything_is_packed(value: float) -> None:
    read = []

    def noted(weights: ExpertWeights) -> ExpertWeights:
        def once(e: int) -> Expert:
            read.append(e)
            return weights.read(e)

        return ExpertWeights(weights.spec, once, weights.read)

    with pytest.raises(CheckpointError, match=r"experts, expert 3: expected static input scales"):
        layer(noted(calibrated(random_experts("fp8_tensor"), 3, value)), activations="fp8_static")
    assert not read


class Lossy(Flipped):
    """Loses every sign where tensors are packed in place."""

    def pack(self, weights: ExpertWeights, device: torch.device, out: Packed | None = None) -> Packed:
        packed = super().pack(weights, device, out)
        if out is not None:
            packed.tensors["up.codes"].bitwise_and_(0x77)
        return packed


def test_an_update_that_is_checked(call: Call) -> None:
    weights = random_experts()
    request = replace(choice({"one": Toy("one")}), layouts={**LAYOUTS, "flipped": Lossy()})
    experts = FusedExperts.pack(problem_of(weights), weights, request)
    experts.update(weights)
    experts(*call)
    with pytest.raises(VerificationError, match=r"update, expert 0 up\.codes"):
        experts.update(weights, check=True)
    with pytest.raises(PlanError, match=MIXTURE):
        experts(*call)
    good = layer()
    good.update(random_experts(seed=5), check=True)
    assert torch.equal(good(*call), layer(random_experts(seed=5))(*call))


def test_an_interrupt_is_a_failure(call: Call) -> None:
    experts = layer()
    with pytest.raises(KeyboardInterrupt):
        experts.update(torn(random_experts(), error=KeyboardInterrupt()))
    with pytest.raises(PlanError, match=MIXTURE):
        experts(*call)
