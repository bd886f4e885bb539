"""FlashInfer's routes for SM100 and SM120: constructed cases, bad input, and results of stand-ins of its functions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from polymoe.backends.base import inputs_of
from polymoe.backends.flashinfer import FlashInfer
from polymoe.backends.reference import layer_input_scales, run_experts
from polymoe.bench.cases import CASES
from polymoe.checkpoint.known_models import known_models
from polymoe.errors import FormatError, PlanError
from polymoe.formats import FORMATS
from polymoe.layouts import LAYOUTS
from polymoe.machine import DEVICES, Machine
from polymoe.planning.measured import Table, problem_key
from polymoe.planning.plan import Plan
from polymoe.planning.select import select
from polymoe.planning.selection import Selection
from polymoe.problem import Problem
from polymoe.problem.activations import Activation, GeGLU, ReLU2, SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import ExpertWeights
from polymoe.problem.verdict import Accepted, Rejected
from support.flashinfer_kernels import Installed
from support.problems import GPT_OSS, problem_of, random_experts
from support.table_rows import row

BACKEND = FlashInfer()
PACKAGES = {
    "flashinfer-python": "0.7.2", "flashinfer-cubin": "0.7.2", "nvidia-cutlass-dsl": "4.7.1", "triton": "3.7.1",
}  # fmt: skip


def machine(device: str, packages: dict[str, str] | None = None, **kwargs: Any) -> Machine:
    found = {name: version for name, version in (PACKAGES | (packages or {})).items() if version}
    return Machine(DEVICES[device], found, kwargs.pop("driver", (13, 0)), kwargs.pop("cutlass_cuda", (13, 1)), **kwargs)


def asked(problem: Problem, where: Machine) -> Selection:
    return select(problem, where, backend="flashinfer")


def reasons(problem: Problem, where: Machine) -> list[str]:
    verdict = next(c.verdict for c in asked(problem, where).candidates if c.backend == "flashinfer")
    return [str(reason) for reason in verdict.reasons] if isinstance(verdict, Rejected) else []


WRONG_TACTICS = (
    "package flashinfer-python: expects 0.7.2 or newer, got 0.6.17, which returns wrong results of tuned tactics "
    "(flashinfer#4841)"
)


NAN_TILES = (
    "package flashinfer-python: expects 0.7.2 or newer, got 0.6.16.post4, which returns NaN from tiles of 192 rows "
    "(flashinfer#4486)"
)
OLD_COMPILER = (
    "active compiler of nvidia-cutlass-dsl: expects that for CUDA 13, which flashinfer-python[cu13] installs, got "
)
NO_CUBINS = (
    "package flashinfer-cubin: expects 0.7.2 like flashinfer-python, or POLYMOE_DOWNLOAD_KERNELS=1 to let FlashInfer "
    "download its kernels"
)


def steps(plan: Plan) -> list[tuple[str, str]]:
    return [(tokens, str(step.config)) for tokens, step in plan.ranges()]


def kimi(tp: int) -> Problem:
    checkpoint = known_models()["moonshotai/Kimi-K2-Thinking"].checkpoint()
    return checkpoint.problem(checkpoint.layers[0], tp=tp)


class TestConstructedCases:
    def test_kimi_k2_in_int4(self) -> None:
        for tp in (1, 2, 4, 8):
            problem = kimi(tp)
            assert (problem.spec.format, problem.spec.hidden, problem.spec.intermediate) == (
                "int4_g32",
                7168,
                2048 // tp,
            )
            plan = asked(problem, machine("b200")).require()
            assert (plan.layout, steps(plan)) == ("flashinfer_trtllm_int4", [("1+", "trtllm_mxint4")])
        assert reasons(kimi(16), machine("b200")) == [
            "layout flashinfer_trtllm_int4, F: expects a multiple of 256, got 128"
        ]

    @pytest.mark.parametrize("device", ["rtx5090", "gb10"])
    def test_nemotron_in_nvfp4(self, device: str) -> None:
        case = CASES["nemotron-3-super"]
        assert (case.hidden, case.top_k, case.activation) == (1024, 22, ReLU2())
        hybrid = asked(case.problem(activations="nvfp4"), machine(device)).require()
        assert steps(hybrid) == [("1-63", "sm12x_nvfp4_w4a16"), ("64+", "sm12x_nvfp4_w4a4")]
        plain = asked(case.problem(), machine(device)).require()
        assert steps(plain) == [("1+", "sm12x_nvfp4_w4a16")]
        assert hybrid.layout == plain.layout == "flashinfer_sm12x_nvfp4"  # one packing for both

    def test_what_explain_says(self) -> None:
        text = str(asked(CASES["nemotron-3-super"].problem(activations="nvfp4"), machine("gb10")))
        assert "repeated calls differ in rounding" in text
        assert "never tested on gb10" in text
        assert "compiles kernels at the first call with each power of two of tokens" in text
        assert "routing weights are rounded to bfloat16" in str(asked(kimi(1), machine("b200")))

    def test_auto_never_takes_them_without_a_table(self) -> None:
        for problem, device in ((kimi(1), "b200"), (CASES["nemotron-3-super"].problem(), "rtx5090")):
            assert "flashinfer" not in {s.backend for s in select(problem, machine(device)).require().steps}

    def test_formats_on_sm100(self) -> None:
        mxfp4, nvfp4 = CASES["deepseek-v4-flash"], CASES["nemotron-3-super"]
        for device, problem, family in (
            ("b200", mxfp4.problem("mxfp4", "16bit"), "trtllm_mxfp4"),
            ("b300", mxfp4.problem("mxfp4", "mxfp8"), "trtllm_mxfp4"),
            ("b300", nvfp4.problem("nvfp4", "nvfp4"), "trtllm_nvfp4"),
        ):
            assert steps(asked(problem, machine(device)).require()) == [("1+", family)]
        assert reasons(mxfp4.problem("mxfp4", "16bit"), machine("b300")) == [
            "GPU with 16-bit activations: expects SM100, whose kernels there are, got sm_103"
        ]
        assert reasons(nvfp4.problem("nvfp4", "16bit"), machine("b200")) == ["activations: expects nvfp4, got 16bit"]


class TestRefusals:
    def test_every_reason_at_once_on_sm120(self) -> None:
        weights = random_experts("nvfp4", hidden=192, intermediate=96, bias=True)
        found = replace(problem_of(weights, GPT_OSS), dtype="fp16", weight_on="input", batch_invariant=True)
        where = machine("rtx5090", {"flashinfer-python": "0.6.17"}, driver=(12, 9), cutlass_cuda=None)
        assert reasons(found, where) == [
            "routing weight on input: not supported",
            "dtype: expects bf16, got fp16",
            "batch-invariant results: not supported",
            "biases: not supported",
            WRONG_TACTICS,
            f"activation: expects SwiGLU without constants, got {GPT_OSS.name}",
            "driver: expects CUDA 13 or newer, got CUDA 12.9",
            f"{OLD_COMPILER}none that can be imported",
            "layout flashinfer_sm12x_nvfp4, H: expects a multiple of 128, got 192",
            "layout flashinfer_sm12x_nvfp4, F: expects a multiple of 64, got 96",
        ]

    def test_int4_on_sm103_until_it_ran_there(self) -> None:
        assert reasons(kimi(1), machine("b300")) == [
            "GPU: expects SM100: on SM103 the kernel fails (vllm#40419), got sm_103"
        ]

    def test_the_compiler_that_is_loaded_counts_not_what_is_installed(self) -> None:
        where = machine("rtx5090", {"nvidia-cutlass-dsl-libs-cu13": "4.7.1"}, cutlass_cuda=(12, 9))
        assert reasons(CASES["nemotron-3-super"].problem(), where) == [f"{OLD_COMPILER}CUDA 12.9"]

    def test_int4_with_other_scales_zero_points_or_biases(self) -> None:
        weights = random_experts("int4_g32", hidden=256, intermediate=256, bias=True)
        for encoding, got in (
            (FORMATS["int4_g128"].encoding, "int4_g128"),
            (replace(FORMATS["int4_g32"].encoding, zero_points=True), "int4_g32_zp"),
        ):
            spec = replace(weights.spec, gate=encoding, up=encoding, down=encoding)
            found = reasons(replace(problem_of(weights), spec=spec), machine("b200"))
            assert found[:2] == [
                "biases: not supported",
                f"weights on sm_100: expects int4_g32 or mxfp4 or nvfp4, got {got}",
            ]
        assert reasons(problem_of(weights, GeGLU()), machine("b200")) == [
            "biases: not supported", "activation: expects SwiGLU, got geglu",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("packages", "reason"),
        [
            ({"flashinfer-python": ""}, "package flashinfer-python: expects 0.7.2 or newer, got not installed"),
            ({"flashinfer-python": "0.7.1"}, "package flashinfer-python: expects 0.7.2 or newer, got 0.7.1"),
            ({"flashinfer-python": "0.6.16.post4"}, NAN_TILES),
        ],
    )
    def test_package(self, packages: dict[str, str], reason: str) -> None:
        cubins = {"flashinfer-cubin": packages["flashinfer-python"]}
        assert reasons(kimi(1), machine("b200", packages | cubins)) == [reason]

    @pytest.mark.parametrize("cubins", ["", "0.6.13"])
    def test_kernels_that_would_be_downloaded(self, cubins: str) -> None:
        where = machine("b200", {"flashinfer-cubin": cubins})
        assert reasons(kimi(1), where) == [f"{NO_CUBINS}, got {cubins or 'not installed'}"]
        allowed = asked(kimi(1), replace(where, downloads=True))
        assert "downloads compiled kernels at the first call" in str(allowed)
        assert allowed.plan is not None

    def test_the_variable_that_allows_downloads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = []
        for value in ("1", "0", ""):
            monkeypatch.setenv("POLYMOE_DOWNLOAD_KERNELS", value)
            found.append(Machine.of("b200").downloads)
        assert found == [True, False, False]

    def test_a_gpu_elsewhere_has_notes(self) -> None:
        where = replace(machine("b200", dict.fromkeys(PACKAGES, "")), elsewhere=True, driver=None)
        assert "needs flashinfer-python 0.7.2 or newer there, needs flashinfer-cubin" in str(asked(kimi(1), where))
        there = replace(where, device=DEVICES["gb10"])
        assert "needs nvidia-cutlass-dsl[cu13] there" in str(asked(CASES["nemotron-3-super"].problem(), there))

    def test_a_capability_that_shared_memory_contradicts(self) -> None:
        small = replace(DEVICES["b200"], shared_memory_bytes=99 * 1024)
        assert reasons(kimi(1), replace(machine("b200"), device=small)) == [
            "shared memory of sm_100: expects 227 KiB a CTA, got 99 KiB"
        ]
        smaller = replace(DEVICES["gb10"], shared_memory_bytes=48 * 1024)
        assert reasons(CASES["nemotron-3-super"].problem(), replace(machine("gb10"), device=smaller)) == [
            "shared memory of sm_121: expects 99 KiB a CTA, got 48 KiB"
        ]

    def test_architectures_without_kernels_get_triton(self) -> None:
        other = replace(DEVICES["b200"], name="sm_110", capability=(11, 0))
        where = replace(machine("b200"), device=other)
        assert reasons(kimi(1), where)[0] == "GPU: expects SM90 or SM100 or SM103 or SM120 or SM121, got sm_110"
        assert {step.backend for step in select(kimi(1), where).require().steps} == {"triton"}

    def test_expert_parallel_ranks_on_sm120(self) -> None:
        whole = CASES["nemotron-3-super"].problem()
        rank = replace(whole, ep=8, spec=replace(whole.spec, first_expert=64, local_experts=64))
        assert reasons(rank, machine("gb10")) == [
            "experts of other ranks: expects none, because they would be computed too, got 448"
        ]
        assert reasons(replace(kimi(1), ep=8, spec=replace(kimi(1).spec, local_experts=48)), machine("b200")) == []

    def test_too_many_experts(self) -> None:
        many = replace(kimi(1), top_k=33, spec=replace(kimi(1).spec, experts=2048, local_experts=2048))
        assert reasons(many, machine("b200")) == [
            "experts on this rank: expects at most 2044, got 2048", "experts of a token: expects at most 32, got 33",
        ]  # fmt: skip


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Installed:
    installed = Installed()
    installed.install(monkeypatch)
    return installed


def calibrated(weights: ExpertWeights, *, rank_of_two: bool) -> ExpertWeights:
    """With input scales, as a whole layer or as the last experts of twice as many."""
    spec, count = weights.spec, weights.spec.local_experts
    if rank_of_two:
        spec = replace(spec, experts=2 * count, first_expert=count, local_experts=count)

    def one(e: int) -> Any:
        scales = torch.tensor(0.01 + 0.001 * e), torch.tensor(0.02)
        return replace(weights.expert(e), gate_up_input_scale=scales[0], down_input_scale=scales[1])

    return ExpertWeights(spec, one)


def same_input_scales(weights: ExpertWeights, like: ExpertWeights) -> ExpertWeights:
    """With the global scales of ``like`` in every expert."""
    x, h = layer_input_scales(like)
    return ExpertWeights(weights.spec, lambda e: replace(weights.expert(e), gate_up_input_scale=x, down_input_scale=h))


def one_global_scale(weights: ExpertWeights) -> ExpertWeights:
    def one(e: int) -> Any:
        x = weights.expert(e)
        return replace(x, gate=replace(x.gate, global_scale=x.up.global_scale))  # type: ignore[type-var]

    return ExpertWeights(weights.spec, one)


@pytest.mark.parametrize(
    ("format", "device", "activation", "mode", "tokens", "tolerance"),
    [
        ("int4_g32", "b200", SwiGLU(), "16bit", 5, 6e-3),
        ("int4_g32", "b200", GPT_OSS, "16bit", 3, 6e-3),
        ("mxfp4", "b200", SwiGLU(limit=0.5), "16bit", 5, 6e-3),
        ("mxfp4", "b200", SwiGLU(), "mxfp8", 5, 0.05),  # the stand-in does not round h
        ("nvfp4", "b200", SwiGLU(), "nvfp4", 5, 6e-3),
        ("nvfp4", "b200", ReLU2(), "nvfp4", 5, 6e-3),
        ("nvfp4", "gb10", SwiGLU(), "16bit", 5, 6e-3),
        ("nvfp4", "gb10", ReLU2(), "16bit", 4, 6e-3),
        ("nvfp4", "rtx5090", SwiGLU(), "nvfp4", 70, 6e-3),
        ("nvfp4", "rtx5090", ReLU2(), "nvfp4", 63, 6e-3),
        ("nvfp4", "rtx5090", ReLU2(), "nvfp4", 600, 6e-3),
    ],
)
@pytest.mark.parametrize("mapped", [False, True])
def test_results(
    flashinfer: Installed,
    format: str,
    device: str,
    activation: Activation,
    mode: str,
    tokens: int,
    tolerance: float,
    mapped: bool,
) -> None:
    """The documented kernels compute what the reference does from the arguments that they get."""
    gated, sm12x = not isinstance(activation, ReLU2), device != "b200"
    weights = random_experts(format, experts=6, hidden=256, intermediate=256, gated=gated)
    if format == "nvfp4" and gated and device == "rtx5090":
        weights = one_global_scale(weights)
    weights = calibrated(weights, rank_of_two=not sm12x)
    problem = problem_of(weights, activation, activations=mode, dtype="bf16")
    where = machine(device)
    plan = asked(problem, where).require()
    packed = LAYOUTS[plan.layout].pack(weights, torch.device("cpu"))
    runner, config = BACKEND.bind(problem, packed), plan.step(tokens).config
    g = torch.Generator().manual_seed(1)
    experts = weights.spec.experts
    x = torch.randn(tokens, 256, generator=g).bfloat16()
    routing = Routing(torch.rand(tokens, experts, generator=g).topk(3).indices, torch.rand(tokens, 3, generator=g))
    routing.topk_ids_TA[0, 0], routing.topk_ids_TA[1, 0], routing.topk_ids_TA[2] = -1, experts, -1
    routing.topk_weights_TA[:3, 0] = float("nan")
    x[2] = float("inf")
    options = {}
    if mapped:  # the same experts at other places; of a whole layer the first is nowhere
        options["expert_map"] = torch.tensor([-1, 0, 5, 4, 3, 2] if sm12x else [-1] * 6 + [5, 4, 3, 2, 1, 0])
    out = torch.full_like(x, float("nan"))
    runner.run(CallArguments(x, *routing, out, **options), config)
    local, places = [weights.expert(e) for e in range(6)], list(range(6))
    if mapped:
        places = options["expert_map"].tolist()[-6:]
        routing.topk_ids_TA[(routing.topk_ids_TA == 0) & sm12x] = -1
    here = ExpertWeights(weights.spec, [local[place] for place in places].__getitem__)
    used = inputs_of(problem, config)
    emulated = replace(problem, activations=used)
    if used.global_scale:  # of the experts that are packed, whatever is mapped
        here = same_input_scales(here, weights)
    assert relative_error(out, run_experts(emulated, here, x, routing)) < tolerance
    assert not out[2].any()
    name, given = flashinfer.calls[-1]
    shared = given["gemm1_weights"] if "gemm1_weights" in given else given["w13"]
    assert shared.data_ptr() == packed.tensors["up.codes"].data_ptr()  # never a copy
    if sm12x:
        assert name == ("run_moe_w4a4" if mode == "nvfp4" and tokens >= 64 else "run_moe_w4a16")
        assert len(given["hidden_states"]) == {5: 8, 4: 4, 70: 128, 63: 64, 600: 1024}[tokens]
        none = name == "run_moe_w4a4"
        for row in given["topk_ids"][tokens:].tolist():
            assert row == ([6, 6, 6] if none else given["topk_ids"][0].tolist())


def test_long_calls_are_split(flashinfer: Installed) -> None:
    weights = random_experts("nvfp4", experts=2, hidden=128, intermediate=128)
    problem = problem_of(weights, dtype="bf16")
    packed = LAYOUTS["flashinfer_sm12x_nvfp4"].pack(weights, torch.device("cpu"))
    x, routing = torch.randn(600, 128).bfloat16(), Routing(torch.zeros(600, 1, dtype=torch.int32), torch.ones(600, 1))
    out = torch.empty_like(x)
    BACKEND.bind(problem, packed).run(CallArguments(x, *routing, out), BACKEND.configure(problem, machine("gb10"), 600))
    assert [len(given["hidden_states"]) for _, given in flashinfer.calls] == [512, 128]
    assert relative_error(out, run_experts(problem, weights, x, routing)) < 6e-3


def test_unequal_global_scales_of_gate_and_up(flashinfer: Installed) -> None:
    weights = random_experts("nvfp4", experts=2, hidden=128, intermediate=128)
    packed = LAYOUTS["flashinfer_sm12x_nvfp4"].pack(weights, torch.device("cpu"))
    BACKEND.bind(problem_of(weights), packed)  # test_results shows that they are right
    with pytest.raises(FormatError, match="expert 0, gate and up: expected one global scale, with NVFP4 inputs"):
        BACKEND.bind(problem_of(weights, activations="nvfp4"), packed)


def test_other_versions_of_a_function(flashinfer: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    import flashinfer.fused_moe as module  # pyright: ignore[reportMissingImports]

    weights = random_experts("int4_g32", experts=2, hidden=256, intermediate=256)
    packed = LAYOUTS["flashinfer_trtllm_int4"].pack(weights, torch.device("cpu"))
    monkeypatch.setattr(module, "trtllm_mxint4_block_scale_routed_moe", lambda topk_ids, output: None)
    with pytest.raises(PlanError, match=r"got no hidden_states, gemm1_weights, .*\n  hint: polymoe was written for"):
        BACKEND.bind(problem_of(weights), packed)
    monkeypatch.delattr(module, "trtllm_mxint4_block_scale_routed_moe")
    with pytest.raises(PlanError, match="AttributeError"):
        BACKEND.bind(problem_of(weights), packed)


def test_tuning_tries_both_families() -> None:
    problem = CASES["nemotron-3-super"].problem(activations="nvfp4")
    names = [str(c) for c in BACKEND.tuning_configs(problem, machine("gb10"), 128)]
    assert names == ["sm12x_nvfp4_w4a4", "sm12x_nvfp4_w4a16"]
    config = BACKEND.configure(problem, machine("gb10"), 8)
    assert (config.keeps_16_bits, inputs_of(problem, config).name) == (True, "16bit")
    assert json.loads(json.dumps(config.to_dict()))["route"] == "sm12x_nvfp4_w4a16"
    verdict = BACKEND.check(problem, machine("gb10"))
    assert isinstance(verdict, Accepted)
    assert not verdict.repeatable


def test_a_table_moves_the_threshold() -> None:
    problem = CASES["nemotron-3-super"].problem(activations="nvfp4")
    times = {64: ("w4a16", 1000.0), 128: ("w4a16", 1500.0), 256: ("w4a4", 1600.0)}
    rows = [
        row(
            tokens,
            median_us,
            device="gb10",
            backend="flashinfer",
            problem=problem_key(problem),
            config={"route": f"sm12x_nvfp4_{family}"},
            triton="3.7.1",
        )
        for tokens, (family, median_us) in times.items()
    ]
    plan = select(problem, machine("gb10"), backend="flashinfer", table=Table((tuple(rows),))).require()
    assert steps(plan) == [("1-128", "sm12x_nvfp4_w4a16"), ("129+", "sm12x_nvfp4_w4a4")]
