"""Activations are established by evaluating the module's own, and computed as the module computes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polymoe.errors import UnsupportedProblem
from polymoe.problem.activations import Activation, GeGLU, SwiGLU
from polymoe.problem.numerics import relative_error

pytest.importorskip("transformers")

from transformers.activations import ACT2FN

from polymoe.checkpoint.architectures.activation import activation_of
from polymoe.engines.transformers.experts_interface import experts_forward
from support.tiny_models import KNOWS_CONVERSIONS

SIZES = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "hidden_size": 32, "moe_intermediate_size": 24,
    "intermediate_size": 24,
}  # fmt: skip


def build(family: str, name: str, **config: Any) -> Any:
    """An experts module of a family with random weights."""
    torch.manual_seed(0)
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    settings = {"hidden_act": "silu", "swiglu_limit": 0.7, "swiglu_alpha": 1.3, "_experts_implementation": "eager"}
    experts = getattr(module, name)(SimpleNamespace(**SIZES, **{**settings, **config}))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5)
    return experts.requires_grad_(False)


@pytest.mark.parametrize(
    ("family", "name", "activation"),
    [
        ("beam", "BeamExperts", SwiGLU()),  # its own gate, in float32
        ("deepseek_v4", "DeepseekV4Experts", SwiGLU(limit=0.7)),
        ("glm5_next", "Glm5NextTextExperts", SwiGLU(limit=0.7)),  # no act_fn
        ("hy_v4", "HYV4Experts", SwiGLU(limit=0.7)),  # no act_fn
        ("lfm2_moe", "Lfm2MoeExperts", SwiGLU()),  # act_fn is a function, not a module
        ("minimax_m3_vl", "MiniMaxM3VLExperts", SwiGLU(1.3, 1.0, 0.7)),
        pytest.param(
            *("openai_privacy_filter", "OpenAIPrivacyFilterExperts", SwiGLU(1.3, 1.0, 0.7)),  # transposed, concatenated
            marks=pytest.mark.skipif(not KNOWS_CONVERSIONS, reason="Transformers before 5.23 has constants"),
        ),
    ],
)
def test_gates_of_their_own_are_computed_as_the_module_does(family: str, name: str, activation: Activation) -> None:
    experts = build(family, name).to(torch.bfloat16)
    assert activation_of(experts) == activation
    x_TH = torch.randn(7, 32, dtype=torch.bfloat16)
    ids_TA = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    weights_TA = torch.rand(7, 2)
    got = experts_forward(experts, x_TH, ids_TA, weights_TA)
    assert relative_error(got, experts.float()(x_TH.float(), ids_TA, weights_TA)) <= 6e-3


@pytest.mark.parametrize(
    ("hidden_act", "activation"),
    [("gelu_python", GeGLU()), ("gelu_fast", GeGLU("tanh")), ("gelu_accurate", GeGLU("tanh")), ("swish", SwiGLU())],
)
def test_one_function_under_several_names(hidden_act: str, activation: Activation) -> None:
    assert activation_of(build("qwen3_moe", "Qwen3MoeExperts", hidden_act=hidden_act)) == activation


def clamped_far_out(gate: Tensor) -> Tensor:
    return nn.functional.silu(gate.clamp(max=20_000))


@pytest.mark.parametrize("function", [ACT2FN["quick_gelu"], ACT2FN["gelu_10"], ACT2FN["relu"], clamped_far_out])
def test_functions_that_are_only_similar_are_refused(function: Any) -> None:
    experts = build("lfm2_moe", "Lfm2MoeExperts")
    experts.act_fn = function
    with pytest.raises(UnsupportedProblem, match=r"geglu, geglu\(tanh\), swiglu, swiglu\(beta=1\), got"):
        activation_of(experts)


def test_another_function_inside_a_known_gate_is_refused() -> None:
    """The gate of DeepSeek-V4 applies whatever its config names."""
    with pytest.raises(UnsupportedProblem, match=r"swiglu\(limit=0\.7\).*got another gate"):
        activation_of(build("deepseek_v4", "DeepseekV4Experts", hidden_act="gelu"))


@pytest.mark.parametrize(
    ("family", "name"), [("minimax_m3_vl", "MiniMaxM3VLExperts"), ("gpt_oss", "GptOssExperts"), ("beam", "BeamExperts")]
)
def test_gate_and_up_in_another_order_than_declared_are_refused(family: str, name: str) -> None:
    experts = build(family, name)
    experts.is_concatenated = not experts.is_concatenated
    with pytest.raises(UnsupportedProblem, match="got another gate"):
        activation_of(experts)


def test_a_gate_that_fails_is_refused_with_its_error() -> None:
    experts = build("qwen3_moe", "Qwen3MoeExperts")
    del experts.act_fn
    with pytest.raises(UnsupportedProblem, match=r"expected a gate that can be evaluated on a CPU, got .*act_fn"):
        activation_of(experts)
