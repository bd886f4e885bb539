"""Which layers polymoe runs: a plan from the facts of a layer, or every reason why not."""

from __future__ import annotations

import enum
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.sources import SGLANG
from polymoe.engines.serving.stand_aside import LayerFacts, LayerPlan, judge_layer, method_facts
from polymoe.errors import ArgumentError
from polymoe.machine import Machine
from polymoe.problem.activations import SwiGLU
from polymoe.problem.verdict import Reason, Reasons, Rejected
from support.stacked import BUNDLED, CPU, facts_of


def reasons_of(facts: LayerFacts, **settings: str) -> list[str]:
    verdict = judge_layer(facts, CPU, EngineSettings(**settings))  # type: ignore[arg-type]
    assert isinstance(verdict, Rejected)
    return [str(reason) for reason in verdict.reasons]


@pytest.mark.parametrize("model", BUNDLED)
def test_every_bundled_checkpoint_is_planned(model: str) -> None:
    plan = judge_layer(facts_of(model, tp=2), CPU, EngineSettings())
    assert isinstance(plan, LayerPlan)
    assert plan.problem.spec.experts == BUNDLED[model].experts
    assert (plan.problem.tp, plan.problem.dtype, str(plan.problem.activations)) == (2, "bf16", "16bit")
    assert plan.selection.plan is not None
    assert plan.selection.plan.steps[0].backend == "reference"


@pytest.mark.parametrize(
    ("model", "gpu", "settings", "found"),
    [
        ("sums-qwen3-fp8", "h200", {}, "fp8_group128"),
        ("sums-llama-4-fp8", "h200", {}, "fp8_token"),
        ("sums-gpt-oss-mxfp4", "h200", {}, "16bit"),
        ("sums-deepseek-v4-mxfp4", "h200", {}, "16bit"),
        ("sums-qwen3-fp8", "a100", {}, "16bit"),  # has no E4M3 instructions
        ("sums-qwen3-fp8", "h200", {"activations": "16bit"}, "16bit"),
        ("sums-gpt-oss-mxfp4", "h200", {"activations": "fp8_group128"}, "fp8_group128"),
    ],
)
def test_inputs_are_held_as_the_engines_method_holds_them(
    model: str, gpu: str, settings: dict[str, str], found: str
) -> None:
    plan = judge_layer(facts_of(model), replace(CPU, machine=Machine.of(gpu)), EngineSettings(**settings))  # type: ignore[arg-type]
    assert isinstance(plan, LayerPlan)
    assert str(plan.problem.activations) == found
    assert plan.experts.static == plan.problem.activations.static


def test_every_reason_is_given_at_once() -> None:
    facts = facts_of("sums-qwen3-fp8", method="Int8MoEMethod", dtype=torch.float64, refused=(Reason("LoRA"),))
    found = reasons_of(facts)
    assert found[:2] == ["LoRA: not supported", "dtype of x: expects bfloat16, float16 or float32, got torch.float64"]
    assert found[2].startswith("method: expects one of AutoAWQMoEMethod")
    assert found[2].endswith("got Int8MoEMethod")


def test_experts_that_are_no_range_are_counted_on_their_rank() -> None:
    tensors = {n: t[:4] for n, t in facts_of("sums-kimi-k2-int4").tensors.items()}
    plan = judge_layer(facts_of("sums-kimi-k2-int4", tensors=tensors, first_expert=None, ep=2), CPU, EngineSettings())
    assert isinstance(plan, LayerPlan)
    assert (plan.problem.spec.experts, plan.problem.spec.first_expert, plan.problem.spec.local_experts) == (4, 0, 4)


def test_the_order_of_gate_and_up_must_be_the_methods() -> None:
    assert reasons_of(facts_of("sums-gpt-oss-mxfp4", interleaved=False)) == [
        "rows of w13: expects alternating, got all of gate, then all of up"
    ]
    assert reasons_of(facts_of("sums-qwen3-fp8", interleaved=True)) == [
        "rows of w13: expects all of gate, then all of up, got alternating"
    ]


def test_tensors_that_do_not_fit_the_method() -> None:
    facts = facts_of("sums-glm-4-nvfp4")
    wrong = {**facts.tensors, "w2_weight_scale": torch.empty(8, 192, 7, dtype=torch.float8_e4m3fn, device="meta")}
    (reason,) = reasons_of(replace(facts, tensors=wrong))
    assert reason.startswith("model.layers.1.mlp.experts.w2_weight_scale: expects a number of groups")


def test_a_gate_that_the_activation_does_not_take() -> None:
    facts = facts_of("sums-nemotron-h-nvfp4", activation=SwiGLU())
    assert reasons_of(facts)  # [E, 208, 48] is half of what a gate and an up projection would be


def test_no_backend_gives_the_reasons_of_all() -> None:
    """An A100, which the CUDA kernels for FP8 weights are not compiled for."""
    a100 = replace(CPU, machine=Machine.of("a100"), backend="cuda")
    verdict = judge_layer(facts_of("sums-qwen3-fp8"), a100, EngineSettings())
    assert isinstance(verdict, Rejected)
    assert {r.what.partition(":")[0] for r in verdict.reasons} >= {"cuda"}


def test_unknown_names_in_the_settings_are_errors() -> None:
    with pytest.raises(ArgumentError, match="activations"):
        judge_layer(facts_of("sums-qwen3-fp8"), CPU, EngineSettings(activations="int8"))
    with pytest.raises(ArgumentError, match="backend"):
        judge_layer(facts_of("sums-qwen3-fp8"), replace(CPU, backend="marlin"), EngineSettings())


class Order(enum.Enum):
    GROUP = "group"
    WEIGHT = "weight"


@pytest.mark.parametrize(
    ("desc_act", "actorder", "said"),
    [
        (True, None, "desc_act"), (False, "group", "actorder group"), (False, "dynamic", "actorder dynamic"),
        (False, Order.GROUP, "actorder group"), (False, Order.WEIGHT, None), (False, "static", None),
        (False, None, None),
    ],
)  # fmt: skip
def test_columns_in_another_order(desc_act: bool, actorder: object, said: str | None) -> None:
    reasons = Reasons()
    method = SimpleNamespace(quant_config=SimpleNamespace(desc_act=desc_act, is_sym=True))
    facts = method_facts(method, SGLANG, {}, actorder, reasons)
    assert (facts["method"], facts["symmetric"], facts["k_first"]) == ("SimpleNamespace", True, False)
    assert [reason.got for reason in reasons.found] == ([] if said is None else [f"by activation ({said})"])


def test_batch_invariance_is_promised_or_refused() -> None:
    h200 = replace(CPU, machine=Machine.of("h200"))
    plan = judge_layer(facts_of("sums-gpt-oss-mxfp4", batch_invariant=True), h200, EngineSettings())
    assert isinstance(plan, LayerPlan)
    assert plan.problem.batch_invariant
    assert {step.backend for step in plan.selection.require().steps} <= {"cuda", "triton"}
    found = reasons_of(facts_of("sums-gpt-oss-mxfp4", batch_invariant=True))
    assert "reference: batch-invariant results: not supported" in found


def test_experts_that_move_between_ranks_need_tensors_with_rows() -> None:
    """Of a backend that may hold numbers of all experts, before they are packed."""
    facts = facts_of("sums-deepseek-v4-mxfp4", ep=2)
    request = replace(CPU, machine=Machine.of("h200"))
    flashinfer = replace(request, backend="flashinfer")
    assert isinstance(judge_layer(facts, flashinfer, EngineSettings(activations="16bit")), LayerPlan)
    verdict = judge_layer(replace(facts, balanced=True), flashinfer, EngineSettings(activations="16bit"))
    assert isinstance(verdict, Rejected)
    assert [str(reason) for reason in verdict.reasons] == [
        "load balancing of experts (EPLB), backend: expects cuda or triton or torch or reference, got flashinfer"
    ]
    assert isinstance(judge_layer(replace(facts, balanced=True), request, EngineSettings()), LayerPlan)
