"""The backend of FlashInfer's kernels: verdicts, configurations, and the arguments of its calls. No kernel runs."""

from __future__ import annotations

import inspect
import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from polymoe.backends.cost import cost
from polymoe.backends.flashinfer import FlashInfer
from polymoe.backends.flashinfer.config import FlashInferConfig
from polymoe.backends.packages import at_least, need_package, release
from polymoe.bench.cases import CASES
from polymoe.bench.records import read
from polymoe.errors import PlanError
from polymoe.formats import FORMATS
from polymoe.layouts import LAYOUTS
from polymoe.machine import DEVICES, Machine
from polymoe.planning.select import select
from polymoe.problem import Problem
from polymoe.problem.activations import GeGLU, SwiGLU
from polymoe.problem.call import CallArguments
from polymoe.problem.tensors import ExpertsSpec
from polymoe.problem.verdict import Accepted, Reasons, Rejected
from support.problems import problem_of, random_call, random_experts

SIGNATURES: dict[str, list[str]] = json.loads((Path(__file__).parent / "flashinfer_signatures.json").read_text())
"""Parameters of the functions that the backend calls, by function and the version that was looked at."""


def machine(device: str, version: str | None = "0.7.2", **kwargs: Any) -> Machine:
    return Machine(DEVICES[device], {"flashinfer-python": version} if version else {}, (13, 0), **kwargs)


def problem(format: str = "mxfp4", **kwargs: Any) -> Problem:
    e = FORMATS[format].encoding
    spec = ExpertsSpec(
        hidden=4096, intermediate=2048, experts=256, gate=e, up=e, down=e, bias=kwargs.pop("bias", False)
    )
    return Problem(**{"spec": spec, "activation": SwiGLU(limit=10.0), "top_k": 6, **kwargs})


def reasons(found: Problem, where: Machine) -> list[str]:
    candidates = {c.backend: c.verdict for c in select(found, where, backend="flashinfer").candidates}
    verdict = candidates["flashinfer"]
    assert isinstance(verdict, Rejected)
    return [str(reason) for reason in verdict.reasons]


def test_versions() -> None:
    for same in (("0.7.2", "0.7.2.post1", "0.7.2+cu130"), ("0.24", "0.24.0")):
        assert len({release(version) for version in same}) == 1
    versions = ("", "0.6.16.post4", "0.7.2.dev3", "0.7.2", "0.7.10", "0.24.0rc1", "0.24", "2.11.0+cu130")
    rising = [release(version) for version in versions]
    assert rising == sorted(set(rising))


def test_a_version_before_the_least_is_too_old() -> None:
    assert all(at_least(version, "0.7.2") for version in ("0.7.2", "0.7.2.post1", "0.7.3rc1"))
    assert not any(at_least(version, "0.7.2") for version in ("0.7.2rc1", ""))


class TestPackage:
    def test_absent_old_and_wrong(self) -> None:
        def found(version: str | None, **kwargs: Any) -> list[str]:
            reasons = Reasons()
            need_package(reasons, machine("h200", version, **kwargs), "flashinfer-python", "0.6.14", **WRONG)
            return [str(reason) for reason in reasons.found]

        assert found(None) == ["package flashinfer-python: expects 0.6.14 or newer, got not installed"]
        assert found("0.6.11.post3") == ["package flashinfer-python: expects 0.6.14 or newer, got 0.6.11.post3"]
        assert found("0.6.16.post4") == [
            "package flashinfer-python: expects another version, got 0.6.16.post4, which returns NaN"
        ]
        assert found("0.6.13") == [
            "package flashinfer-python: expects 0.6.14 or newer, got 0.6.13, which returns garbage"
        ]
        assert found("0.6.14") == found("0.7.2") == found(None, elsewhere=True) == []

    def test_elsewhere_it_is_a_note(self) -> None:
        needed = need_package(Reasons(), Machine.of("h200"), "no-such-package", "0.6.14")
        assert needed == ("needs no-such-package 0.6.14 or newer there",)


WRONG: dict[str, Any] = {"wrong": {"0.6.16": "returns NaN", "0.6.13": "returns garbage"}}


class TestCutlassSM90:
    def test_takes_mxfp4(self) -> None:
        for version, layout in (("0.6.14", "flashinfer_sm90"), ("0.6.18", "flashinfer_sm90_folded")):
            verdict = FlashInfer().check(problem(), machine("h200", version))
            assert isinstance(verdict, Accepted)
            assert (verdict.foreign, verdict.capturable, verdict.layouts) == (True, True, (layout,))

    def test_auto_leaves_it(self) -> None:
        where = replace(machine("h200"), packages={"flashinfer-python": "0.7.2", "triton": "3.6.0"})
        selection = select(problem(), where)
        assert "flashinfer" not in {step.backend for step in selection.require().steps}
        assert "flashinfer: accepted (CUDA graphs, timed on h200, another library's kernels" in str(selection)

    def test_all_reasons_at_once(self) -> None:
        odd = replace(problem(bias=True, activation=GeGLU(), activations="fp8_token", dtype="fp16"), weight_on="input")
        odd = replace(odd, spec=replace(odd.spec, hidden=2880))
        assert reasons(odd, machine("h200", "0.6.11")) == [
            "routing weight on input: not supported",
            "dtype: expects bf16, got fp16",
            "biases: not supported",
            "activation: expects SwiGLU, got geglu",
            "activations: expects 16bit, got fp8_token",
            "package flashinfer-python: expects 0.6.14 or newer, got 0.6.11",
            "layout flashinfer_sm90, H: expects a multiple of 128, got 2880",
        ]

    def test_other_gpus_and_weights(self) -> None:
        assert reasons(problem(), machine("a100"))[0].startswith("GPU: expects SM90")
        assert reasons(problem("int4_g32"), machine("h200"))[0] == "weights on sm_90: expects mxfp4, got int4_g32"

    @pytest.mark.parametrize("version", ["0.6.14", "0.7.2"])
    def test_configurations(self, version: str) -> None:
        backend, where, case = FlashInfer(), machine("h200", version), problem()
        chosen = [backend.configure(case, where, tokens).up for tokens in (1, 256, 1024, 8192)]
        assert chosen == ["64x16x128", "128x16x128", "128x32x128 2x1", "128x64x128 2x1"]
        configs = backend.tuning_configs(case, where, 16)
        assert configs[0] == backend.configure(case, where, 16)
        assert len(configs) == len(set(configs)) == {"0.6.14": 28, "0.7.2": 100}[version]
        more = backend.tuning_configs(case, where, 16, [(c, float(i)) for i, c in enumerate(configs)])
        assert len(more) == 12
        assert not set(more) & set(configs)
        for config in (*configs, *more):
            assert FlashInferConfig.from_dict(config.to_dict()) == config


class Called(Exception):
    """What a fake function of FlashInfer was called with."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


class Owner:
    """What FlashInfer 0.6.14 makes for a layer: ``run_moe`` works as long as it lives."""

    def __init__(self, function: Any) -> None:
        lives = weakref.ref(self)

        def run_moe(*args: Any) -> None:
            assert lives() is not None
            function(*args)

        self.run_moe = run_moe


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that looks like FlashInfer and raises :class:`Called`; ``install(version)`` makes it importable."""

    def install(version: str) -> None:
        def call(name: str) -> Any:
            parameters = [
                inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
                for n in SIGNATURES[f"{name} {version}"]
            ]

            def function(*args: Any, **kwargs: Any) -> None:
                raise Called(dict(inspect.Signature(parameters).bind(*args, **kwargs).arguments))

            function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
            return function

        package, fused_moe, jit = ModuleType("flashinfer"), ModuleType("flashinfer.fused_moe"), ModuleType("jit")
        enums = ModuleType("flashinfer.tllm_enums")
        enums.ActivationType = SimpleNamespace(Swiglu=3)  # type: ignore[attr-defined]
        fused_moe.cutlass_fused_moe = call("cutlass_fused_moe")  # type: ignore[attr-defined]
        if f"run_moe {version}" in SIGNATURES:
            module = SimpleNamespace(init=lambda *args: Owner(call("run_moe")))
            spec = SimpleNamespace(build_and_load=lambda: module)
            jit.gen_cutlass_fused_moe_sm90_module = lambda: spec  # type: ignore[attr-defined]
        modules = {"": package, ".fused_moe": fused_moe, ".jit": jit, ".jit.fused_moe": jit, ".tllm_enums": enums}
        for name, found in modules.items():
            monkeypatch.setitem(sys.modules, f"flashinfer{name}", found)

    from polymoe.backends.flashinfer import cutlass_sm90

    cutlass_sm90._call.cache_clear()
    yield install
    cutlass_sm90._call.cache_clear()


def arguments_of(backend_problem: Problem, layout: str, weights: Any, config: FlashInferConfig, **kwargs: Any) -> Any:
    """The arguments of FlashInfer's function in a call of three tokens with int64 ids."""
    packed = LAYOUTS[layout].pack(weights, torch.device("cpu"))
    runner = FlashInfer().bind(backend_problem, packed)
    x, (ids, router) = random_call(3, weights.spec.hidden, weights.spec.experts, dtype=torch.bfloat16)
    with pytest.raises(Called) as called:
        runner.run(CallArguments(x, ids, router, torch.empty_like(x), **kwargs), config)
    return called.value.arguments, packed, ids


def described(tensor: torch.Tensor) -> tuple[list[int], torch.dtype]:
    assert tensor.is_contiguous()
    return list(tensor.shape), tensor.dtype


class TestCallsOnSM90:
    @pytest.mark.parametrize(
        ("version", "layout"), [("0.6.14", "flashinfer_sm90"), ("0.7.2", "flashinfer_sm90_folded")]
    )
    def test_arguments(self, flashinfer: Any, version: str, layout: str) -> None:
        flashinfer(version)
        weights = random_experts(hidden=256, intermediate=128, experts=4)
        weights = replace(weights, spec=replace(weights.spec, experts=8, first_expert=4, local_experts=4))
        case = problem_of(weights, SwiGLU(1.702, 1.0, 7.0))
        config = FlashInferConfig("cutlass_sm90", "64x32x128", "128x64x128 2x1")
        found, packed, ids = arguments_of(case, layout, weights, config)
        scales = [[4, 2, 1024], [4, 1, 1024]] if version == "0.6.14" else [[4, 4, 2, 16, 16], [4, 4, 1, 16, 16]]
        if version == "0.6.14":
            assert found["tp_size"] == found["ep_size"] == found["cluster_size"] == 1
            assert found["fc1_expert_biases"] is found["input_sf"] is None
        else:
            assert found["output_dtype"] == torch.bfloat16
            assert found["use_w4_group_scaling"] is True
            assert found["use_fused_finalize"] is False
        names = {
            "x": "input", "up": "fc1_expert_weights", "down": "fc2_expert_weights", "scales": "quant_scales",
            "ids": "token_selected_experts", "router": "token_final_scales",
        }  # fmt: skip
        got = {name: found[key] for name, key in names.items()}
        assert described(got["x"]) == ([3, 256], torch.bfloat16)
        assert described(got["up"]) == ([4, 256, 128], torch.uint8)
        assert described(got["down"]) == ([4, 256, 64], torch.uint8)
        assert [described(s) for s in got["scales"]] == [(shape, torch.uint8) for shape in scales]
        assert described(got["ids"]) == ([3, 2], torch.int32)
        assert torch.equal(got["ids"], ids.int() - 4)  # of this rank; others are outside of 0 to 3
        assert described(got["router"]) == ([3, 2], torch.float32)
        assert found["profile_ids"] == ([4, 25] if version == "0.6.14" else [12, 73])
        for name, value in (("alpha", 1.702), ("beta", 1.0), ("limit", 7.0)):
            assert found[f"swiglu_{name}"].tolist() == pytest.approx([value] * 4)
        assert got["up"].data_ptr() == packed.tensors["up.codes"].data_ptr()  # never a copy

    def test_plain_swiglu_has_no_constants_and_a_map_of_experts_is_applied(self, flashinfer: Any) -> None:
        flashinfer("0.7.2")
        weights = random_experts(hidden=128, intermediate=128, experts=4)
        places = torch.tensor([2, -1, 0, 1])
        config = FlashInferConfig("cutlass_sm90", "64x16x128", "64x16x128")
        found, _, ids = arguments_of(problem_of(weights), "flashinfer_sm90_folded", weights, config, expert_map=places)
        assert all(found[f"swiglu_{name}"] is None for name in ("alpha", "beta", "limit"))
        assert torch.equal(found["token_selected_experts"], places[ids].int())

    def test_each_device_has_its_own_runner(self, flashinfer: Any) -> None:
        from polymoe.backends.flashinfer import cutlass_sm90

        flashinfer("0.6.14")
        first, second = (cutlass_sm90._call(torch.device(name)) for name in ("cpu", "meta"))
        assert first is not second
        assert first is cutlass_sm90._call(torch.device("cpu"))

    def test_unknown_tactics(self, flashinfer: Any) -> None:
        flashinfer("0.7.2")
        weights = random_experts(hidden=128, intermediate=128, experts=4)
        config = FlashInferConfig("cutlass_sm90", "64x16x128", "64x16")
        packed = LAYOUTS["flashinfer_sm90_folded"].pack(weights, torch.device("cpu"))
        x, routing = random_call(3, 128, 4, dtype=torch.bfloat16)
        runner = FlashInfer().bind(problem_of(weights), packed)
        with pytest.raises(PlanError, match="expected a tactic of this version, got '64x16'"):
            runner.run(CallArguments(x, *routing, torch.empty_like(x)), config)


def test_predictions_are_near_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer 0.6.14 on an H200, 256 experts of 4096 x 2048, six a token: the backend's own records, and FlashInfer
    tuned by itself for many tokens. At 1024 tokens neither memory nor math is all that takes time."""
    monkeypatch.setattr(cost, "__defaults__", ((0.0,),))  # routings were uniform
    case, where = CASES["deepseek-v4-flash"].problem("mxfp4", "16bit"), machine("h200")
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "flashinfer-h200.jsonl"
    records = [r for r in read(results) if r.case == "deepseek-v4-flash"]
    assert {r.tokens for r in records} >= {1, 16, 64, 256, 1024}
    for record in records:
        predicted = FlashInfer().predict(case, where, record.tokens)
        assert predicted.time_us == pytest.approx(record.median_us, rel=0.2 if record.tokens == 1024 else 0.05)
    for tokens, time_us in {2048: 2436.0, 4096: 4808.2, 8192: 9487.0}.items():
        assert FlashInfer().predict(case, where, tokens).time_us == pytest.approx(time_us, rel=0.05)
