"""The CUDA backend with 4-bit weights and x in E4M3: its verdicts and configurations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import polymoe
from polymoe.backends.base import inputs_of
from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.bench.cases import CASES
from polymoe.checkpoint import Checkpoint
from polymoe.errors import PlanError
from polymoe.formats import FORMATS
from polymoe.kernels.cuda.spec import W4A8
from polymoe.machine import DEVICES, Machine
from polymoe.planning.measured import Table
from polymoe.planning.select import resolve_activations, select
from polymoe.problem.activations import ReLU2
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.verdict import Accepted, Reason, Rejected

H200 = Machine(DEVICES["h200"], packages={"triton": "3.6.0"}, driver=(13, 0))
EVERY = [CudaConfig("w4a8", rows) for rows in W4A8.tiles]
SEED = CASES["deepseek-v4-flash"].problem(activations="fp8_group128")
MODELS = Path(__file__).parents[2] / "models"


class TestCheck:
    def test_takes_mxfp4_on_sm90(self) -> None:
        for problem in (SEED, replace(SEED, batch_invariant=True), replace(SEED, dtype="fp32")):
            assert Cuda().check(problem, H200) == Accepted(capturable=True, layouts=("w4a8_fragments",))
        halves = replace(SEED, spec=replace(SEED.spec, hidden=4096 + 64, intermediate=2048 + 64))
        assert select(halves, H200, backend="cuda", table=Table()).require().layout == "w4a8_fragments"

    @pytest.mark.parametrize("format", ["nvfp4", "int4_g32", "int4_g128", "bf16"])
    def test_other_formats_have_rows_of_16_bits(self, format: str) -> None:
        for projections in (("gate", "up", "down"), ("down",)):
            spec = replace(SEED.spec, **dict.fromkeys(projections, FORMATS[format].encoding))  # type: ignore[arg-type]
            verdict = Cuda().check(replace(SEED, spec=spec), H200)
            assert isinstance(verdict, Rejected)
            modes = "16bit or fp8_token or fp8_static" if format == "int4_g128" else "16bit"
            assert str(verdict.reasons[0]) == f"activations: expects {modes}, got fp8_group128"

    def test_one_scale_a_row(self) -> None:
        """On kernels and with tiles of their own."""
        for mode in ("fp8_token", "fp8_static"):
            problem = replace(SEED, activations=mode)
            assert Cuda().check(problem, H200) == Accepted(capturable=True, layouts=("w4a8_fragments",))
            found = [Cuda().configure(problem, H200, tokens) for tokens in (1, 512, 8192)]
            assert {config.family for config in found} == {"w4a8_rows"}
            assert [(config.block_m, config.narrow_m) for config in found] == [(32, 0), (128, 32), (128, 64)]
            plan = select(problem, H200, table=Table()).require()
            assert plan.layout == "w4a8_fragments"
            assert {step.backend for step in plan.steps} == {"cuda"}
        rounded = replace(SEED, activations="fp8_group128_ue8m0")
        expected = "16bit or fp8_group128 or fp8_token or fp8_static"
        expected += " or fp8_token_fast_accumulation or fp8_static_fast_accumulation"
        reason = Reason("activations", expected, "fp8_group128_ue8m0")
        assert Cuda().check(rounded, H200) == Rejected((reason,))

    @pytest.mark.parametrize("mode", ["fp8_token", "fp8_static"])
    def test_fast_accumulation(self, mode: str) -> None:
        """Only for many rows; the same tiles as without it for few, checked as these are."""
        problem = replace(SEED, activations=f"{mode}_fast_accumulation")
        verdict = Cuda().check(problem, H200)
        assert isinstance(verdict, Accepted)
        assert verdict.notes == ("errors of up to 0.013 where fast accumulation runs, else 0.006",)
        few, many = (1, 256, 512, 1024, 2048), (4096, 16384)
        exact = replace(SEED, activations=mode)
        assert [Cuda().configure(problem, H200, t) for t in few] == [Cuda().configure(exact, H200, t) for t in few]
        assert {Cuda().configure(problem, H200, t) for t in many} == {CudaConfig("w4a8_rows_fast", 112)}
        assert {inputs_of(problem, Cuda().configure(problem, H200, t)) for t in few} == {exact.activations}
        assert {inputs_of(problem, Cuda().configure(problem, H200, t)) for t in many} == {problem.activations}
        assert {config.kernel_family for config in Cuda().tuning_configs(exact, H200, 4096)} == {"w4a8_rows"}
        times = [Cuda().predict(p, H200, 8192).time_us for p in (problem, exact)]
        assert 0.85 < times[0] / times[1] < 0.95
        selection = select(problem, H200, table=Table())
        assert {step.backend for step in selection.require().steps} == {"cuda"}
        assert "2049+ tokens: cuda (w4a8_rows_fast, block_m 112)" in str(selection)

    def test_what_fast_accumulation_refuses(self) -> None:
        problem = replace(SEED, activations="fp8_token_fast_accumulation")
        wide = replace(problem, spec=replace(SEED.spec, hidden=7168))
        in_any_batch = (
            "activations of batch-invariant results: expects fp8_token, with the same sums at every number of"
        )
        for changed, reason in (
            (replace(problem, batch_invariant=True), f"{in_any_batch} tokens, got fp8_token_fast_accumulation"),
            (wide, "fast accumulation: expects at most 4096 columns, or fp8_token, got 7168"),
        ):
            verdict = Cuda().check(changed, H200)
            assert isinstance(verdict, Rejected)
            assert [str(found) for found in verdict.reasons] == [reason]
        e = FORMATS["int4_g128"].encoding
        verdict = Cuda().check(replace(problem, spec=replace(SEED.spec, gate=e, up=e, down=e)), H200)
        assert isinstance(verdict, Rejected)
        expected = "activations: expects 16bit or fp8_token or fp8_static, got fp8_token_fast_accumulation"
        assert [str(found) for found in verdict.reasons] == [expected]
        others = [c for c in select(problem, H200, table=Table()).candidates if c.backend != "cuda"]
        assert len(others) > 2
        for candidate in others:
            assert isinstance(candidate.verdict, Rejected)
            assert any("fp8_token_fast_accumulation" in str(found) for found in candidate.verdict.reasons)

    @pytest.mark.parametrize("zero_points", [False, True])
    @pytest.mark.parametrize("scales", ["bfloat16", "float16"])
    def test_int4_by_128_with_one_scale_a_row(self, scales: str, zero_points: bool) -> None:
        e = replace(FORMATS["int4_g128"].encoding, scale_dtype=scales, zero_points=zero_points)
        spec = replace(SEED.spec, gate=e, up=e, down=e)
        for mode in ("fp8_token", "fp8_static"):
            problem = replace(SEED, spec=spec, activations=mode)
            assert Cuda().check(problem, H200) == Accepted(capturable=True, layouts=("w4a8_fragments",))
            plan = select(problem, H200, backend="cuda", table=Table()).require()
            assert (plan.layout, {step.config.kernel_family for step in plan.steps}) == (
                "w4a8_fragments",
                {"w4a8_rows"},
            )
        smaller = replace(spec, **dict.fromkeys(("gate", "up", "down"), FORMATS["int4_g32"].encoding))  # type: ignore[arg-type]
        verdict = Cuda().check(replace(SEED, spec=smaller, activations="fp8_token"), H200)
        assert isinstance(verdict, Rejected)
        assert [str(reason) for reason in verdict.reasons] == ["activations: expects 16bit, got fp8_token"]

    @pytest.mark.parametrize("mode", ["fp8_group128", "fp8_token"])
    def test_every_reason(self, mode: str) -> None:
        spec = replace(SEED.spec, gate=None)
        problem = replace(SEED, spec=spec, activation=ReLU2(), weight_on="input", activations=mode)
        verdict = select(problem, H200, backends={"cuda": Cuda()}).candidates[0].verdict
        assert isinstance(verdict, Rejected)
        assert [str(reason) for reason in verdict.reasons] == [
            "FP8 activations without a gate: not supported",
            "routing weight on the input with FP8 activations: not supported",
        ]
        apart = replace(SEED, scales=ScaleRange(spread=15))
        verdict = select(apart, H200, backends={"cuda": Cuda()}).candidates[0].verdict
        assert isinstance(verdict, Rejected)
        assert [str(reason) for reason in verdict.reasons] == [
            "layout w4a8_fragments, scales: expects scales of a row within 2**14 of each other, got scales 2**15 apart"
        ]

    def test_sizes_are_the_layouts_reasons(self) -> None:
        spec = replace(SEED.spec, hidden=4096 + 32, intermediate=2048 + 16)
        selection = select(replace(SEED, spec=spec), H200, backend="cuda", table=Table())
        verdict = next(c.verdict for c in selection.candidates if c.backend == "cuda")
        assert isinstance(verdict, Rejected)
        assert [str(reason) for reason in verdict.reasons] == [
            "layout w4a8_fragments, H: expects a multiple of 64, got 4128",
            "layout w4a8_fragments, F: expects a multiple of 64, got 2064",
        ]


class TestConfigure:
    def test_by_rows_of_an_expert(self) -> None:
        found = [Cuda().configure(SEED, H200, tokens) for tokens in (1, 256, 512, 1024, 2048, 4096, 8192)]
        shapes = [(config.block_m, config.narrow_m) for config in found]
        assert shapes == [(16, 0), (32, 0), (128, 32), (128, 32), (128, 64), (128, 64), (128, 64)]
        assert {config.family for config in found} == {"w4a8"}
        first, *rest = Cuda().tuning_configs(SEED, H200, 512)
        assert first == found[2]
        assert rest == [*EVERY, found[4]]
        assert Cuda().tuning_configs(SEED, H200, 512, [(EVERY[1], 1.0)]) == ()

    def test_the_same_where_a_batch_must_not_show(self) -> None:
        problem = replace(SEED, batch_invariant=True)
        for tokens in (1, 512, 1024, 8192):
            assert Cuda().tuning_configs(problem, H200, tokens) == Cuda().tuning_configs(SEED, H200, tokens)

    def test_measured_with_other_kernels(self) -> None:
        with pytest.raises(PlanError, match="expected block_m of a w4a8 kernel: 16, 32, 64, 128, got 8"):
            CudaConfig("w4a8", 8)


class TestAuto:
    """Rows are rounded where a checkpoint's own recipe says so, and only there."""

    @pytest.mark.parametrize("role", ["mixed", "decode", "prefill"])
    def test_deepseek_v4(self, role: str) -> None:
        plan = select(SEED, H200, role=role, table=Table()).require()
        assert (plan.layout, {str(step.config)[:4] for step in plan.steps}) == ("w4a8_fragments", {"w4a8"})

    def test_the_recipe_of_a_checkpoint(self, tmp_path: Path) -> None:
        config = json.loads((MODELS / "sums-deepseek-v4-mxfp4" / "config.json").read_text())
        config |= {"hidden_size": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 256}
        (tmp_path / "config.json").write_text(json.dumps(config))
        checkpoint = Checkpoint.open(tmp_path, config_only=True)
        assert [str(resolve_activations(checkpoint, 0, Machine.of(d), "auto")) for d in ("h200", "cpu")] == [
            "fp8_group128",
            "16bit",
        ]
        for mode, kinds in (
            ("auto", {"w4a8"}),
            ("fp8_group128", {"w4a8"}),
            ("16bit", {"w4a16_mma", "w4a16_mma_ordered", "w4a16_wgmma"}),
        ):
            row = polymoe.explain(tmp_path, device="h200", activations=mode).rows[0]
            steps = row.selection.require().steps
            assert {step.config.family for step in steps if isinstance(step.config, CudaConfig)} == kinds
            assert {step.backend for step in steps} == {"cuda"}

    def test_gpt_oss_keeps_rows_of_16_bits_unless_asked(self) -> None:
        path = MODELS / "sums-gpt-oss-mxfp4"
        for mode, got in (("auto", "16bit"), ("fp8_group128", "fp8_group128")):
            row = polymoe.explain(path, device="h200", activations=mode, backend="cuda").rows[0]
            assert str(row.problem.activations) == got
            assert ("w4a8" in str(row.selection)) == (mode != "auto")
