"""The CUDA backend with 4-bit weights and x in 16 bits, on an SM90 GPU."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.backends.reference import run_experts
from polymoe.layouts import LAYOUTS
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.routing import Routing
from support.cuda_calls import need_sm90, on_gpu, same_experts
from support.problems import problem_of, random_call, random_experts

EVERY = [
    CudaConfig("w4a16_mma", 8, 64),
    CudaConfig("w4a16_mma_ordered", 8, 64),
    *[CudaConfig("w4a16_wgmma", rows) for rows in (32, 64, 128, 256)],
    *[CudaConfig("w4a16_wgmma", 128, narrow_m=rows) for rows in (32, 64)],
    CudaConfig("w4a16_wgmma", 256, narrow_m=64),
]


@pytest.fixture(autouse=True)
def _sm90() -> None:
    need_sm90()


def test_x_that_is_not_aligned_and_a_thread_that_is_new() -> None:
    """A view that begins 2 bytes behind a multiple of 16; a thread in which nothing has used the GPU."""
    weights = random_experts()
    problem, (x, routing) = problem_of(weights), random_call(4, 64, 5, dtype=torch.bfloat16)
    packed = LAYOUTS["w4a16_fragments"].pack(weights, torch.device("cuda"))
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape)
    shifted.copy_(x)
    there = Routing(*(part.cuda() for part in routing))
    aligned = x.cuda()
    for given in (shifted, aligned):
        out = torch.empty_like(aligned)
        torch.cuda.synchronize()
        thread = Thread(target=Cuda().bind(problem, packed).run, args=(CallArguments(given, *there, out), EVERY[0]))
        thread.start()
        thread.join()
        assert relative_error(out.cpu(), run_experts(problem, weights, x, routing)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 300])
def test_one_expert_with_all_and_one_with_none(tokens: int) -> None:
    weights = random_experts(experts=300, hidden=64, intermediate=32)
    x, routing = random_call(tokens, 64, 300, 2, torch.bfloat16)
    for config in EVERY:
        on_gpu(weights, x, Routing(torch.full_like(routing.topk_ids_TA, 299), routing.topk_weights_TA), config=config)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int4_g32", "int4_g128", "int4_g128_zp", "mxfp8"])
def test_packing_on_the_gpu_is_packing_on_the_cpu(format: str) -> None:
    layout = LAYOUTS["w8a16_fragments" if format == "mxfp8" else "w4a16_fragments"]
    for hidden, intermediate in ((336, 208), (1024, 512)):
        weights = same_experts(format, experts=9, hidden=hidden, intermediate=intermediate, bias=True)
        there, here = (layout.pack(weights, torch.device(d)) for d in ("cuda", "cpu"))
        assert all(torch.equal(there.tensors[n].cpu(), t) for n, t in here.tensors.items())
        for got, expected in zip(layout.unpack(there), weights, strict=True):
            assert torch.equal(got.up.codes.cpu().view(torch.uint8), expected.up.codes.view(torch.uint8))
