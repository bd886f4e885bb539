"""FlashInfer's routes for SM100 and SM120 on a GPU that they are for, where the package is installed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polymoe.backends.base import inputs_of, judge
from polymoe.backends.flashinfer import FlashInfer
from polymoe.backends.reference import run_experts
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine
from polymoe.planning.select import select
from polymoe.problem.activations import Activation, ReLU2, SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.verdict import Accepted
from support.problems import problem_of, random_experts

BACKEND = FlashInfer()
FORMATS = [
    ("int4_g32", "16bit", SwiGLU()), ("mxfp4", "16bit", SwiGLU(limit=0.5)), ("mxfp4", "mxfp8", SwiGLU()),
    ("nvfp4", "16bit", SwiGLU()), ("nvfp4", "16bit", ReLU2()), ("nvfp4", "nvfp4", ReLU2()),
]  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 5, 63, 64, 300])
@pytest.mark.parametrize(("format", "mode", "activation"), FORMATS)
def test_results(format: str, mode: str, activation: Activation, tokens: int) -> None:
    pytest.importorskip("flashinfer")
    gated = not isinstance(activation, ReLU2)
    weights = random_experts(format, experts=6, hidden=512, intermediate=256, gated=gated)
    machine = Machine.of("cuda")
    if machine.device.sm < 100:
        pytest.skip(f"{machine.device.arch} has other routes")
    if machine.device.sm < 120:
        weights = replace(weights, spec=replace(weights.spec, experts=12, first_expert=6, local_experts=6))
    problem = problem_of(weights, activation, activations=mode, dtype="bf16")
    verdict = judge(BACKEND, problem, machine)
    if not isinstance(verdict, Accepted):
        pytest.skip("; ".join(map(str, verdict.reasons)))
    plan = select(problem, machine, backend="flashinfer").require()
    runner, config = (
        BACKEND.bind(problem, LAYOUTS[plan.layout].pack(weights, torch.device("cuda"))),
        plan.step(tokens).config,
    )
    g = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 512, generator=g).bfloat16()
    routing = Routing(
        torch.rand(tokens, weights.spec.experts, generator=g).topk(3).indices, torch.rand(tokens, 3, generator=g)
    )
    routing.topk_ids_TA[0, 0], routing.topk_weights_TA[0, 0] = -1, float("nan")
    outs = [torch.full_like(x, float("nan")).cuda() for _ in range(3)]
    for out in outs:
        runner.run(CallArguments(x.cuda(), *Routing(*(part.cuda() for part in routing)), out), config)
    used = inputs_of(problem, config)
    expected = run_experts(replace(problem, activations=used), weights, x, routing)
    assert max(relative_error(out.cpu(), expected) for out in outs) < used.tolerance
    assert not verdict.repeatable or all(torch.equal(out, outs[0]) for out in outs)
