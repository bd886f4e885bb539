"""The Hopper backend with E4M3 weights and many E4M3 rows: its choice anywhere, its results on an SM90 GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from polymoe.activations import GeGLU, SwiGLU
from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.bench.cases import CASES
from polymoe.errors import PlanError
from polymoe.experts import FusedExperts
from polymoe.kernels.cuda import sizes
from polymoe.machine import DEVICES, Machine
from polymoe.numerics import TOLERANCE
from support.captured import captured_follows_new_rows
from support.cuda_calls import awkward_call, need_sm90, on_gpu, same_experts
from support.problems import GPT_OSS, random_call

W8A8_F16 = tuple(sizes.W8A8_F16.tiles)
W8A8 = tuple(sizes.W8A8.tiles)
H200 = Machine(DEVICES["h200"], packages={"triton": "3.6.0"}, driver=(13, 0))
EVERY = [CudaConfig("w8a8", rows) for rows in W8A8]
DEEPSEEK = CASES["deepseek-v3-tp8"].problem()
E4M3: dict[str, Any] = {"activations": "fp8_group128"}


class TestConfigure:
    def test_experts_of_many_rows(self) -> None:
        found = [str(Cuda().configure(DEEPSEEK, H200, tokens)) for tokens in (1, 1024, 2048, 8192)]
        assert found == [
            "w8a8_f16, block_m 32", "w8a8_f16, block_m 64", "w8a8, block_m 160", "w8a8, block_m 160",
        ]  # fmt: skip

    def test_tuning_tries_them_where_the_error_of_a_call_is_no_accident(self) -> None:
        converted = {CudaConfig("w8a8_f16", rows) for rows in W8A8_F16}
        assert set(Cuda().tuning_configs(DEEPSEEK, H200, 256)) == converted
        assert set(Cuda().tuning_configs(DEEPSEEK, H200, 1024)) == {*converted, *EVERY}

    def test_results_never_depend_on_the_batch(self) -> None:
        """Sums of other kernels are other ones."""
        problem = replace(DEEPSEEK, batch_invariant=True)
        for tokens in (1, 1024, 8192):
            converted = [CudaConfig("w8a8_f16", rows) for rows in W8A8_F16]
            assert set(Cuda().tuning_configs(problem, H200, tokens)) == set(converted)
        assert Cuda().configure(problem, H200, 8192) == CudaConfig("w8a8_f16", W8A8_F16[-1])

    def test_checked_at_load_with_many_tokens(self) -> None:
        assert {config.check_tokens for config in EVERY} == {512}
        assert CudaConfig("w8a8_f16", 32).check_tokens == 8

    def test_measured_with_other_kernels(self) -> None:
        with pytest.raises(PlanError, match="expected block_m of a w8a8 kernel: 160, got 96"):
            CudaConfig("w8a8", 96)


@pytest.mark.gpu
class TestOnGpu:
    @pytest.fixture(autouse=True)
    def _sm90(self) -> None:
        need_sm90()

    @pytest.mark.parametrize("tokens", [1, 3, 40, 700])
    @pytest.mark.parametrize("config", EVERY, ids=str)
    def test_every_configuration(self, config: CudaConfig, tokens: int) -> None:
        weights = same_experts("fp8_block128", hidden=384, intermediate=256, experts=7, bias=True)
        # One number of h that fell to the other side is much of a few tokens.
        most = TOLERANCE if tokens > 500 else 4e-2
        on_gpu(weights, *awkward_call(tokens, 384), config, activation=GPT_OSS, most=most, **E4M3)

    @pytest.mark.parametrize("config", EVERY, ids=str)
    @pytest.mark.parametrize(
        ("hidden", "intermediate", "top_k"), [(2944, 384, 22), (640, 2048, 2), (7168, 256, 3), (128, 128, 1)]
    )
    def test_odd_sizes(self, config: CudaConfig, hidden: int, intermediate: int, top_k: int) -> None:
        weights = same_experts("fp8_block128", hidden=hidden, intermediate=intermediate, bias=True)
        on_gpu(weights, *random_call(600, hidden, 5, top_k, torch.bfloat16), config, **E4M3)

    @pytest.mark.parametrize("tokens", [30, 61, 79, 95, 110, 127, 128, 129, 159, 160, 161, 320])
    def test_every_width_of_products(self, tokens: int) -> None:
        weights = same_experts("fp8_block128", hidden=512, intermediate=256, experts=1)
        on_gpu(weights, *random_call(tokens, 512, 1, 1, torch.bfloat16), EVERY[0], most=1e-2, **E4M3)

    @pytest.mark.parametrize("activation", [SwiGLU(limit=10.0), GeGLU(), GeGLU("tanh")], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_activations_and_dtypes_of_x(self, dtype: torch.dtype, activation: Any) -> None:
        weights = same_experts("fp8_block128", hidden=512, intermediate=256)
        on_gpu(weights, *random_call(600, 512, 5, dtype=dtype), EVERY[0], activation=activation, **E4M3)

    @pytest.mark.parametrize("config", EVERY, ids=str)
    def test_many_repeats_to_the_bit(self, config: CudaConfig) -> None:
        """A stage given back too early, a barrier too few: they show in some run of many."""
        weights = same_experts("fp8_block128", hidden=1024, intermediate=512, experts=4)
        on_gpu(weights, *random_call(700, 1024, 4, dtype=torch.bfloat16), config, runs=1000, **E4M3)

    def test_captured_layer_follows_new_routings(self) -> None:
        weights = same_experts("fp8_block128", experts=16, hidden=256, intermediate=256)
        experts = FusedExperts.from_weights(weights, GPT_OSS, top_k=3, device="cuda", backend="cuda", **E4M3)
        step = experts.explain().require().step(700)
        assert step.config in EVERY
        captured_follows_new_rows(experts, weights, 700)
