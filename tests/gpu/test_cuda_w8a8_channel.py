"""The CUDA backend with E4M3 weights and rows that have one scale each, on an SM90 GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.problem.activations import GeGLU
from polymoe.problem.numerics import TOLERANCE, relative_error
from polymoe.problem.tensors import ExpertWeights
from support.cuda_calls import (
    TOKEN_TOLERANCE,
    awkward_call,
    need_sm90,
    repeated_on_gpu,
    same_experts,
    same_in_any_batch,
    same_in_both,
)
from support.problems import GPT_OSS, random_call, with_input_scales

ORDERED = CudaConfig("w8a8_mma_ordered_channel", 8), CudaConfig("w8a8_f16_channel", 32)
CONFIGS = [CudaConfig("w8a8_mma_channel", 8), *ORDERED, CudaConfig("w8a8_channel", 160)]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.family}-{config.block_m}")


def experts(format: str = "fp8_channel", **kwargs: Any) -> ExpertWeights:
    return with_input_scales(same_experts(format, **kwargs))


def compare(
    weights: ExpertWeights, call: Any, config: CudaConfig, activations: str = "fp8_token", **kwargs: Any
) -> None:
    """With the reference, and runs with each other to the bit."""
    first, expected = repeated_on_gpu(weights, *call, config=config, activations=activations, **kwargs)
    if config.family == "w8a8_channel":  # few rows of few columns: one number of h that fell to the other side shows
        assert relative_error(first, expected) < (TOLERANCE if len(first) > 100 else 2e-2)
        return
    # Of scales that are far from the maximum, one number is more of the whole; and so it is of a single expert's h.
    if activations == "fp8_static" or kwargs.get("weight_on") == "input":
        assert relative_error(first, expected) < TOLERANCE
        return
    errors, norms = (first.float() - expected).norm(dim=1), expected.norm(dim=1)
    assert bool((errors <= TOKEN_TOLERANCE * norms).all()), (errors / norms).max()


@pytest.fixture(autouse=True)
def _sm90() -> None:
    need_sm90()


@every_config
@pytest.mark.parametrize("activations", ["fp8_token", "fp8_static"])
def test_few_and_many_rows(config: CudaConfig, activations: str) -> None:
    weights = experts(hidden=384, intermediate=256, experts=7, bias=True)
    for tokens in (1, 10, 11, 700):
        compare(weights, awkward_call(tokens, 384), config, activations, activation=GPT_OSS)


@every_config
@pytest.mark.parametrize("activations", ["fp8_token", "fp8_static"])
def test_one_scale_in_all_and_no_gate(config: CudaConfig, activations: str) -> None:
    for hidden, intermediate in ((2944, 384), (640, 2048)):
        weights = experts("fp8_tensor", hidden=hidden, intermediate=intermediate, gated=False)
        compare(weights, random_call(130, hidden, 5, 3, torch.bfloat16), config, activations)


@every_config
def test_routing_weights_on_the_input(config: CudaConfig) -> None:
    weights = experts(hidden=256, intermediate=128)
    for dtype in (torch.float16, torch.float32):
        compare(weights, random_call(130, 256, 5, 1, dtype), config, weight_on="input", activation=GeGLU("tanh"))


def test_a_token_does_not_depend_on_its_batch() -> None:
    weights = same_experts("fp8_channel", hidden=384, intermediate=256, experts=7, bias=True)
    same_in_any_batch(weights, 384, activations="fp8_token")


@pytest.mark.parametrize("activations", ["fp8_token", "fp8_static"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("hidden", "intermediate"), [(2944, 384), (640, 2048), (128, 128)])
def test_few_rows_have_the_bits_of_more(hidden: int, intermediate: int, gated: bool, activations: str) -> None:
    weights = experts(hidden=hidden, intermediate=intermediate, gated=gated, bias=True)
    for tokens, top_k in ((1, 3), (30, 1)):
        on_input = {"weight_on": "input"} if top_k == 1 and activations == "fp8_token" else {}
        call = random_call(tokens, hidden, 5, top_k, torch.float32)
        same_in_both(weights, *call, *ORDERED, activations, **on_input)


@every_config
def test_many_repeats_to_the_bit(config: CudaConfig) -> None:
    """A block overwritten too early, a barrier too few: they show in some run of many."""
    weights = experts(hidden=2048, intermediate=512, experts=4)
    for tokens in (3, 140):
        compare(weights, random_call(tokens, 2048, 4, dtype=torch.bfloat16), config, runs=500)
