"""The CUDA kernels as configured for SM100 and SM120, compiled for SM90: the same bits as SM90's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polymoe.backends.cuda.config import CudaConfig
from polymoe.backends.cuda.runner import CudaRunner
from polymoe.backends.reference import run_experts
from polymoe.kernels.cuda.spec import W4_FORMATS, W4A16_MMA, W4A16_MMA_TILED, W8A16_MMA, W8A16_MMA_TILED
from polymoe.kernels.cuda.targets import SM90, Target
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.routing import Routing
from support.cuda_calls import need_sm90, pack, same_experts
from support.cuda_targets import TEST_TARGETS
from support.problems import problem_of, random_call


def need(target: Target) -> None:
    """Skip the test where these kernels do not run."""
    need_sm90()
    if not any(target.folder.glob("*.tar.xz")):
        pytest.skip("needs what scripts/build-kernels --tests makes")


@pytest.mark.parametrize("target", TEST_TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("format", [*W4_FORMATS, "mxfp8"])
@pytest.mark.parametrize(
    ("hidden", "intermediate", "gated", "top_k"),
    [(4096, 2048, True, 3), (1024, 2688, False, 5), (7168, 256, True, 4), (336, 592, True, 1), (16, 16, False, 1)],
)
def test_same_bits_in_any_configuration(
    target: Target, format: str, hidden: int, intermediate: int, gated: bool, top_k: int
) -> None:
    """Where K has more than 256 and at most 512 columns, kernels with less shared memory add them in another order."""
    need(target)
    weights = same_experts(format, hidden=hidden, intermediate=intermediate, gated=gated, bias=True, experts=5)
    problem, family = problem_of(weights), W8A16_MMA if format == "mxfp8" else W4A16_MMA
    runners: dict[str, Any] = {
        t.name: CudaRunner(problem, pack(problem, weights, "cuda", t), t) for t in (SM90, target)
    }
    compared = 0
    for tokens in (1, 3, 40):
        x, routing = random_call(tokens, hidden, 5, top_k, torch.bfloat16)
        routing.topk_ids_TA[0, 0] = -1
        expected = run_experts(problem, weights, x, routing)
        x, there = x.cuda(), Routing(*(part.cuda() for part in routing))
        for config in (CudaConfig(family.name, rows, 64) for rows in family.tiles):
            parts = (("gate_up", hidden), ("down", intermediate))
            if not all(
                family.fits(t.budget, format, part, config.block_m, k) for t in (SM90, target) for part, k in parts
            ):
                continue
            outs = {}
            for name, runner in runners.items():
                outs[name] = torch.full_like(x, float("nan"))
                for _ in range(3):
                    again = torch.full_like(x, float("nan"))
                    runner.run(CallArguments(x, *there, again), config)
                    assert torch.equal(again, outs[name]) or bool(outs[name].isnan().all())
                    outs[name] = again
            assert torch.equal(outs[SM90.name], outs[target.name]), (config, tokens)
            assert relative_error(outs[target.name].cpu(), expected) < TOLERANCE
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize("name", ["sm90-as-sm120", "sm90-as-sm100"])
@pytest.mark.parametrize("format", [*W4_FORMATS, "mxfp8"])
@pytest.mark.parametrize(
    ("hidden", "intermediate", "gated", "top_k"),
    [(1024, 2688, False, 5), (2880, 720, True, 4), (336, 592, True, 2), (16, 16, False, 1)],
)
def test_many_rows_by_mma_have_the_bits_of_wgmma(
    name: str, format: str, hidden: int, intermediate: int, gated: bool, top_k: int
) -> None:
    """Both add K in order, 16 columns at a time, and both instructions add these alike."""
    need(TEST_TARGETS[name])
    weights = same_experts(format, hidden=hidden, intermediate=intermediate, gated=gated, bias=True, experts=5)
    problem = problem_of(weights)
    own, other = (
        CudaRunner(problem, pack(problem, weights, "cuda", target), target) for target in (SM90, TEST_TARGETS[name])
    )
    tiled = W8A16_MMA_TILED if format == "mxfp8" else W4A16_MMA_TILED
    wgmma, (block_m,) = tiled.name.replace("mma_tiled", "wgmma"), tiled.tiles
    for tokens in (3, 40, 300):
        x, routing = random_call(tokens, hidden, 5, top_k, torch.bfloat16)
        routing.topk_ids_TA[0, 0] = -1
        expected = run_experts(problem, weights, x, routing)
        x, there = x.cuda(), Routing(*(part.cuda() for part in routing))
        by_wgmma = torch.full_like(x, float("nan"))
        own.run(CallArguments(x, *there, by_wgmma), CudaConfig(wgmma, 64))
        for _ in range(5):
            out = torch.full_like(x, float("nan"))
            other.run(CallArguments(x, *there, out), CudaConfig(tiled.name, block_m))
            assert relative_error(out.cpu(), expected) < TOLERANCE
            assert torch.equal(out, by_wgmma), tokens
