"""The CUDA backend with E4M3 weights and many rows of x in E4M3: its configurations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.bench.cases import CASES
from polymoe.errors import PlanError
from polymoe.kernels.cuda import spec
from polymoe.machine import DEVICES, Machine

W8A8_F16 = tuple(spec.W8A8_F16.tiles)
H200 = Machine(DEVICES["h200"], packages={"triton": "3.6.0"}, driver=(13, 0))
H100 = Machine(DEVICES["h100"], packages={"triton": "3.6.0"}, driver=(13, 0))
COARSE = (spec.W8A8_SHARED_N128, spec.W8A8, spec.W8A8_SHARED)
EVERY = [CudaConfig(family.name, rows) for family in COARSE for rows in family.tiles]
DEEPSEEK = CASES["deepseek-v3-tp8"].problem()


class TestConfigure:
    def test_experts_of_many_rows(self) -> None:
        found = [str(Cuda().configure(DEEPSEEK, H200, tokens)) for tokens in (4, 8, 256, 512, 8192)]
        assert found == [
            "w8a8_mma, block_m 8",
            "w8a8_f16, block_m 32",
            "w8a8_f16, block_m 32",
            "w8a8, block_m 160",
            "w8a8, block_m 160",
        ]

    def test_experts_of_more_rows_where_that_was_measured(self) -> None:
        """On an H100, above 60 rows an expert, or 190 where down has few columns."""
        found = [str(Cuda().configure(DEEPSEEK, H100, tokens)) for tokens in (512, 4096, 8192, 16384)]
        assert found == ["w8a8, block_m 160"] * 2 + ["w8a8_shared, block_m 128"] * 2
        assert Cuda().configure(DEEPSEEK, H200, 16384) == CudaConfig("w8a8", 160)
        wide = replace(DEEPSEEK, spec=replace(DEEPSEEK.spec, intermediate=512))
        assert [Cuda().configure(wide, H100, tokens).family for tokens in (1900, 2000)] == ["w8a8", "w8a8_shared"]

    @pytest.mark.parametrize(
        ("case", "expected"),
        {
            "deepseek-v3-ep320": {
                8: "w8a8_mma, block_m 8", 16: "w8a8_shared_n128, block_m 64", 128: "w8a8_shared_n128, block_m 64",
                256: "w8a8_shared, block_m 64", 512: "w8a8_shared, block_m 64", 1024: "w8a8_shared, block_m 128",
            },
            "deepseek-v3-ep72": {
                16: "w8a8_mma, block_m 8", 64: "w8a8_f16, block_m 32", 256: "w8a8_shared, block_m 64",
                512: "w8a8_shared, block_m 128", 4096: "w8a8_shared, block_m 128",
            },
            "deepseek-v3-ep32": {
                4: "w8a8_mma, block_m 8", 32: "w8a8_f16, block_m 32", 512: "w8a8_shared, block_m 64",
                1024: "w8a8_shared, block_m 64", 2048: "w8a8_shared, block_m 128",
            },
            "deepseek-v3-ep8": {1024: "w8a8, block_m 160", 2048: "w8a8_shared, block_m 128"},
        }.items(),
    )  # fmt: skip
    def test_few_experts(self, case: str, expected: dict[int, str]) -> None:
        """On an H100: where 256 rows of weights give fewer tiles than there are SMs, or a second wave of a few."""
        problem = CASES[case].problem()
        assert {tokens: str(Cuda().configure(problem, H100, tokens)) for tokens in expected} == expected
        others = {Cuda().configure(problem, H200, tokens).family for tokens in expected}
        assert others <= {"w8a8_mma", "w8a8_f16", "w8a8"}

    def test_tuning_tries_them_where_the_error_of_a_call_is_no_accident(self) -> None:
        few = {CudaConfig("w8a8_mma", 8), CudaConfig("w8a8_mma_ordered", 8)}
        converted = {*few, *(CudaConfig("w8a8_f16", rows) for rows in W8A8_F16)}
        assert set(Cuda().tuning_configs(DEEPSEEK, H200, 256)) == converted
        assert set(Cuda().tuning_configs(DEEPSEEK, H200, 1024)) == {*converted, *EVERY}

    def test_results_never_depend_on_the_batch(self) -> None:
        """Sums of other kernels are other ones."""
        problem = replace(DEEPSEEK, batch_invariant=True)
        ordered = {CudaConfig("w8a8_mma_ordered", 8), *(CudaConfig("w8a8_f16", rows) for rows in W8A8_F16)}
        for tokens in (1, 1024, 8192):
            assert set(Cuda().tuning_configs(problem, H200, tokens)) == ordered
        assert Cuda().configure(problem, H200, 8192) == CudaConfig("w8a8_f16", W8A8_F16[-1])

    def test_checked_at_load_with_many_tokens(self) -> None:
        assert {config.check_tokens for config in EVERY} == {512}
        assert CudaConfig("w8a8_f16", 32).check_tokens == 8

    def test_measured_with_other_kernels(self) -> None:
        with pytest.raises(PlanError, match="expected block_m of a w8a8 kernel: 160, got 96"):
            CudaConfig("w8a8", 96)
