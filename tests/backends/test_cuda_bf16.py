"""The CUDA backend with bfloat16 weights, which are not decoded: its verdicts and configurations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polymoe.backends.cost import cost
from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.bench.cases import CASES
from polymoe.errors import PlanError
from polymoe.formats import FORMATS
from polymoe.kernels.cuda.spec import BF16
from polymoe.machine import DEVICES, Machine
from polymoe.planning.measured import Table
from polymoe.planning.select import select
from polymoe.problem.verdict import Accepted, Rejected

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
        tokens = (1, 128, 256, 512, 1024, 2048, 4096, 8192)
        assert [Cuda().configure(QWEN, H200, t).block_m for t in tokens] == [32, 32, 64, 64, 128, 160, 160, 160]
        assert Cuda().tuning_configs(QWEN, H200, 512) == (EVERY[1], EVERY[0], *EVERY[2:])

    def test_results_never_depend_on_the_batch(self) -> None:
        assert Cuda().configure(replace(QWEN, batch_invariant=True), H200, 1) == CudaConfig("bf16", 32)

    def test_measured_with_other_kernels(self) -> None:
        with pytest.raises(PlanError, match="expected block_m of a bf16 kernel: 32, 64, 128, 160, got 48"):
            CudaConfig("bf16", 48)

    def test_predicts_what_one_h200_took(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cost, "__defaults__", ((0.0,),))  # routings were uniform
        times = {1: 28.2, 64: 272.9, 256: 291.1, 512: 304.3, 1024: 335.3, 2048: 413.7, 4096: 661.8, 8192: 1349.9}
        for tokens, time_us in times.items():
            assert abs(Cuda().predict(QWEN, H200, tokens).time_us / time_us - 1) < 0.05
