"""The CUDA backend with bfloat16 weights, on an SM90 GPU."""

from __future__ import annotations

import pytest
import torch

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.kernels.cuda.spec import BF16
from polymoe.layer.experts import FusedExperts
from polymoe.problem.activations import GeGLU
from support.captured import captured_follows_new_rows
from support.cuda_calls import awkward_call, need_sm90, on_gpu, same_experts, same_in_any_batch
from support.problems import GPT_OSS, random_call

EVERY = [CudaConfig("bf16", rows) for rows in BF16.tiles]


@pytest.fixture(autouse=True)
def _sm90() -> None:
    need_sm90()


@pytest.mark.parametrize("tokens", [1, 3, 40, 700])
@pytest.mark.parametrize("config", EVERY, ids=str)
def test_every_configuration(config: CudaConfig, tokens: int) -> None:
    weights = same_experts("bf16", hidden=336, intermediate=272, experts=7, bias=True)
    on_gpu(weights, *awkward_call(tokens, 336), config, activation=GPT_OSS)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("config", EVERY, ids=str)
@pytest.mark.parametrize(
    ("hidden", "intermediate", "top_k"), [(2880, 720, 4), (1024, 2688, 22), (192, 336, 1), (16, 16, 1)]
)
def test_odd_sizes(config: CudaConfig, hidden: int, intermediate: int, top_k: int, gated: bool) -> None:
    weights = same_experts("bf16", hidden=hidden, intermediate=intermediate, gated=gated, bias=True)
    on_gpu(weights, *random_call(40, hidden, 5, top_k, torch.bfloat16), config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_of_x(dtype: torch.dtype) -> None:
    weights = same_experts("bf16", hidden=128, intermediate=128)
    for tokens in (9, 200):
        call = random_call(tokens, 128, 5, dtype=dtype)
        on_gpu(weights, *call, CudaConfig("bf16", 64), activation=GeGLU("tanh"))


def test_weights_on_the_input() -> None:
    weights = same_experts("bf16", hidden=336, intermediate=272, experts=7, bias=True)
    on_gpu(weights, *random_call(200, 336, 7, 3, torch.bfloat16), CudaConfig("bf16", 64), weight_on="input")


@pytest.mark.parametrize("config", EVERY, ids=str)
def test_many_repeats_to_the_bit(config: CudaConfig) -> None:
    """A stage given back too early, a barrier too few: they show in some run of many."""
    weights = same_experts("bf16", hidden=1024, intermediate=512, experts=4)
    on_gpu(weights, *random_call(400, 1024, 4, dtype=torch.bfloat16), config, runs=1000)


def test_a_token_does_not_see_its_batch() -> None:
    same_in_any_batch(same_experts("bf16", hidden=1024, intermediate=512, experts=4), 1024)


def test_captured_layer_follows_new_routings() -> None:
    weights = same_experts("bf16", experts=16, hidden=256, intermediate=256)
    experts = FusedExperts.from_weights(weights, GPT_OSS, top_k=3, device="cuda", backend="cuda", activations="16bit")
    for tokens in (3, 200):
        captured_follows_new_rows(experts, weights, tokens)
