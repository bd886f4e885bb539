"""The CUDA backend with 4-bit weights and x in E4M3 with one scale per row, on an SM90 GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.backends.reference import run_experts
from polymoe.kernels.cuda.spec import W4A8_ROWS, W4A8_ROWS_FAST
from polymoe.layer.experts import FusedExperts
from polymoe.problem.activations import GeGLU, SwiGLU
from polymoe.problem.numerics import TOLERANCE_FAST_ACCUMULATION, relative_error
from support.cuda_calls import awkward_call, need_sm90, on_gpu, same_experts, same_in_any_batch
from support.problems import GPT_OSS, problem_of, random_call, with_input_scales

EVERY = [
    *(CudaConfig("w4a8_rows", rows) for rows in W4A8_ROWS.tiles),
    *(CudaConfig("w4a8_rows", 128, narrow_m=rows) for rows in (32, 64)),
]
every_config = pytest.mark.parametrize("config", EVERY, ids=str)
every_format = pytest.mark.parametrize("format", W4A8_ROWS.formats)
FAST = CudaConfig("w4a8_rows_fast", 112)
TOKEN: dict[str, Any] = {"activations": "fp8_token"}
TOKEN_FAST: dict[str, Any] = {"activations": "fp8_token_fast_accumulation", "most": TOLERANCE_FAST_ACCUMULATION}
FEW = 4e-2
"""Largest relative error of few tokens, of which one may be that far off (one element of h near a tie); else 6e-3."""


@pytest.fixture(autouse=True)
def _sm90() -> None:
    need_sm90()


@pytest.mark.parametrize("mode", ["fp8_token", "fp8_static"])
@pytest.mark.parametrize("tokens", [1, 40, 700])
@every_config
@every_format
def test_every_configuration(format: str, config: CudaConfig, tokens: int, mode: str) -> None:
    weights = with_input_scales(same_experts(format, hidden=1024, intermediate=512, experts=7, bias=True))
    most = 6e-3 if tokens > 100 else FEW
    on_gpu(weights, *awkward_call(tokens, 1024), config, activation=GPT_OSS, most=most, activations=mode)


@every_config
@every_format
@pytest.mark.parametrize(("hidden", "intermediate", "top_k"), [(2880, 704, 4), (4160, 320, 1), (7168, 256, 8)])
def test_odd_sizes(format: str, config: CudaConfig, hidden: int, intermediate: int, top_k: int) -> None:
    weights = same_experts(format, hidden=hidden, intermediate=intermediate, bias=True)
    on_gpu(weights, *random_call(130, hidden, 5, top_k, torch.bfloat16), config, most=6e-3, **TOKEN)


@pytest.mark.parametrize("activation", [SwiGLU(limit=10.0), GeGLU(), GeGLU("tanh")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_activations_and_dtypes_of_x(dtype: torch.dtype, activation: Any) -> None:
    weights = same_experts(hidden=1024, intermediate=512)
    on_gpu(weights, *random_call(200, 1024, 5, dtype=dtype), activation=activation, most=6e-3, **TOKEN)


@every_config
@every_format
def test_many_repeats_to_the_bit(format: str, config: CudaConfig) -> None:
    """A stage given back too early, a barrier too few: they show in some run of many."""
    weights = same_experts(format, hidden=2048, intermediate=512, experts=4)
    call = random_call(300, 2048, 4, dtype=torch.bfloat16)  # experts of 128 rows and a few
    on_gpu(weights, *call, config, runs=1000, most=6e-3, **TOKEN)


@every_format
@pytest.mark.parametrize(("hidden", "intermediate"), [(1024, 512), (320, 192)])
def test_a_token_does_not_see_its_batch(format: str, hidden: int, intermediate: int) -> None:
    same_in_any_batch(same_experts(format, hidden=hidden, intermediate=intermediate, experts=4), hidden, **TOKEN)


@pytest.mark.parametrize("mode", W4A8_ROWS_FAST.activations)
@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_fast_accumulation(tokens: int, mode: str) -> None:
    weights = with_input_scales(same_experts(hidden=1024, intermediate=512, experts=7, bias=True))
    most = TOLERANCE_FAST_ACCUMULATION if tokens > 100 else FEW
    on_gpu(weights, *awkward_call(tokens, 1024), FAST, activation=GPT_OSS, most=most, activations=mode)


@pytest.mark.parametrize(("hidden", "intermediate", "top_k"), [(2880, 704, 4), (3136, 320, 1), (4096, 2048, 2)])
def test_odd_sizes_with_fast_accumulation(hidden: int, intermediate: int, top_k: int) -> None:
    weights = same_experts(hidden=hidden, intermediate=intermediate, bias=True)
    on_gpu(weights, *random_call(512, hidden, 5, top_k, torch.bfloat16), FAST, **TOKEN_FAST)


def test_many_repeats_with_fast_accumulation_to_the_bit() -> None:
    weights = same_experts(hidden=2048, intermediate=512, experts=4)
    on_gpu(weights, *random_call(300, 2048, 4, dtype=torch.bfloat16), FAST, runs=1000, **TOKEN_FAST)


def test_a_layer_with_fast_accumulation() -> None:
    """It passes the check at load; few tokens run the kernels of ``fp8_token``, many do not."""
    weights = same_experts(hidden=1024, intermediate=512, experts=4)
    exact, fast = (
        FusedExperts.from_weights(weights, SwiGLU(), top_k=2, device="cuda", backend="cuda", activations=mode)
        for mode in ("fp8_token", TOKEN_FAST["activations"])
    )
    for tokens, same in ((8, True), (1000, False)):
        x, routing = random_call(tokens, 1024, 4, dtype=torch.bfloat16)
        call = x.cuda(), *(part.cuda() for part in routing)
        assert torch.equal(fast(*call), exact(*call)) == same
        expected = run_experts(problem_of(weights, **TOKEN), weights, x, routing)
        assert relative_error(fast(*call).cpu(), expected) < (FEW if same else TOLERANCE_FAST_ACCUMULATION)
