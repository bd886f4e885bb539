"""The CUDA backend with 4-bit weights and x in 16 bits: its verdicts and configurations."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from polymoe.backends.cost import cost
from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.bench.cases import CASES
from polymoe.errors import PlanError
from polymoe.formats import FORMATS
from polymoe.layouts import LAYOUTS
from polymoe.machine import DEVICES, Machine
from polymoe.planning.measured import Measured, Table, problem_key
from polymoe.planning.select import select
from polymoe.problem import Problem
from polymoe.problem.activations import SwiGLU
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.tensors import ExpertsSpec
from polymoe.problem.verdict import Accepted, Reason, Rejected
from support.cuda_calls import gpu
from support.problems import problem_of, random_experts

H200, H100 = (Machine(DEVICES[name], driver=(13, 0)) for name in ("h200", "h100"))


def seed_problem(format: str = "mxfp4", **kwargs: Any) -> Problem:
    encoding = FORMATS[format].encoding
    spec = ExpertsSpec(hidden=4096, intermediate=2048, experts=256, gate=encoding, up=encoding, down=encoding)
    return Problem(spec=spec, activation=SwiGLU(limit=10.0), top_k=6, **kwargs)


class TestCheck:
    @pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int4_g32", "int4_g128"])
    def test_takes_4_bits_on_sm90(self, format: str) -> None:
        for machine in (H200, replace(H200, driver=None), Machine(DEVICES["h100"])):
            assert Cuda().check(seed_problem(format), machine) == Accepted(
                capturable=True, layouts=("w4a16_fragments",)
            )

    @pytest.mark.parametrize("device", ["b200", "b300", "rtx5090", "gb10"])
    def test_layout_where_instructions_convert_fp4(self, device: str) -> None:
        """INT4 has none, except in a layer with FP4 too."""
        machine = Machine(DEVICES[device], driver=(13, 0))
        mixed = seed_problem("mxfp4")
        mixed = replace(mixed, spec=replace(mixed.spec, down=FORMATS["int4_g32"].encoding))
        for problem, layout in (
            (seed_problem("mxfp4"), "w4a16_fragments_cvt"),
            (seed_problem("nvfp4"), "w4a16_fragments_cvt"),
            (seed_problem("int4_g32"), "w4a16_fragments"),
            (mixed, "w4a16_fragments_cvt"),
        ):
            assert Cuda().check(problem, machine) == Accepted(capturable=True, layouts=(layout,))
            assert select(problem, machine, backend="cuda", backends={"cuda": Cuda()}).require().layout == layout

    def test_mxfp8(self) -> None:
        """With 16-bit activations and E8M0 scales alone; auto takes it where its times are known."""
        problem = seed_problem("mxfp8")
        for device in ("h200", "b200", "rtx5090"):
            verdict = Cuda().check(problem, Machine(DEVICES[device], driver=(13, 0)))
            assert verdict == Accepted(capturable=True, layouts=("w8a16_fragments",))
        assert select(problem, H200).require().layout == "w8a16_fragments"
        float_scales = replace(problem.spec.up, scale_dtype="float32")
        spec = replace(problem.spec, gate=float_scales, up=float_scales, down=float_scales)
        for other, what in (
            (replace(problem, spec=spec), ["gate weights", "up weights", "down weights"]),
            (seed_problem("mxfp8", activations="mxfp8"), ["activations"]),
        ):
            verdict = Cuda().check(other, H200)
            assert isinstance(verdict, Rejected)
            assert [r.what for r in verdict.reasons] == what

    def test_a_layer_packed_for_another_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weights = random_experts("mxfp4")
        packed = LAYOUTS["w4a16_fragments_cvt"].pack(weights, torch.device("cpu"))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu(132))
        message = "layout of a layer for sm90's kernels: expected w4a16_fragments, got w4a16_fragments_cvt"
        with pytest.raises(PlanError, match=message):
            Cuda().bind(problem_of(weights), packed)

    def test_all_reasons_at_once(self) -> None:
        problem = seed_problem("fp16", activations="mxfp8")
        verdict = Cuda().check(problem, Machine(replace(DEVICES["a100"], capability=(7, 5)), driver=(12, 8)))
        assert isinstance(verdict, Rejected)
        assert [r.what for r in verdict.reasons] == [
            "GPU", "driver", "activations", "gate weights", "up weights", "down weights",
        ]  # fmt: skip
        assert str(verdict.reasons[1]) == "driver: expects CUDA 13.0 or newer, got 12.8"

    def test_scales_beyond_what_the_kernels_decode(self) -> None:
        for format, scales, reason in (
            ("mxfp4", ScaleRange(largest_exponent=26), "E8M0 scales of at most 2**25, got scales up to 2**26"),
            ("nvfp4", ScaleRange(negative=True), "E4M3 scales from 0 to 448, got scales negative"),
        ):
            problem = replace(seed_problem(format), scales=scales)
            verdict = select(problem, H200, backend="cuda", backends={"cuda": Cuda()}).candidates[0].verdict
            assert isinstance(verdict, Rejected)
            assert [str(r) for r in verdict.reasons] == [f"layout w4a16_fragments, scales: expects {reason}"]
        apart = replace(seed_problem(), scales=ScaleRange(spread=20))
        assert select(apart, H200).require().layout == "w4a16_fragments"

    def test_sizes_are_the_layouts_reasons(self) -> None:
        problem = problem_of(random_experts("mxfp4", hidden=64, intermediate=40))
        verdict = select(problem, H200, backend="cuda", backends={"cuda": Cuda()}).candidates[0].verdict
        assert isinstance(verdict, Rejected)
        assert [r.what for r in verdict.reasons] == ["layout w4a16_fragments, F"]


class TestConfigure:
    def test_by_rows_of_an_expert(self) -> None:
        found = [str(Cuda().configure(seed_problem(), H200, t)) for t in (1, 64, 128, 192, 512, 2048, 8192)]
        assert found == [
            *["w4a16_mma_ordered, block_m 8, block_n 64"] * 3,
            "w4a16_wgmma, block_m 32", "w4a16_wgmma, block_m 128, narrow_m 32",
            "w4a16_wgmma, block_m 128, narrow_m 64", "w4a16_wgmma, block_m 256, narrow_m 64",
        ]  # fmt: skip

    def test_k_is_divided_where_tiles_are_too_few(self) -> None:
        """Kimi K2 TP8: 8 experts with 8 tiles each are half a tile for each of 132 SMs, 31 experts nearly two."""
        kimi = CASES["kimi-k2-tp8"].problem()
        found = [Cuda().configure(kimi, H200, tokens).family for tokens in (1, 2, 4)]
        assert found == ["w4a16_mma", "w4a16_mma", "w4a16_mma_ordered"]
        invariant = replace(kimi, batch_invariant=True)
        assert Cuda().configure(invariant, H200, 1).family == "w4a16_mma_ordered"

    def test_k_is_divided_for_many_tiles_of_an_h100(self) -> None:
        """Where rows of x are long enough, and results may depend on the batch. Skewed rows go to wgmma sooner."""
        problem, invariant = seed_problem(), seed_problem(batch_invariant=True)
        found = [Cuda().configure(problem, H100, tokens).family for tokens in (4, 8, 64, 96)]
        assert found == ["w4a16_mma_ordered", "w4a16_mma", "w4a16_mma", "w4a16_wgmma"]
        assert Cuda().configure(problem, H200, 96).family == "w4a16_mma_ordered"
        assert Cuda().configure(invariant, H100, 64).family == "w4a16_mma_ordered"
        short = replace(problem, spec=replace(problem.spec, hidden=1024))
        assert Cuda().configure(short, H100, 64).family == "w4a16_mma_ordered"

    def test_one_list_of_tiles_where_an_sm_has_few_on_an_h100(self) -> None:
        """48 experts of 832 rows have 1.5 tiles of 512 rows of weights for each SM, 256 have 8."""
        problem = seed_problem()
        spec = replace(problem.spec, intermediate=832, experts=48, local_experts=48)
        few = replace(problem, spec=spec, top_k=3)
        many = replace(few, spec=replace(spec, experts=256, local_experts=256))
        found = [Cuda().configure(few, H100, tokens) for tokens in (256, 400)]
        assert found == [CudaConfig("w4a16_wgmma", 64), CudaConfig("w4a16_wgmma", 128, narrow_m=64)]
        narrow = CudaConfig("w4a16_wgmma", 128, narrow_m=32)
        assert [Cuda().configure(many, H100, 1400), Cuda().configure(few, H200, 256)] == [narrow, narrow]

    def test_tiles_of_256_rows_only_for_main_loops_that_are_long_enough(self) -> None:
        """On an H100 from 115 rows on."""
        wide, narrow = CudaConfig("w4a16_wgmma", 256, narrow_m=64), CudaConfig("w4a16_wgmma", 128, narrow_m=64)
        assert [Cuda().configure(seed_problem(), gpu, 5400) for gpu in (H100, H200)] == [wide, narrow]
        assert Cuda().configure(CASES["kimi-k2-tp8"].problem(), H200, 8192) == narrow

    def test_down_in_shorter_tiles_where_the_last_wave_of_tall_ones_is_half_empty(self) -> None:
        """32 experts of 2880 rows: 192 tiles of 512 for 132 SMs, or 384 of 256."""
        problem = seed_problem()
        spec = replace(problem.spec, hidden=2880, intermediate=2880, experts=32, local_experts=32)
        gpt_oss = replace(problem, spec=spec, top_k=4)
        lower = CudaConfig("w4a16_wgmma", 32, 0, 64)
        assert [Cuda().configure(gpt_oss, H200, t) for t in (64, 128)] == [lower, lower]
        assert str(lower) == "w4a16_wgmma, block_m 32, down_block_m 64"
        assert CudaConfig.from_dict(lower.to_dict()) == lower
        larger = replace(gpt_oss, spec=replace(spec, experts=128, local_experts=128))
        assert Cuda().configure(larger, H200, 256) == CudaConfig("w4a16_wgmma", 128, narrow_m=32)
        assert lower in Cuda().tuning_configs(larger, H200, 256)

    def test_x_too_wide_for_shared_memory_goes_in_fewer_rows_or_in_stages(self) -> None:
        problem = seed_problem()
        kimi, wide = (replace(problem, spec=replace(problem.spec, hidden=h)) for h in (7168, 16384))
        assert Cuda().configure(kimi, H200, 128) == CudaConfig("w4a16_mma_ordered", 8, 64)
        assert {c.block_m for c in Cuda().tuning_configs(kimi, H200, 256) if c.family == "w4a16_mma"} == {8}
        assert Cuda().configure(wide, H200, 1).family == "w4a16_mma_ordered"
        assert {c.family for c in Cuda().tuning_configs(wide, H200, 1)} == {"w4a16_mma_ordered", "w4a16_wgmma"}

    def test_kernels_with_one_order_of_sums_where_a_batch_must_not_show(self) -> None:
        problem, ordered = seed_problem(batch_invariant=True), {"w4a16_mma_ordered", "w4a16_wgmma"}
        for tokens in (1, 64, 256, 512, 8192):
            assert {c.family for c in Cuda().tuning_configs(problem, H200, tokens)} == ordered
        plan = select(problem, H200).require()
        assert plan.layout == "w4a16_fragments"
        assert {step.config.family for step in plan.steps} == ordered  # type: ignore[attr-defined]
        assert plan.steps[0].config == CudaConfig("w4a16_mma_ordered", 8, 64)

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            (("decode", 8, 64), "CudaConfig.family: got 'decode'"),
            (("w4a16_mma", 24, 64), "block_m: expected block_m of a w4a16_mma kernel: 8, got 24"),
            (("w4a16_mma", 8, 0), "block_n: expected block_n of a w4a16_mma kernel: 64, got 0"),
            (("w4a16_wgmma", 48, 0), "block_m: expected block_m of a w4a16_wgmma kernel: 32, 64, 128, 256, got 48"),
            (("w4a16_wgmma", 32, 64), "block_n: expected block_n of a w4a16_wgmma kernel: 0, got 64"),
        ],
    )
    def test_sizes_without_a_kernel(self, sizes: tuple[str, int, int], message: str) -> None:
        with pytest.raises(PlanError, match=re.escape(message)):
            CudaConfig(*sizes)
        with pytest.raises(PlanError, match=re.escape(message)):
            CudaConfig.from_dict(dict(zip(("family", "block_m", "block_n"), sizes, strict=True)))

    def test_configurations_of_older_tables(self) -> None:
        with pytest.raises(PlanError, match="kernels: expected a field of CudaConfig"):
            CudaConfig.from_dict({"kernels": "decode", "rows": 8, "height": 64, "down_rows": 0})

    @pytest.mark.parametrize("down", [32, 48])
    def test_down_with_another_block_m(self, down: int) -> None:
        expected = rf"expected 0 or a larger block_m of a w4a16_wgmma kernel: 0, 64, 128, 256, got {down}"
        with pytest.raises(PlanError, match=expected):
            CudaConfig("w4a16_wgmma", 32, 0, down)
        with pytest.raises(PlanError, match="expected 0 or a larger block_m of a w4a16_mma kernel: 0, got 32"):
            CudaConfig("w4a16_mma", 8, 64, 32)

    @pytest.mark.parametrize(
        ("sizes", "expected"),
        [
            (("w4a16_wgmma", 128, 0, 0, 48), "beside block_m 128: 0, 32, 64, got 48"),
            (("w4a16_wgmma", 64, 0, 128, 32), "beside block_m 64: 0, got 32"),
            (("bf16", 128, 0, 0, 32), "beside block_m 128: 0, got 32"),
        ],
    )
    def test_narrow_work_tiles_without_kernels(self, sizes: tuple[Any, ...], expected: str) -> None:
        with pytest.raises(PlanError, match=f"CudaConfig.narrow_m: expected narrow_m {expected}"):
            CudaConfig(*sizes)

    def test_every_configuration_is_read_back_from_json(self) -> None:
        for case in CASES.values():
            problem = case.problem()
            for tokens in (1, 1024) if isinstance(Cuda().check(problem, H200), Accepted) else ():
                for config in Cuda().tuning_configs(problem, H200, tokens):
                    assert CudaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config

    def test_predicts_what_one_h200_took(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Microseconds of DeepSeek-V4-Flash in MXFP4: the first times of these kernels behind this backend. Routings
        were uniform."""
        monkeypatch.setattr(cost, "__defaults__", ((0.0,),))
        measured = {1: 29.6, 4: 86.0, 16: 268.0, 64: 733.0, 128: 955.7, 256: 1018.4, 512: 1051.6, 4096: 2389.8}
        for tokens, time_us in measured.items():
            off = Cuda().predict(seed_problem(), H200, tokens).time_us / time_us - 1
            assert abs(off) < (0.06 if tokens <= 128 else 0.15)


class TestAuto:
    """What ``auto`` makes of it without a GPU and without a table."""

    @pytest.mark.parametrize("role", ["mixed", "decode", "prefill"])
    @pytest.mark.parametrize("name", CASES)
    def test_one_layout_for_every_number_of_tokens(self, name: str, role: str) -> None:
        problem = CASES[name].problem()
        machine = replace(H200, packages={"triton": "3.6.0"})
        plan = select(problem, machine, role=role, table=Table()).require()
        verdict = Cuda().check(problem, machine)
        if isinstance(verdict, Accepted):
            assert ((plan.layout,), {step.backend for step in plan.steps}) == (verdict.layouts, {"cuda"})
        else:
            assert (plan.layout, {step.backend for step in plan.steps}) == ("natural", {"triton"})

    @pytest.mark.parametrize("device", ["a100", "rtx3090", "rtx4090", "l40s"])
    @pytest.mark.parametrize(
        ("format", "expected"), [("mxfp4", "SM90, SM100, SM103, SM120 or SM121"), ("bf16", "SM90")]
    )
    def test_on_ampere_and_ada(self, device: str, format: str, expected: str) -> None:
        """Only the kernels of experts in host memory are compiled for these GPUs."""
        machine = Machine(DEVICES[device], {"triton": "3.6.0"}, (13, 0))
        selection = select(seed_problem(format), machine, table=Table())
        assert {step.backend for step in selection.require().steps} == {"triton"}
        assert next(c for c in selection.candidates if c.backend == "cuda").verdict == Rejected(
            (Reason("GPU", expected, machine.device.arch),)
        )

    @pytest.mark.parametrize("device", ["b200", "rtx5090", "rtxpro6000", "gb10"])
    @pytest.mark.parametrize("name", ["deepseek-v4-flash", "nemotron-3-super", "kimi-k2-tp8", "gpt-oss-120b"])
    def test_on_blackwell(self, device: str, name: str) -> None:
        """Nothing ran there, so predicted time decides: these kernels, and on SM100 Triton for many rows, since
        it has the MMAs of tcgen05."""
        machine = Machine(DEVICES[device], {"triton": "3.6.0"}, (13, 0))
        problem = CASES[name].problem()
        backends = {}
        for role in ("decode", "prefill", "mixed"):
            selection = select(problem, machine, role=role, table=Table())
            backends[role] = {step.backend for step in selection.require().steps}
            assert set(selection.proofs) == {"unrun"}
        assert backends["decode"] == {"cuda"}
        assert backends["prefill"] == {"cuda" if machine.device.sm >= 120 else "triton"}

    def test_on_blackwell_only_the_kernels_that_are_compiled(self) -> None:
        machine = Machine(DEVICES["rtx5090"], {"triton": "3.6.0"}, (13, 0))
        for problem in (seed_problem("bf16"), seed_problem(activations="fp8_group128")):
            assert Cuda().check(problem, machine) == Rejected((Reason("GPU", "SM90", "sm_120"),))
        for problem, families in (
            (seed_problem(), {"w4a16_mma", "w4a16_mma_tiled"}),
            (seed_problem(batch_invariant=True), {"w4a16_mma_tiled"}),
            (seed_problem("mxfp8"), {"w8a16_mma", "w8a16_mma_tiled"}),
            (seed_problem("mxfp8", batch_invariant=True), {"w8a16_mma_tiled"}),
        ):
            assert {c.family for c in Cuda().tuning_configs(problem, machine, 64)} == families  # type: ignore[attr-defined]
        for format, family in (("mxfp4", "w4a16_mma"), ("mxfp8", "w8a16_mma")):
            configs = [Cuda().configure(seed_problem(format), machine, tokens) for tokens in (1, 128, 256, 8192)]
            assert [c.family for c in configs] == [family] * 2 + [f"{family}_tiled"] * 2

    def test_measured_rows_are_used(self) -> None:
        row = Measured(
            device="h200", backend="cuda", problem=problem_key(seed_problem()), tokens=64,
            config=CudaConfig("w4a16_wgmma", 64).to_dict(), median_us=700.0, torch="2.11.0", triton="3.6.0",
            driver="13.0", polymoe="0.1.0", date="2026-01-01T00:00:00Z", command="polymoe tune",
        )  # fmt: skip
        old = replace(row, tokens=512, config={"kernels": "prefill", "rows": 32, "height": 0, "down_rows": 0})
        machine = replace(H200, packages={"triton": "3.6.0"})
        with pytest.warns(UserWarning, match="it was tuned with polymoe 0.1.0; run again: polymoe tune"):
            plan = select(seed_problem(), machine, table=Table(((row, old),))).require()
        assert plan.step(64).config == CudaConfig("w4a16_wgmma", 64)
        assert plan.step(512).config == CudaConfig("w4a16_wgmma", 128, narrow_m=32)
