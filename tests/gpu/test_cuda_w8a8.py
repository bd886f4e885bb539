"""The CUDA backend with E4M3 weights and many rows of x in E4M3, on an SM90 GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.kernels.cuda import spec
from polymoe.kernels.cuda.spec import KERNEL_FAMILIES
from polymoe.layer.experts import FusedExperts
from polymoe.problem.activations import GeGLU, SwiGLU
from polymoe.problem.numerics import TOLERANCE
from support.captured import captured_follows_new_rows
from support.cuda_calls import awkward_call, need_sm90, on_gpu, same_experts
from support.problems import GPT_OSS, random_call

EVERY = [CudaConfig(family.name, rows) for family in (spec.W8A8, spec.W8A8_SHARED) for rows in family.tiles]
every_config = pytest.mark.parametrize("config", EVERY, ids=str)
E4M3: dict[str, Any] = {"activations": "fp8_group128"}


@pytest.fixture(autouse=True)
def _sm90() -> None:
    need_sm90()


@pytest.mark.parametrize("tokens", [1, 3, 40, 700])
@every_config
def test_every_configuration(config: CudaConfig, tokens: int) -> None:
    weights = same_experts("fp8_block128", hidden=384, intermediate=256, experts=7, bias=True)
    # One number of h that fell to the other side is much of a few tokens.
    most = TOLERANCE if tokens > 500 else 4e-2
    on_gpu(weights, *awkward_call(tokens, 384), config, activation=GPT_OSS, most=most, **E4M3)


@every_config
@pytest.mark.parametrize(
    ("hidden", "intermediate", "top_k"), [(2944, 384, 22), (640, 2048, 2), (7168, 256, 3), (128, 128, 1)]
)
def test_odd_sizes(config: CudaConfig, hidden: int, intermediate: int, top_k: int) -> None:
    weights = same_experts("fp8_block128", hidden=hidden, intermediate=intermediate, bias=True)
    on_gpu(weights, *random_call(600, hidden, 5, top_k, torch.bfloat16), config, **E4M3)


@every_config
@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("tokens", [30, 61, 79, 95, 110, 127, 128, 129, 159, 160, 161, 320])
def test_every_width_of_products(monkeypatch: pytest.MonkeyPatch, config: CudaConfig, tokens: int, tiles: bool) -> None:
    """x in permuted tiles, and gathered."""
    if not tiles:
        monkeypatch.setitem(KERNEL_FAMILIES, config.family, replace(config.kernels, x=spec.W8A8.x[1:]))
    weights = same_experts("fp8_block128", hidden=512, intermediate=256, experts=1)
    on_gpu(weights, *random_call(tokens, 512, 1, 1, torch.bfloat16), config, most=1e-2, **E4M3)


@every_config
@pytest.mark.parametrize("activation", [SwiGLU(limit=10.0), GeGLU(), GeGLU("tanh")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_activations_and_dtypes_of_x(config: CudaConfig, dtype: torch.dtype, activation: Any) -> None:
    weights = same_experts("fp8_block128", hidden=512, intermediate=256)
    on_gpu(weights, *random_call(600, 512, 5, dtype=dtype), config, activation=activation, **E4M3)


@pytest.mark.parametrize("top_k", [1, 2])
@every_config
def test_many_repeats_to_the_bit(config: CudaConfig, top_k: int) -> None:
    """A stage given back too early, a barrier too few: they show in some run of many."""
    weights = same_experts("fp8_block128", hidden=1024, intermediate=512, experts=4)
    on_gpu(weights, *random_call(700, 1024, 4, top_k, torch.bfloat16), config, runs=1000, **E4M3)


def test_captured_layer_follows_new_routings() -> None:
    weights = same_experts("fp8_block128", experts=16, hidden=256, intermediate=256)
    experts = FusedExperts.from_weights(weights, GPT_OSS, top_k=3, device="cuda", backend="cuda", **E4M3)
    step = experts.explain().require().step(700)
    assert step.config in EVERY
    captured_follows_new_rows(experts, weights, 700)
