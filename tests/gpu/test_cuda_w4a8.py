"""The CUDA backend with 4-bit weights and x in E4M3, on an SM90 GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.backends.reference import run_experts
from polymoe.kernels.cuda.spec import W4A8
from polymoe.layer.experts import FusedExperts
from polymoe.problem.activations import GeGLU, SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import relative_error
from polymoe.problem.routing import Routing
from support.captured import captured_follows_new_rows
from support.cuda_calls import (
    awkward_call,
    need_sm90,
    on_gpu,
    pack,
    same_experts,
    same_in_any_batch,
)
from support.problems import GPT_OSS, problem_of, random_call

EVERY = [
    *(CudaConfig("w4a8", rows) for rows in W4A8.tiles),
    *(CudaConfig("w4a8", 128, narrow_m=rows) for rows in (32, 64)),
]
E4M3: dict[str, Any] = {"activations": "fp8_group128"}
MOST = 5e-3
"""Largest relative error against the reference that rounds x and h alike."""


@pytest.fixture(autouse=True)
def _sm90() -> None:
    need_sm90()


@pytest.mark.parametrize("tokens", [1, 3, 40, 700])
@pytest.mark.parametrize("config", EVERY, ids=str)
def test_every_configuration(config: CudaConfig, tokens: int) -> None:
    weights = same_experts(hidden=1024, intermediate=512, experts=7, bias=True)
    on_gpu(weights, *awkward_call(tokens, 1024), config, activation=GPT_OSS, most=MOST, **E4M3)


@pytest.mark.parametrize("config", EVERY, ids=str)
@pytest.mark.parametrize(
    ("hidden", "intermediate", "top_k"), [(2880, 704, 4), (1024, 2688, 22), (4160, 320, 1), (7168, 256, 8)]
)
def test_odd_sizes(config: CudaConfig, hidden: int, intermediate: int, top_k: int) -> None:
    weights = same_experts(hidden=hidden, intermediate=intermediate, bias=True)
    on_gpu(weights, *random_call(40, hidden, 5, top_k, torch.bfloat16), config, most=MOST, **E4M3)


@pytest.mark.parametrize("activation", [SwiGLU(limit=10.0), GeGLU(), GeGLU("tanh")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_activations_and_dtypes_of_x(dtype: torch.dtype, activation: Any) -> None:
    weights = same_experts(hidden=1024, intermediate=512)
    for tokens in (9, 200):
        call = random_call(tokens, 1024, 5, dtype=dtype)
        on_gpu(weights, *call, activation=activation, most=MOST, **E4M3)


def test_against_exact_float32() -> None:
    weights = same_experts(hidden=2048, intermediate=1024)
    problem = problem_of(weights, **E4M3)
    x, routing = random_call(64, 2048, 5, dtype=torch.bfloat16)
    packed = pack(problem, weights, "cuda")
    exact = run_experts(replace(problem, activations="16bit"), weights, x, routing)
    for config in EVERY:
        out = torch.empty_like(x, device="cuda")
        Cuda().bind(problem, packed).run(
            CallArguments(x.cuda(), *Routing(*(part.cuda() for part in routing)), out), config
        )
        assert 1e-2 < relative_error(out.cpu(), exact) < 5.5e-2


def test_ids_of_others_are_never_read() -> None:
    weights = same_experts(hidden=512, intermediate=512, bias=True)
    x, routing = random_call(40, 512, 5, dtype=torch.bfloat16)
    routing.topk_ids_TA[::3, 0] = -1
    routing.topk_ids_TA[1::3, 1] = 5
    routing.topk_weights_TA[::3, 0] = float("nan")
    for config in EVERY:
        on_gpu(weights, x, routing, config, most=MOST, **E4M3)


@pytest.mark.parametrize("config", EVERY, ids=str)
def test_many_repeats_to_the_bit(config: CudaConfig) -> None:
    """A stage given back too early, a barrier too few: they show in some run of many."""
    weights = same_experts(hidden=1024, intermediate=512, experts=4)
    call = random_call(300, 1024, 4, dtype=torch.bfloat16)  # experts of 128 rows and a few
    on_gpu(weights, *call, config, runs=1000, most=MOST, **E4M3)


@pytest.mark.parametrize(("hidden", "intermediate"), [(1024, 512), (320, 192)])
def test_a_token_does_not_see_its_batch(hidden: int, intermediate: int) -> None:
    same_in_any_batch(same_experts(hidden=hidden, intermediate=intermediate, experts=4), hidden, **E4M3)


@pytest.mark.parametrize("tokens", [3, 200])
def test_captured_layer_follows_new_rows(tokens: int) -> None:
    weights = same_experts(experts=16, hidden=1024, intermediate=512)
    experts = FusedExperts.from_weights(weights, GPT_OSS, top_k=3, device="cuda", backend="cuda", **E4M3)
    assert {step.config.family for step in experts.explain().require().steps} == {"w4a8"}  # type: ignore[attr-defined]
    captured_follows_new_rows(experts, weights, tokens, MOST)
