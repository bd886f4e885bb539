"""The backend of FlashInfer's kernels on an SM90 GPU, where the package is installed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from polymoe.backends.base import layouts_for
from polymoe.backends.flashinfer import FlashInfer
from polymoe.backends.reference import run_experts
from polymoe.layer.experts import FusedExperts
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine
from polymoe.problem.activations import SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import ExpertWeights
from support.captured import captured_follows_new_rows
from support.cuda_calls import need_sm90
from support.problems import GPT_OSS, problem_of, random_experts

BACKEND = FlashInfer()
TABLE = {"flashinfer": BACKEND}


@pytest.fixture(autouse=True)
def _flashinfer() -> None:
    need_sm90()
    pytest.importorskip("flashinfer")


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    return random_experts(experts=12, hidden=512, intermediate=256)


def call(tokens: int, hidden: int, experts: int, top_k: int = 4, seed: int = 1) -> tuple[torch.Tensor, Routing]:
    """Different experts for each token."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=g).topk(top_k).indices
    return torch.randn(tokens, hidden, generator=g).bfloat16(), Routing(ids, torch.rand(tokens, top_k, generator=g))


def error(weights: ExpertWeights, x: torch.Tensor, routing: Routing, config: Any = None, **kwargs: Any) -> float:
    """Of a call whose repeats agree bitwise."""
    problem, machine = problem_of(weights, **kwargs), Machine.of("cuda")
    (layout,) = layouts_for(BACKEND, BACKEND.check(problem, machine))
    runner = BACKEND.bind(problem, LAYOUTS[layout].pack(weights, torch.device("cuda")))
    there = x.cuda(), Routing(*(part.cuda() for part in routing))
    outs = [torch.full_like(there[0], float("nan")) for _ in range(3)]
    for out in outs:
        runner.run(CallArguments(there[0], *there[1], out), config or BACKEND.configure(problem, machine, len(x)))
    assert all(torch.equal(out, outs[0]) for out in outs)
    return relative_error(outs[0].cpu(), run_experts(problem, weights, x, routing))


@pytest.mark.parametrize("tokens", [1, 70, 400])
def test_every_tactic(weights: ExpertWeights, tokens: int) -> None:
    x, routing = call(tokens, 512, 12)
    configs = BACKEND.tuning_configs(problem_of(weights), Machine.of("cuda"), tokens)
    found = {str(config): error(weights, x, routing, config) for config in configs}
    assert {name: e for name, e in found.items() if not e < TOLERANCE} == {}


@pytest.mark.parametrize("tokens", [5, 400])
@pytest.mark.parametrize("activation", [SwiGLU(limit=0.5), GPT_OSS], ids=lambda a: a.name)
def test_activations_and_experts_of_other_ranks(activation: SwiGLU, tokens: int) -> None:
    weights = random_experts(experts=4, hidden=256, intermediate=384)
    weights = replace(weights, spec=replace(weights.spec, experts=12, first_expert=4, local_experts=4))
    x, routing = call(tokens, 256, 12)
    routing.topk_ids_TA[0, 0], routing.topk_ids_TA[1, 0] = -1, 12
    routing.topk_weights_TA[:2, 0] = float("nan")
    assert error(weights, x, routing, activation=activation) < TOLERANCE


def test_captured_calls_follow_new_rows(weights: ExpertWeights) -> None:
    request = PlanRequest(Machine.of("cuda"), "mixed", "flashinfer", TABLE, LAYOUTS)
    experts = FusedExperts.pack(problem_of(weights, top_k=1), weights, request, device="cuda")
    captured_follows_new_rows(experts, weights, 40)
