"""The CUDA backend with E4M3 weights and very few rows of x in E4M3, on an SM90 GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.problem.activations import Activation, GeGLU
from support.cuda_calls import awkward_call, need_sm90, repeated_on_gpu, same_experts, same_in_both
from support.problems import GPT_OSS, random_call

ORDERED = CudaConfig("w8a8_mma_ordered", 8)
CONFIGS = [CudaConfig("w8a8_mma", 8), ORDERED]
TOKEN_TOLERANCE = 5e-3  # of every single token


def compare(*args: Any, **kwargs: Any) -> None:
    """Every token with the reference, and runs with each other to the bit."""
    for config in CONFIGS:
        first, expected = repeated_on_gpu(*args, config=config, activations="fp8_group128", **kwargs)
        errors, sizes = (first.float() - expected).norm(dim=1), expected.norm(dim=1)
        assert bool((errors <= TOKEN_TOLERANCE * sizes).all()), (config, (errors / sizes).max())


@pytest.fixture(autouse=True)
def _sm90() -> None:
    need_sm90()


@pytest.mark.parametrize("tokens", [1, 3, 10, 11, 40, 700])
def test_few_and_more_rows(tokens: int) -> None:
    weights = same_experts("fp8_block128", hidden=384, intermediate=256, experts=7, bias=True)
    compare(weights, *awkward_call(tokens, 384), activation=GPT_OSS)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "top_k"), [(2944, 384, 22), (640, 2048, 2), (7168, 256, 3), (128, 128, 1)]
)
def test_odd_sizes(hidden: int, intermediate: int, top_k: int) -> None:
    weights = same_experts("fp8_block128", hidden=hidden, intermediate=intermediate, bias=True)
    for tokens in (1, 30):
        compare(weights, *random_call(tokens, hidden, 5, top_k, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_of_x(dtype: torch.dtype) -> None:
    weights = same_experts("fp8_block128", hidden=128, intermediate=128)
    for tokens in (9, 200):
        compare(weights, *random_call(tokens, 128, 5, dtype=dtype), activation=GeGLU("tanh"))


@pytest.mark.parametrize("tokens", [3, 40])
def test_many_repeats_to_the_bit(tokens: int) -> None:
    """A block overwritten too early, a barrier too few: they show in some run of many."""
    weights = same_experts("fp8_block128", hidden=2048, intermediate=512, experts=4)
    compare(weights, *random_call(tokens, 2048, 4, dtype=torch.bfloat16), runs=1000)


@pytest.mark.parametrize("activation", [GPT_OSS, GeGLU("tanh"), GeGLU("none")], ids=str)
@pytest.mark.parametrize(
    ("hidden", "intermediate", "top_k"), [(2944, 384, 22), (640, 2048, 2), (7168, 256, 3), (128, 128, 1)]
)
def test_same_bits_as_with_more_rows(hidden: int, intermediate: int, top_k: int, activation: Activation) -> None:
    weights = same_experts("fp8_block128", hidden=hidden, intermediate=intermediate, bias=True)
    for tokens, dtype in ((1, torch.bfloat16), (30, torch.float32)):
        x, routing = random_call(tokens, hidden, 5, top_k, dtype)
        x *= 2.0 ** torch.randint(-130, 1, (tokens, 1))
        same_in_both(weights, x, routing, ORDERED, CudaConfig("w8a8_f16", 32), "fp8_group128", activation=activation)
