"""The CUDA backend with 4-bit weights and rows in E4M3: verdicts anywhere, results on an SM90 GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polymoe
from polymoe.activations import GeGLU, ReLU2, SwiGLU
from polymoe.backends.cuda.backend import Cuda, CudaConfig
from polymoe.backends.reference import run_experts
from polymoe.bench.cases import CASES
from polymoe.checkpoint import Checkpoint
from polymoe.errors import PlanError
from polymoe.experts import FusedExperts, resolve_activations
from polymoe.formats import FORMATS
from polymoe.kernels.cuda.sizes import W4A8
from polymoe.machine import DEVICES, Machine
from polymoe.numerics import relative_error
from polymoe.planning.measured import Table
from polymoe.planning.select import select
from polymoe.routing import Routing
from polymoe.scale_range import ScaleRange
from polymoe.verdict import Accepted, Reason, Rejected
from support.captured import captured_follows_new_rows
from support.cuda_calls import (
    awkward_call,
    need_sm90,
    on_gpu,
    pack,
    same_experts,
    same_in_any_batch,
)
from support.problems import GPT_OSS, problem_of, random_call

H200 = Machine(DEVICES["h200"], packages={"triton": "3.6.0"}, driver=(13, 0))
EVERY = [CudaConfig("w4a8", rows) for rows in W4A8.tiles]
SEED = CASES["deepseek-v4-flash"].problem(activations="fp8_group128")
E4M3: dict[str, Any] = {"activations": "fp8_group128"}
MOST = 5e-3
"""Largest relative error against the reference that rounds x and h alike."""
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
            assert str(verdict.reasons[0]) == "activations: expects 16bit, got fp8_group128"

    def test_other_scales_of_rows(self) -> None:
        for mode in ("fp8_token", "fp8_static"):
            verdict = Cuda().check(replace(SEED, activations=mode), H200)
            assert verdict == Rejected((Reason("activations", "16bit or fp8_group128", mode),))

    def test_every_reason(self) -> None:
        spec = replace(SEED.spec, gate=None)
        problem = replace(SEED, spec=spec, activation=ReLU2(), weight_on="input")
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
            "layout w4a8_fragments, scales: expects scales of a row within 2**14 of each other, got scales 2**15 apart",
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
        assert [config.block_m for config in found] == [16, 16, 32, 32, 64, 128, 128]
        assert {config.family for config in found} == {"w4a8"}
        assert Cuda().tuning_configs(SEED, H200, 512) == (EVERY[1], EVERY[0], *EVERY[2:])
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
            "fp8_group128", "16bit",
        ]  # fmt: skip
        for mode, kinds in (("auto", {"w4a8"}), ("fp8_group128", {"w4a8"}), ("16bit", {"w4a16_mma", "w4a16_wgmma"})):
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


@pytest.mark.gpu
class TestOnGpu:
    @pytest.fixture(autouse=True)
    def _sm90(self) -> None:
        need_sm90()

    @pytest.mark.parametrize("tokens", [1, 3, 40, 700])
    @pytest.mark.parametrize("config", EVERY, ids=str)
    def test_every_configuration(self, config: CudaConfig, tokens: int) -> None:
        weights = same_experts(hidden=1024, intermediate=512, experts=7, bias=True)
        on_gpu(weights, *awkward_call(tokens, 1024), config, activation=GPT_OSS, most=MOST, **E4M3)

    @pytest.mark.parametrize("config", EVERY, ids=str)
    @pytest.mark.parametrize(
        ("hidden", "intermediate", "top_k"), [(2880, 704, 4), (1024, 2688, 22), (4160, 320, 1), (7168, 256, 8)]
    )
    def test_odd_sizes(self, config: CudaConfig, hidden: int, intermediate: int, top_k: int) -> None:
        weights = same_experts(hidden=hidden, intermediate=intermediate, bias=True)
        on_gpu(weights, *random_call(40, hidden, 5, top_k, torch.bfloat16), config, most=MOST, **E4M3)

    @pytest.mark.parametrize("activation", [SwiGLU(limit=10.0), GeGLU(), GeGLU("tanh")], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_activations_and_dtypes_of_x(self, dtype: torch.dtype, activation: Any) -> None:
        weights = same_experts(hidden=1024, intermediate=512)
        for tokens in (9, 200):
            call = random_call(tokens, 1024, 5, dtype=dtype)
            on_gpu(weights, *call, activation=activation, most=MOST, **E4M3)

    def test_against_exact_float32(self) -> None:
        weights = same_experts(hidden=2048, intermediate=1024)
        problem = problem_of(weights, **E4M3)
        x, routing = random_call(64, 2048, 5, dtype=torch.bfloat16)
        packed = pack(problem, weights, "cuda")
        exact = run_experts(replace(problem, activations="16bit"), weights, x, routing)
        for config in EVERY:
            out = torch.empty_like(x, device="cuda")
            Cuda().bind(problem, packed).run(x.cuda(), Routing(*(part.cuda() for part in routing)), config, out)
            assert 1e-2 < relative_error(out.cpu(), exact) < 5.5e-2

    def test_ids_of_others_are_never_read(self) -> None:
        weights = same_experts(hidden=512, intermediate=512, bias=True)
        x, routing = random_call(40, 512, 5, dtype=torch.bfloat16)
        routing.topk_ids_TA[::3, 0] = -1
        routing.topk_ids_TA[1::3, 1] = 5
        routing.topk_weights_TA[::3, 0] = float("nan")
        for config in EVERY:
            on_gpu(weights, x, routing, config, most=MOST, **E4M3)

    @pytest.mark.parametrize("config", EVERY, ids=str)
    def test_many_repeats_to_the_bit(self, config: CudaConfig) -> None:
        """A stage given back too early, a barrier too few: they show in some run of many."""
        weights = same_experts(hidden=1024, intermediate=512, experts=4)
        call = random_call(400, 1024, 4, dtype=torch.bfloat16)
        on_gpu(weights, *call, config, runs=1000, most=MOST, **E4M3)

    @pytest.mark.parametrize(("hidden", "intermediate"), [(1024, 512), (320, 192)])
    def test_a_token_does_not_see_its_batch(self, hidden: int, intermediate: int) -> None:
        same_in_any_batch(same_experts(hidden=hidden, intermediate=intermediate, experts=4), hidden, **E4M3)

    @pytest.mark.parametrize("tokens", [3, 200])
    def test_captured_layer_follows_new_rows(self, tokens: int) -> None:
        weights = same_experts(experts=16, hidden=1024, intermediate=512)
        experts = FusedExperts.from_weights(weights, GPT_OSS, top_k=3, device="cuda", backend="cuda", **E4M3)
        assert {step.config.family for step in experts.explain().require().steps} == {"w4a8"}  # type: ignore[attr-defined]
        captured_follows_new_rows(experts, weights, tokens, MOST)
