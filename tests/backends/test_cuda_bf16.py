"""The CUDA backend with bfloat16 weights, which are not decoded: verdicts anywhere, results on an SM90 GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polymoe.activations import GeGLU
from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.bench.cases import CASES
from polymoe.errors import PlanError
from polymoe.experts import FusedExperts
from polymoe.formats import FORMATS
from polymoe.kernels.cuda.sizes import BF16
from polymoe.machine import DEVICES, Machine
from polymoe.planning.measured import Table
from polymoe.planning.select import select
from polymoe.verdict import Accepted, Rejected
from support.captured import captured_follows_new_rows
from support.cuda_calls import awkward_call, need_sm90, on_gpu, same_experts, same_in_any_batch
from support.problems import GPT_OSS, random_call

H200 = Machine(DEVICES["h200"], packages={"triton": "3.6.0"}, driver=(13, 0))
EVERY = [CudaConfig("bf16", rows) for rows in BF16.tiles]
QWEN = CASES["qwen3-235b-tp4-bf16"].problem()


class TestCheck:
    def test_takes_bfloat16_on_sm90(self) -> None:
        assert Cuda().check(QWEN, H200) == Accepted(capturable=True, layouts=("w16_swizzle128",))
        plan = select(QWEN, H200, backend="cuda", table=Table()).require()
        assert {step.backend for step in plan.steps} == {"cuda"}

    def test_up_and_down_of_different_kinds(self) -> None:
        spec = replace(QWEN.spec, down=FORMATS["mxfp4"].encoding)
        verdict = Cuda().check(replace(QWEN, spec=spec), H200)
        assert isinstance(verdict, Rejected)
        assert [r.what for r in verdict.reasons] == ["weights"]


class TestConfigure:
    def test_by_rows_of_an_expert(self) -> None:
        tokens = (1, 256, 512, 1024, 2048, 4096)
        assert [Cuda().configure(QWEN, H200, t).block_m for t in tokens] == [32, 32, 64, 128, 256, 256]
        assert Cuda().tuning_configs(QWEN, H200, 512) == (EVERY[1], EVERY[0], *EVERY[2:])

    def test_results_never_depend_on_the_batch(self) -> None:
        assert Cuda().configure(replace(QWEN, batch_invariant=True), H200, 1) == CudaConfig("bf16", 32)

    def test_measured_with_other_kernels(self) -> None:
        with pytest.raises(PlanError, match="expected block_m of a bf16 kernel: 32, 64, 128, 256, got 48"):
            CudaConfig("bf16", 48)

    def test_predicts_what_one_h200_took(self) -> None:
        times = {1: 30.5, 16: 184.3, 64: 279.0, 256: 310.8, 512: 329.3, 1024: 393.7, 2048: 525.8, 4096: 1030.3}
        for tokens, time_us in times.items():
            assert abs(Cuda().predict(QWEN, H200, tokens).time_us / time_us - 1) < 0.05


@pytest.mark.gpu
class TestOnGpu:
    @pytest.fixture(autouse=True)
    def _sm90(self) -> None:
        need_sm90()

    @pytest.mark.parametrize("tokens", [1, 3, 40, 700])
    @pytest.mark.parametrize("config", EVERY, ids=str)
    def test_every_configuration(self, config: CudaConfig, tokens: int) -> None:
        weights = same_experts("bf16", hidden=336, intermediate=272, experts=7, bias=True)
        on_gpu(weights, *awkward_call(tokens, 336), config, activation=GPT_OSS)

    @pytest.mark.parametrize("gated", [True, False])
    @pytest.mark.parametrize("config", EVERY, ids=str)
    @pytest.mark.parametrize(
        ("hidden", "intermediate", "top_k"), [(2880, 720, 4), (1024, 2688, 22), (192, 336, 1), (16, 16, 1)]
    )
    def test_odd_sizes(self, config: CudaConfig, hidden: int, intermediate: int, top_k: int, gated: bool) -> None:
        weights = same_experts("bf16", hidden=hidden, intermediate=intermediate, gated=gated, bias=True)
        on_gpu(weights, *random_call(40, hidden, 5, top_k, torch.bfloat16), config)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_dtypes_of_x(self, dtype: torch.dtype) -> None:
        weights = same_experts("bf16", hidden=128, intermediate=128)
        for tokens in (9, 200):
            call = random_call(tokens, 128, 5, dtype=dtype)
            on_gpu(weights, *call, CudaConfig("bf16", 64), activation=GeGLU("tanh"))

    def test_weights_on_the_input(self) -> None:
        weights = same_experts("bf16", hidden=336, intermediate=272, experts=7, bias=True)
        on_gpu(weights, *random_call(200, 336, 7, 3, torch.bfloat16), CudaConfig("bf16", 64), weight_on="input")

    @pytest.mark.parametrize("config", EVERY, ids=str)
    def test_many_repeats_to_the_bit(self, config: CudaConfig) -> None:
        """A stage given back too early, a barrier too few: they show in some run of many."""
        weights = same_experts("bf16", hidden=1024, intermediate=512, experts=4)
        on_gpu(weights, *random_call(400, 1024, 4, dtype=torch.bfloat16), config, runs=1000)

    def test_a_token_does_not_see_its_batch(self) -> None:
        same_in_any_batch(same_experts("bf16", hidden=1024, intermediate=512, experts=4), 1024)

    def test_captured_layer_follows_new_routings(self) -> None:
        weights = same_experts("bf16", experts=16, hidden=256, intermediate=256)
        experts = FusedExperts.from_weights(
            weights, GPT_OSS, top_k=3, device="cuda", backend="cuda", activations="16bit"
        )
        for tokens in (3, 200):
            captured_follows_new_rows(experts, weights, tokens)
