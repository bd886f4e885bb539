"""The CUDA backend with MXFP4 weights and few rows of x, which the GEMMs round to E4M3, on an SM90 GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polymoe.activations import GeGLU
from polymoe.backends.cuda.backend import CudaConfig
from polymoe.kernels.cuda.sizes import W4A8_MMA
from support.cuda_calls import awkward_call, need_sm90, repeated_on_gpu, same_experts
from support.problems import GPT_OSS, random_call, with_input_scales

EVERY = [CudaConfig("w4a8_mma", rows, 64) for rows in W4A8_MMA.tiles]
every_config = pytest.mark.parametrize("config", EVERY, ids=str)
TOKEN_TOLERANCE = 5e-3  # of every single token


def compare(*args: Any, activations: str = "fp8_token", **kwargs: Any) -> None:
    """Every token with the reference, and runs with each other to the bit."""
    first, expected = repeated_on_gpu(*args, activations=activations, **kwargs)
    errors, sizes = (first.float() - expected).norm(dim=1), expected.norm(dim=1)
    assert bool((errors <= TOKEN_TOLERANCE * sizes).all()), (errors / sizes).max()


@pytest.fixture(autouse=True)
def _sm90() -> None:
    need_sm90()


@pytest.mark.parametrize("mode", ["fp8_token", "fp8_static"])
@pytest.mark.parametrize("tokens", [1, 3, 10, 11, 40, 700])
@every_config
def test_few_and_more_rows(config: CudaConfig, tokens: int, mode: str) -> None:
    weights = with_input_scales(same_experts(hidden=384, intermediate=256, experts=7, bias=True))
    compare(weights, *awkward_call(tokens, 384), config, activation=GPT_OSS, activations=mode)


@every_config
@pytest.mark.parametrize(
    ("hidden", "intermediate", "top_k"), [(2880, 704, 4), (4160, 320, 1), (7168, 256, 8), (128, 64, 1)]
)
def test_odd_sizes(config: CudaConfig, hidden: int, intermediate: int, top_k: int) -> None:
    weights = same_experts(hidden=hidden, intermediate=intermediate, bias=True)
    for tokens in (1, 30):
        compare(weights, *random_call(tokens, hidden, 5, top_k, torch.bfloat16), config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_of_x(dtype: torch.dtype) -> None:
    weights = same_experts(hidden=128, intermediate=128)
    for tokens in (9, 200):
        compare(weights, *random_call(tokens, 128, 5, dtype=dtype), EVERY[0], activation=GeGLU("tanh"))


@pytest.mark.parametrize("tokens", [3, 40])
def test_many_repeats_to_the_bit(tokens: int) -> None:
    """A buffer of x written too early, a barrier too few: they show in some run of many."""
    weights = same_experts(hidden=2048, intermediate=512, experts=4)
    compare(weights, *random_call(tokens, 2048, 4, dtype=torch.bfloat16), EVERY[0], runs=1000)
