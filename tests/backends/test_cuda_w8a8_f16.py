"""The CUDA backend with E4M3 weights and x in E4M3: its verdicts and configurations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.bench.cases import CASES
from polymoe.errors import PlanError
from polymoe.formats import FORMATS, PerGroup
from polymoe.kernels.cuda import spec
from polymoe.machine import DEVICES, Machine
from polymoe.planning.measured import Table
from polymoe.planning.select import select
from polymoe.problem.activations import ReLU2
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.verdict import Accepted, Rejected

W8A8_F16 = tuple(spec.W8A8_F16.tiles)
H200 = Machine(DEVICES["h200"], packages={"triton": "3.6.0"}, driver=(13, 0))
EVERY = [CudaConfig("w8a8_f16", rows) for rows in W8A8_F16]
DEEPSEEK = CASES["deepseek-v3-tp8"].problem()


class TestCheck:
    def test_takes_it_on_sm90(self) -> None:
        assert Cuda().check(DEEPSEEK, H200) == Accepted(capturable=True, layouts=("w8_swizzle128",))
        plan = select(DEEPSEEK, H200, backend="cuda", table=Table()).require()
        assert {step.backend for step in plan.steps} == {"cuda"}

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"activations": "16bit"}, "activations: expects fp8_group128, got 16bit"),
            ({"weight_on": "input"}, "routing weight on the input with FP8 activations: not supported"),
        ],
    )
    def test_what_it_is_not_taken_with(self, change: dict[str, Any], reason: str) -> None:
        verdict = Cuda().check(replace(DEEPSEEK, **change), H200)
        assert isinstance(verdict, Rejected)
        assert [str(r) for r in verdict.reasons] == [reason]

    def test_no_gate_other_scales_and_other_weights_beside_it(self) -> None:
        encoding = FORMATS["fp8_block128"].encoding
        for change, what in (
            ({"gate": None}, ["FP8 activations without a gate"]),
            ({"down": replace(encoding, granularity=PerGroup(64, 64))}, ["down weights"]),
            ({"down": FORMATS["mxfp4"].encoding}, ["weights"]),
        ):
            spec = replace(DEEPSEEK.spec, **change)  # type: ignore[arg-type]
            activation = DEEPSEEK.activation if spec.gated else ReLU2()
            verdict = Cuda().check(replace(DEEPSEEK, spec=spec, activation=activation), H200)
            assert isinstance(verdict, Rejected)
            assert [r.what for r in verdict.reasons] == what

    def test_scales_of_other_dtypes(self) -> None:
        for dtype in ("bfloat16", "e8m0"):
            encoding = replace(FORMATS["fp8_block128"].encoding, scale_dtype=dtype)
            spec = replace(DEEPSEEK.spec, gate=encoding, up=encoding, down=encoding)
            for scales in (None, ScaleRange(largest_exponent=60)):  # as float32, E8M0 scales of any size are
                problem = replace(DEEPSEEK, spec=spec, scales=scales)
                assert Cuda().check(problem, H200) == Accepted(capturable=True, layouts=("w8_swizzle128",))

    def test_sizes_are_the_layouts_reasons(self) -> None:
        problem = replace(DEEPSEEK, spec=replace(DEEPSEEK.spec, intermediate=192))
        verdict = select(problem, H200, backend="cuda", backends={"cuda": Cuda()}).candidates[0].verdict
        assert isinstance(verdict, Rejected)
        assert [str(r) for r in verdict.reasons] == ["layout w8_swizzle128, F: expects a multiple of 128, got 192"]


class TestConfigure:
    def test_by_rows_of_an_expert(self) -> None:
        few, ordered, many = CudaConfig("w8a8_mma", 8), CudaConfig("w8a8_mma_ordered", 8), CudaConfig("w8a8", 160)
        expected = [(1, few), (4, few), (8, EVERY[0]), (256, EVERY[0]), (352, EVERY[0]), (512, many)]
        assert [(t, Cuda().configure(DEEPSEEK, H200, t)) for t, _ in expected] == expected
        assert Cuda().tuning_configs(DEEPSEEK, H200, 256) == (EVERY[0], few, ordered, *EVERY[1:])

    @pytest.mark.parametrize("few", ["w8a8_mma", "w8a8_mma_ordered"])
    def test_by_tiles_for_each_sm(self, few: str) -> None:
        """With 1,536 rows of gate and up, 2 tokens of 8 experts each have 94 tiles of 256 rows."""
        case = replace(CASES["deepseek-v3-tp8"], hidden=2048, intermediate=768, experts=128, tp=1)
        problem = replace(case.problem(), batch_invariant=few == "w8a8_mma_ordered")
        found = [Cuda().configure(problem, H200, tokens).family for tokens in (1, 2, 4)]
        assert found == [few, "w8a8_f16", "w8a8_f16"]

    def test_results_never_depend_on_the_batch(self) -> None:
        problem, tokens = replace(DEEPSEEK, batch_invariant=True), (1, 256, 512, 800, 1024, 2048, 4096)
        assert [Cuda().configure(problem, H200, t).block_m for t in tokens] == [8, 32, 32, 64, 64, 96, 96]

    def test_measured_with_other_kernels(self) -> None:
        with pytest.raises(PlanError, match="expected block_m of a w8a8_f16 kernel: 32, 64, 96, got 48"):
            CudaConfig("w8a8_f16", 48)
