"""Every router against the module of Transformers that it stands for, and the side its weights go to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from polymoe.problem.activations import ReLU2, SwiGLU
from polymoe.problem.routing import (
    HashTopK,
    Router,
    SigmoidInput,
    SigmoidTopK,
    SoftmaxTopK,
    SqrtSoftplusTopK,
    TopKSoftmax,
)

pytest.importorskip("transformers")

T, H, V = 64, 24, 50
SIGMOID = {"num_experts_per_tok": 4, "routed_scaling_factor": 2.5, "n_routed_experts": 16}
GROUPED = SIGMOID | {"n_group": 4, "topk_group": 2}
NEMOTRON = {"n_routed_experts": 512, "num_experts_per_tok": 22, "routed_scaling_factor": 5.0}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3 = {"num_experts": 16, "num_experts_per_tok": 4}
V4 = {"n_routed_experts": 16, "num_experts_per_tok": 6, "routed_scaling_factor": 1.5, "vocab_size": V}


@dataclass(frozen=True)
class Case:
    """A Transformers router, the config it is built with, and ours."""

    family: str
    config: str
    gate: str
    options: dict[str, Any]
    router: Router

    def build(self) -> torch.nn.Module:
        module = import_module(f"transformers.models.{self.family}.modeling_{self.family}")
        config = getattr(import_module("transformers"), self.config)(hidden_size=H, **self.options)
        gate = getattr(module, self.gate)(config)
        generator = torch.Generator().manual_seed(0)
        for name, tensor in gate.state_dict().items():
            if name == "tid2eid":
                experts = torch.rand(V, 16, generator=generator).argsort(-1)[:, : tensor.shape[1]]
                tensor.copy_(experts)
            else:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * (0.3 if tensor.dim() == 2 else 1.0))
        return gate.eval()

    def __str__(self) -> str:
        return f"{self.gate}-{self.router}"


CASES = [
    Case("gpt_oss", "GptOssConfig", "GptOssTopKRouter", {**LOCAL, "num_experts_per_tok": 4}, TopKSoftmax(4)),
    *(
        Case("deepseek_v3", "DeepseekV3Config", "DeepseekV3TopkRouter", GROUPED | {"norm_topk_prob": renormalize},
             SigmoidTopK(4, n_group=4, topk_group=2, renormalize=renormalize, scaling=2.5))
        for renormalize in (True, False)
    ),
    Case("glm4_moe", "Glm4MoeConfig", "Glm4MoeTopkRouter", SIGMOID, SigmoidTopK(4, scaling=2.5)),
    Case("nemotron_h", "NemotronHConfig", "NemotronHTopkRouter", NEMOTRON, SigmoidTopK(22, scaling=5.0)),
    Case("deepseek_v4", "DeepseekV4Config", "DeepseekV4TopKRouter", V4, SqrtSoftplusTopK(6, scaling=1.5)),
    Case("deepseek_v4", "DeepseekV4Config", "DeepseekV4HashRouter", V4, HashTopK(6, scaling=1.5)),
    *(
        Case("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter", QWEN3 | {"norm_topk_prob": renormalize},
             SoftmaxTopK(4, renormalize=renormalize))
        for renormalize in (True, False)
    ),
    Case("mixtral", "MixtralConfig", "MixtralTopKRouter", LOCAL, SoftmaxTopK(2, renormalize=True)),
    *(
        Case("llama4", "Llama4TextConfig", "Llama4Router", {**LOCAL, "num_experts_per_tok": top_k}, SigmoidInput(top_k))
        for top_k in (1, 2)
    ),
]  # fmt: skip


def dense(topk_ids_TA: Tensor, topk_weights_TA: Tensor, experts: int) -> Tensor:
    """Weights by expert, NaN where one is not chosen: equal exactly for the same experts with the same weights."""
    return torch.full((len(topk_ids_TA), experts), torch.nan).scatter(1, topk_ids_TA, topk_weights_TA)


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_router_equals_transformers(case: Case) -> None:
    gate, router = case.build(), case.router
    generator = torch.Generator().manual_seed(1)
    x_TH = torch.randn(T, H, generator=generator)
    token_ids_T = torch.randint(0, V, (T,), generator=generator)
    state = gate.state_dict()
    logits_TE = torch.nn.functional.linear(x_TH, state["weight"], state.get("bias"))
    experts = logits_TE.shape[1]

    if router.uses_token_table:
        _, weights, ids = gate(x_TH, token_ids_T)
        theirs_TE = dense(ids, weights, experts)
    elif isinstance(router, SigmoidInput):
        scores_TE, _ = gate(x_TH)  # a sigmoid is above 0 for every chosen expert
        theirs_TE = scores_TE.masked_fill(scores_TE == 0, torch.nan)
    else:
        _, weights, ids = gate(x_TH)
        theirs_TE = dense(ids, weights, experts)

    ours = router(
        logits_TE,
        correction_bias_E=state.get("e_score_correction_bias"),
        token_ids_T=token_ids_T,
        tid2eid_VA=state.get("tid2eid"),
    )
    torch.testing.assert_close(dense(*ours, experts), theirs_TE, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert (~theirs_TE.isnan()).sum(-1).tolist() == [router.top_k] * T
    if "e_score_correction_bias" in state:  # the case must tell a router that ignores the bias
        unbiased = router(logits_TE, correction_bias_E=torch.zeros(experts))
        assert (dense(*unbiased, experts).isnan() != theirs_TE.isnan()).any()


def randomize(module: torch.nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    for tensor in module.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.4)
    return dict(module.state_dict())


def routed(
    x_TH: Tensor, routing: tuple[Tensor, Tensor], weight_on: str, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Sum of the chosen experts' outputs, token by token."""
    rows = []
    for x_H, ids_A, weights_A in zip(x_TH, *routing, strict=True):
        pairs = list(zip(ids_A.tolist(), weights_A, strict=True))
        if weight_on == "input":
            rows.append(torch.stack([expert(e, w * x_H) for e, w in pairs]).sum(0))
        else:
            rows.append(torch.stack([w * expert(e, x_H) for e, w in pairs]).sum(0))
    return torch.stack(rows)


@torch.no_grad()
def test_llama4_layer_weights_the_input() -> None:
    modeling = import_module("transformers.models.llama4.modeling_llama4")
    config = import_module("transformers").Llama4TextConfig(
        hidden_size=H, intermediate_size=16, num_local_experts=8, num_experts_per_tok=2
    )
    moe = modeling.Llama4TextMoe(config)
    state = randomize(moe)
    x_TH = torch.randn(8, H, generator=torch.Generator().manual_seed(3))
    theirs_TH = moe(x_TH)[0] - moe.shared_expert(x_TH)

    def expert(e: int, x_H: Tensor) -> Tensor:
        gate_F, up_F = (x_H @ state["experts.gate_up_proj"][e]).chunk(2)
        return SwiGLU()(gate_F, up_F) @ state["experts.down_proj"][e]

    router = SigmoidInput(2)
    routing = router(x_TH @ state["router.weight"].T)
    torch.testing.assert_close(routed(x_TH, routing, router.weight_on, expert), theirs_TH, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(routed(x_TH, routing, "output", expert), theirs_TH, rtol=1e-2, atol=1e-3)


@torch.no_grad()
def test_nemotron_latent_layer() -> None:
    modeling = import_module("transformers.models.nemotron_h.modeling_nemotron_h")
    config = import_module("transformers").NemotronHConfig(
        hidden_size=H,
        n_routed_experts=16,
        num_experts_per_tok=5,
        routed_scaling_factor=2.0,
        moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=8,
        moe_latent_size=10,
    )
    moe = modeling.NemotronHMoE(config)
    state = randomize(moe)
    x_TH = torch.randn(8, H, generator=torch.Generator().manual_seed(3))

    def expert(e: int, latent: Tensor) -> Tensor:
        return state["experts.down_proj"][e] @ ReLU2()(state["experts.up_proj"][e] @ latent)

    router = SigmoidTopK(5, scaling=2.0)
    routing = router(x_TH @ state["gate.weight"].T, correction_bias_E=state["gate.e_score_correction_bias"])
    latent = routed(x_TH @ state["fc1_latent_proj.weight"].T, routing, router.weight_on, expert)
    ours_TH = latent @ state["fc2_latent_proj.weight"].T + moe.shared_experts(x_TH)
    torch.testing.assert_close(ours_TH, moe(x_TH[None])[0], rtol=1e-4, atol=1e-4)
