"""The CUDA backend with E4M3 weights and few rows of x in E4M3, on an SM90 GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.kernels.cuda import spec
from polymoe.layer.experts import FusedExperts
from polymoe.problem.activations import GeGLU
from support.captured import captured_follows_new_rows
from support.cuda_calls import (
    awkward_call,
    need_sm90,
    repeated_on_gpu,
    same_experts,
    same_in_any_batch,
)
from support.problems import GPT_OSS, random_call

W8A8_F16 = tuple(spec.W8A8_F16.tiles)
EVERY = [CudaConfig("w8a8_f16", rows) for rows in W8A8_F16]
TOKEN_TOLERANCE = 5e-3  # of every single token


def compare(*args: Any, **kwargs: Any) -> None:
    """Every token with the reference, and runs with each other to the bit."""
    first, expected = repeated_on_gpu(*args, activations="fp8_group128", **kwargs)
    errors, sizes = (first.float() - expected).norm(dim=1), expected.norm(dim=1)
    assert bool((errors <= TOKEN_TOLERANCE * sizes).all()), (errors / sizes).max()


@pytest.fixture(autouse=True)
def _sm90() -> None:
    need_sm90()


@pytest.mark.parametrize("tokens", [1, 3, 40, 700])
@pytest.mark.parametrize("config", EVERY, ids=str)
def test_every_configuration(config: CudaConfig, tokens: int) -> None:
    weights = same_experts("fp8_block128", hidden=384, intermediate=256, experts=7, bias=True)
    compare(weights, *awkward_call(tokens, 384), config, activation=GPT_OSS)


@pytest.mark.parametrize("config", EVERY, ids=str)
@pytest.mark.parametrize(
    ("hidden", "intermediate", "top_k"), [(2944, 384, 22), (640, 2048, 2), (7168, 256, 3), (128, 128, 1)]
)
def test_odd_sizes(config: CudaConfig, hidden: int, intermediate: int, top_k: int) -> None:
    weights = same_experts("fp8_block128", hidden=hidden, intermediate=intermediate, bias=True)
    compare(weights, *random_call(300, hidden, 5, top_k, torch.bfloat16), config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_of_x(dtype: torch.dtype) -> None:
    weights = same_experts("fp8_block128", hidden=128, intermediate=128)
    for tokens in (9, 200):
        compare(weights, *random_call(tokens, 128, 5, dtype=dtype), EVERY[1], activation=GeGLU("tanh"))


@pytest.mark.parametrize("config", EVERY, ids=str)
def test_many_repeats_to_the_bit(config: CudaConfig) -> None:
    """A stage given back too early, a barrier too few: they show in some run of many."""
    weights = same_experts("fp8_block128", hidden=1024, intermediate=512, experts=4)
    compare(weights, *random_call(400, 1024, 4, dtype=torch.bfloat16), config, runs=1000)


def test_a_token_does_not_see_its_batch() -> None:
    weights = same_experts("fp8_block128", hidden=1024, intermediate=512, experts=4)
    same_in_any_batch(weights, 1024, activations="fp8_group128")


def test_captured_layer_follows_new_routings() -> None:
    weights = same_experts("fp8_block128", experts=16, hidden=256, intermediate=256)
    experts = FusedExperts.from_weights(
        weights, GPT_OSS, top_k=3, device="cuda", backend="cuda", activations="fp8_group128"
    )
    for tokens in (3, 200):
        captured_follows_new_rows(experts, weights, tokens, TOKEN_TOLERANCE)
