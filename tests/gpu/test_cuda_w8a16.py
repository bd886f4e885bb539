"""The CUDA backend with MXFP8 weights and x in 16 bits, on an SM90 GPU."""

from __future__ import annotations

import pytest
import torch

from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.layer.experts import FusedExperts
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine
from polymoe.problem.activations import GeGLU
from support.captured import captured_follows_new_rows
from support.cuda_calls import awkward_call, need_sm90, on_gpu, same_experts, same_in_any_batch
from support.problems import GPT_OSS, problem_of, random_call

EVERY = [
    CudaConfig("w8a16_mma", 8, 64),
    *[CudaConfig("w8a16_wgmma", rows) for rows in (32, 64, 128, 256)],
    CudaConfig("w8a16_wgmma", 32, 0, 64),
    *[CudaConfig("w8a16_wgmma", block_m, narrow_m=rows) for block_m, rows in ((128, 32), (128, 64), (256, 64))],
]
every_config = pytest.mark.parametrize("config", EVERY, ids=str)


@pytest.fixture(autouse=True)
def _sm90() -> None:
    need_sm90()


@every_config
@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
def test_every_configuration(config: CudaConfig, tokens: int) -> None:
    weights = same_experts("mxfp8", hidden=336, intermediate=272, experts=7, bias=True)
    on_gpu(weights, *awkward_call(tokens, 336), config=config, activation=GPT_OSS, weight_on="input")


@every_config
@pytest.mark.parametrize(
    ("hidden", "intermediate", "gated", "top_k"),
    [(2880, 720, True, 4), (1024, 2688, False, 22), (192, 336, True, 1), (16, 16, False, 1)],
)
def test_odd_sizes(config: CudaConfig, hidden: int, intermediate: int, gated: bool, top_k: int) -> None:
    weights = same_experts("mxfp8", hidden=hidden, intermediate=intermediate, gated=gated, bias=True, experts=5)
    on_gpu(weights, *random_call(40, hidden, 5, top_k, torch.bfloat16), config=config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [9, 200])
def test_what_the_backend_chooses(tokens: int, dtype: torch.dtype) -> None:
    weights = same_experts("mxfp8", hidden=1024, intermediate=512, experts=4)
    on_gpu(weights, *random_call(tokens, 1024, 4, dtype=dtype), activation=GeGLU("tanh"), runs=200)


def test_a_token_does_not_depend_on_its_batch() -> None:
    same_in_any_batch(same_experts("mxfp8", hidden=336, intermediate=208, bias=True), 336)


def test_packing_on_the_gpu_is_packing_on_the_cpu() -> None:
    weights, layout = same_experts("mxfp8", hidden=336, intermediate=208, bias=True), LAYOUTS["w8a16_fragments"]
    there, here = (layout.pack(weights, torch.device(d)) for d in ("cuda", "cpu"))
    assert all(torch.equal(there.tensors[n].cpu(), t) for n, t in here.tensors.items())
    for got, expected in zip(layout.unpack(there), weights, strict=True):
        assert torch.equal(got.up.codes.cpu().view(torch.uint8), expected.up.codes.view(torch.uint8))


def test_captured_graph_follows_new_routings() -> None:
    weights = same_experts("mxfp8", experts=16, hidden=256, intermediate=256)
    table = {"cuda": Cuda()}
    request = PlanRequest(Machine.of("cuda"), "mixed", "cuda", table, LAYOUTS)
    experts = FusedExperts.pack(problem_of(weights), weights, request)
    for tokens in (3, 200):
        captured_follows_new_rows(experts, weights, tokens, replays=5)
