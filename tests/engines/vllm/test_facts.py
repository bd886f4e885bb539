"""What vLLM says of a layer, in polymoe's terms: why vLLM keeps it, roles, activations, ranges of experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.vllm import facts as facts_module
from polymoe.engines.vllm.facts import facts_of, is_elastic, refusals, role_of
from polymoe.problem.activations import Activation, GeGLU, ReLU2, SwiGLU

WHERE = "model.layers.3.mlp.experts"


def parallel(**changes: Any) -> SimpleNamespace:
    given = {"enable_eplb": False, "all2all_backend": "allgather_reducescatter", "use_all2all_kernels": False}
    return SimpleNamespace(**{**given, "tp_size": 1, "ep_size": 1, "dp_size": 1, **changes})


def moe_config(**changes: Any) -> SimpleNamespace:
    given = {"moe_parallel_config": parallel(), "moe_backend": "auto", "is_lora_enabled": False}
    return SimpleNamespace(**{**given, **changes})


def vllm_config(**changes: Any) -> SimpleNamespace:
    offload = SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0))
    given = {
        "model_config": SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]),
        "load_config": SimpleNamespace(load_format="auto"),
        "offload_config": offload,
        "kv_transfer_config": None,
    }
    return SimpleNamespace(**{**given, **changes})


def layer(**changes: Any) -> SimpleNamespace:
    manager = SimpleNamespace(num_fused_shared_experts=0, expert_map=None)
    return SimpleNamespace(**{"expert_map_manager": manager, "apply_router_weight_on_input": False, **changes})


def reasons(moe: Any = None, config: Any = None, of: Any = None, settings: EngineSettings | None = None) -> list[str]:
    found = refusals(of or layer(), moe or moe_config(), config or vllm_config(), settings or EngineSettings(), WHERE)
    return [str(reason) for reason in found.found]


def test_nothing_rules_polymoe_out() -> None:
    assert reasons() == []
    gathered = parallel(use_all2all_kernels=True, dp_size=2, ep_size=2)
    assert reasons(moe_config(moe_parallel_config=gathered)) == []


def test_all_to_all_backends() -> None:
    """DeepEP was never run: only a user who requires polymoe gets it."""
    require = EngineSettings(mode="require")

    def found(backend: str, settings: EngineSettings, hidden: int = 4096) -> list[str]:
        split = parallel(use_all2all_kernels=True, all2all_backend=backend, dp_size=2, ep_size=2)
        return reasons(moe_config(moe_parallel_config=split, hidden_dim=hidden), settings=settings)

    (reason,) = found("deepep_high_throughput", EngineSettings())
    assert reason == (
        "--all2all-backend: expects allgather_reducescatter, or deepep_high_throughput or deepep_v2 or "
        "deepep_low_latency with POLYMOE=require, got deepep_high_throughput"
    )
    for backend in ("allgather_reducescatter", "deepep_high_throughput", "deepep_v2", "deepep_low_latency"):
        assert found(backend, require) == []
    assert found("deepep_v2", require, hidden=2880) == [
        "hidden size: expects a multiple of 256 with deepep_v2, got 2880"
    ]
    (reason,) = found("deepep_low_latency", require, hidden=2880)
    assert reason.startswith("hidden size: expects one of 2048, 2560, ")
    for backend in ("mori_low_latency", "nixl_ep", "passthrough", "flashinfer_nvlink_one_sided"):
        (reason,) = found(backend, require)
        assert reason.endswith(f"got {backend}")


OFFLOADED = SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=1), prefetch=SimpleNamespace(offload_group_size=0))
SHARED = SimpleNamespace(num_fused_shared_experts=1, expert_map=None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"moe": moe_config(moe_backend="marlin")}, "--moe-backend: expects auto, got marlin"),
        ({"moe": moe_config(is_lora_enabled=True)}, "LoRA"),
        ({"of": layer(expert_map_manager=SHARED)}, "shared experts among the routed ones: expects 0, got 1"),
        ({"config": vllm_config(offload_config=OFFLOADED)}, "offloading of weights to the CPU"),
        ({"config": vllm_config(load_config=SimpleNamespace(load_format="tensorizer"))}, "--load-format"),
        ({"config": vllm_config(model_config=SimpleNamespace(architectures=["FlintForCausalLM"]))}, "model"),
        (
            {
                "config": vllm_config(model_config=SimpleNamespace(architectures=[], enable_sleep_mode=True)),
                "settings": EngineSettings(expert_memory="4slots"),
            },
            "POLYMOE_EXPERT_MEMORY: expects an engine without --enable-sleep-mode",
        ),
        (
            {
                "config": vllm_config(parallel_config=SimpleNamespace(enable_dbo=True)),
                "settings": EngineSettings(expert_memory="4slots"),
            },
            "POLYMOE_EXPERT_MEMORY: expects an engine without --enable-dbo",
        ),
        ({"settings": EngineSettings(layers="!3")}, f"POLYMOE_LAYERS: expects !3, got {WHERE}"),
    ],
    ids=str,
)
def test_reasons_why_vllm_keeps_a_layer(given: dict[str, Any], said: str) -> None:
    (reason,) = reasons(**given)
    assert reason.startswith(said)


def test_what_load_balancing_rules_out(monkeypatch: pytest.MonkeyPatch) -> None:
    balanced = moe_config(moe_parallel_config=parallel(enable_eplb=True, ep_size=2))
    monkeypatch.setattr(facts_module, "missing_hooks", lambda _: ())
    assert reasons(balanced) == []
    elastic = vllm_config(parallel_config=SimpleNamespace(enable_elastic_ep=True))
    assert is_elastic(elastic)
    assert not is_elastic(vllm_config())
    settings = EngineSettings(layers="0-7", expert_memory="4slots")
    assert reasons(balanced, elastic, settings=settings) == [
        "elastic expert parallelism: not supported",
        "POLYMOE_LAYERS: expects none with --enable-eplb, got 0-7",
        "POLYMOE_EXPERT_MEMORY: expects none with --enable-eplb, got 4slots",
    ]
    monkeypatch.setattr(facts_module, "missing_hooks", lambda hooks: (hooks[0].path,))
    (lacks,) = reasons(balanced)
    assert lacks.startswith("load balancing of experts (EPLB) in a vLLM without vllm.")
    assert lacks.endswith("RoutedExperts.get_expert_weights: not supported")


@pytest.mark.parametrize(
    ("role", "found"), [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "mixed"), (None, "mixed")]
)
def test_workers_of_a_disaggregated_deployment_have_a_role(role: str | None, found: str) -> None:
    assert role_of(vllm_config(kv_transfer_config=SimpleNamespace(kv_role=role))) == found
    assert role_of(vllm_config()) == "mixed"


class UnquantizedFusedMoEMethod:
    """A method of this name stores plain tensors."""


def facts(name: str = "silu", expert_map: list[int] | None = None, **changes: Any) -> Any:
    about = {
        "activation": SimpleNamespace(value=name), "has_bias": False, "hidden_dim": 64, "num_experts": 4,
        "experts_per_token": 2, "in_dtype": torch.bfloat16, "swiglu_alpha": None, "swiglu_beta": None,
        "swiglu_limit": None, **changes,
    }  # fmt: skip
    manager = SimpleNamespace(expert_map=None if expert_map is None else torch.tensor(expert_map))
    of = layer(expert_map_manager=manager)
    tensors = dict(nn.ParameterDict({"w13_weight": torch.empty(4, 64, 64), "w2_weight": torch.empty(4, 64, 32)}))
    return facts_of(of, UnquantizedFusedMoEMethod(), moe_config(**about), tensors, 32, WHERE, invariant=False)


@pytest.mark.parametrize(
    ("name", "constants", "found"),
    [
        ("silu", {}, SwiGLU()),
        ("silu", {"swiglu_limit": 10}, SwiGLU(limit=10.0)),
        ("swigluoai", {}, SwiGLU(1.702, 1.0, 7.0)),
        ("swigluoai_uninterleave", {"swiglu_alpha": 1.5}, SwiGLU(1.5, 1.0, 7.0)),
        ("gelu", {}, GeGLU()),
        ("gelu_tanh", {}, GeGLU("tanh")),
        ("relu2_no_mul", {}, ReLU2()),
        ("situ", {}, None),
    ],
)
def test_activations(name: str, constants: dict[str, Any], found: Activation | None) -> None:
    about = facts(name, **constants)
    assert about.activation == found
    assert about.interleaved == (name == "swigluoai")
    assert [reason.what for reason in about.refused] == ([] if found else ["activation"])


@pytest.mark.parametrize(
    ("expert_map", "first"),
    [(None, 0), ([-1, -1, 0, 1], 2), ([0, -1, 1, -1], None), ([-1, 1, 0, -1], None), ([-1, -1, -1, -1], None)],
)
def test_experts_of_a_rank_are_a_range_or_mapped(expert_map: list[int] | None, first: int | None) -> None:
    assert facts(expert_map=expert_map).first_expert == first
