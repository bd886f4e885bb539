"""Small random models of Transformers in 16 bits, one for each kind of experts module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

__all__ = ["COMMON", "FAMILIES", "build", "routed"]

COMMON = {
    "vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts_per_tok": 3, "max_position_embeddings": 64, "initializer_range": 0.2,
    "intermediate_size": 40, "moe_intermediate_size": 40,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    # transposed, interleaved, with biases and a gate of its own
    "gpt_oss": {"num_local_experts": 5, "swiglu_limit": 0.5, "rope_parameters": YARN},
    # gate rows, then up rows
    "qwen3_moe": {"num_experts": 5, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 5, "hidden_act": "gelu"},
    "glm4_moe": {"n_routed_experts": 5, "first_k_dense_replace": 0},
    "deepseek_v3": {
        "n_routed_experts": 5, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
    # a gate of its own
    "deepseek_v4": {
        "n_routed_experts": 5, "swiglu_limit": 0.5, "num_key_value_heads": 1, "q_lora_rank": 16, "o_groups": 2,
        "o_lora_rank": 8, "compress_ratios": [0], "num_hash_layers": 0, "hc_mult": 2, "qk_rope_head_dim": 8,
    },
    # no gate
    "nemotron_h": {
        "n_routed_experts": 5, "layers_block_type": ["attention", "moe"], "moe_shared_expert_intermediate_size": 40,
    },
}  # fmt: skip


def build(family: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> tuple[Any, Any]:
    """A model and its first experts module, with random weights and biases."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **sizes})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    experts = next(module for module in model.modules() if hasattr(module, "has_gate"))
    return model, experts


def routed(experts: Any, tokens: int = 20, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    ids_TA = torch.rand(tokens, 5).topk(3).indices
    return torch.randn(tokens, 48, dtype=dtype), ids_TA, torch.rand(tokens, 3, dtype=dtype)
