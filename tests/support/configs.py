"""Small configs with the keys, nesting and quantization sections of the checkpoints that polymoe reads.

``config("gpt-oss-mxfp4")`` is small enough to write to disk; sizes may be overridden by keyword. Dense layers, layer
kinds, routers and ignore lists are those of the real files.
"""

from __future__ import annotations

import copy
from typing import Any

Config = dict[str, Any]

DEFAULTS = {"hidden": 256, "intermediate": 128, "experts": 8, "top_k": 2, "layers": 4}
LATENT = 64  # Nemotron's experts' own width


def _routed(s: Config, architecture: str, model_type: str, **own: Any) -> Config:
    """What DeepSeek-V3's config and those that follow it have in common."""
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": s["hidden"],
        "moe_intermediate_size": s["intermediate"],
        "n_routed_experts": s["experts"],
        "n_shared_experts": 1,
        "num_experts_per_tok": s["top_k"],
        "num_hidden_layers": s["layers"],
        "num_nextn_predict_layers": 1,
        "norm_topk_prob": True,
        "torch_dtype": "bfloat16",
    } | own


def _deepseek(s: Config, **changed: Any) -> Config:
    own = {"intermediate_size": 2 * s["hidden"], "moe_layer_freq": 1, "first_k_dense_replace": 3}
    routing = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5}
    groups = {"n_group": 4, "topk_group": 2}
    return _routed(s, "DeepseekV3", "deepseek_v3", **own, **routing, **groups) | changed


def _kimi(s: Config, **changed: Any) -> Config:
    kimi = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "first_k_dense_replace": 1}
    return _deepseek(s, **({"model_type": "kimi_k2", "num_nextn_predict_layers": 0} | kimi | changed))


def _deepseek_v4(s: Config, **changed: Any) -> Config:
    routing = {"scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "routed_scaling_factor": 1.5}
    groups = {"n_group": 8, "topk_group": 4}  # left from V3's template; V4 has no groups
    own = {"num_hash_layers": 3, "swiglu_limit": 10.0}
    return _routed(s, "DeepseekV4", "deepseek_v4", **routing, **groups, **own) | changed


def _nemotron(s: Config, **changed: Any) -> Config:
    own = {
        "hybrid_override_pattern": ("ME*E" * s["layers"])[: s["layers"]],
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "moe_latent_size": s.get("latent", LATENT),
        "moe_shared_expert_intermediate_size": 2 * s["intermediate"],
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 5.0,
        "mtp_hybrid_override_pattern": "*E",
    }
    described = _routed(s, "NemotronH", "nemotron_h", **own)
    del described["hidden_act"]
    return described | changed


def _glm(s: Config, **changed: Any) -> Config:
    own = {"first_k_dense_replace": 3, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}
    return _routed(s, "Glm4Moe", "glm4_moe", **own) | changed


def _qwen(s: Config, **changed: Any) -> Config:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "hidden_size": s["hidden"],
        "intermediate_size": 3 * s["hidden"],
        "moe_intermediate_size": s["intermediate"],
        "norm_topk_prob": True,
        "num_experts": s["experts"],
        "num_experts_per_tok": s["top_k"],
        "num_hidden_layers": s["layers"],
        "torch_dtype": "bfloat16",
    } | changed


def _wrapped(model_type: str, text: Config, **changed: Any) -> Config:
    return {"model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 16}} | changed


def _mixtral(s: Config, **changed: Any) -> Config:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": s["hidden"],
        "intermediate_size": s["intermediate"],
        "num_local_experts": s["experts"],
        "num_experts_per_tok": s["top_k"],
        "num_hidden_layers": s["layers"],
        "torch_dtype": "bfloat16",
    } | changed


def _llama4(s: Config, **changed: Any) -> Config:
    text = {
        "model_type": "llama4_text",
        "hidden_act": "silu",
        "hidden_size": s["hidden"],
        "intermediate_size": s["intermediate"],
        "intermediate_size_mlp": 2 * s["intermediate"],
        "interleave_moe_layer_step": 2,
        "num_local_experts": s["experts"],
        "num_experts_per_tok": 1,
        "num_hidden_layers": s["layers"],
        "torch_dtype": "bfloat16",
    }
    return _wrapped("llama4", text, architectures=["Llama4ForConditionalGeneration"]) | changed


def _gpt_oss(s: Config, **changed: Any) -> Config:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "experts_per_token": s["top_k"],
        "hidden_act": "silu",
        "hidden_size": s["hidden"],
        "intermediate_size": s["intermediate"],
        "num_experts_per_tok": s["top_k"],
        "num_hidden_layers": s["layers"],
        "num_local_experts": s["experts"],
        "swiglu_limit": 7.0,
        "torch_dtype": "bfloat16",
    } | changed


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8_STATIC = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "ignored_layers": ["model.layers.0.block_sparse_moe.gate", "lm_head"],
}
KIMI_IGNORE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]


def compressed(format: str, weights: Config, inputs: Config | None, ignore: list[str]) -> Config:
    """A compressed-tensors section with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


INT4_G32 = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "dynamic": False,
    "actorder": None,
}
CT_INT4 = compressed("pack-quantized", INT4_G32, None, KIMI_IGNORE)
FP8_CHANNEL = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
FP8_PER_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}


def _fp8_channel(*ignore: str) -> Config:
    return compressed("float-quantized", FP8_CHANNEL, FP8_PER_TOKEN, list(ignore))


def _nemotron_layers(s: Config) -> Config:
    """ModelOpt's per-layer map: routed experts NVFP4, shared experts and Mamba FP8."""
    layers: Config = {}
    for i, kind in enumerate(("ME*E" * s["layers"])[: s["layers"]]):
        stem = f"backbone.layers.{i}.mixer"
        if kind == "M":
            layers[f"{stem}.in_proj"] = {"quant_algo": "FP8"}
        if kind == "E":
            layers[f"{stem}.shared_experts.up_proj"] = {"quant_algo": "FP8"}
            for e in range(s["experts"]):
                for projection in ("up_proj", "down_proj"):
                    layers[f"{stem}.experts.{e}.{projection}"] = {"quant_algo": "NVFP4", "group_size": 16}
    return layers


def _quantized(base: Config, section: Config) -> Config:
    return base | {"quantization_config": copy.deepcopy(section)}


CONFIGS = {
    "gpt-oss-mxfp4": lambda s: _quantized(_gpt_oss(s), MXFP4),
    "gpt-oss-bf16": _gpt_oss,
    "deepseek-v3-fp8": lambda s: _quantized(_deepseek(s), FP8_BLOCK),
    "deepseek-v3.1-ue8m0": lambda s: _quantized(_deepseek(s), FP8_BLOCK | {"scale_fmt": "ue8m0"}),
    "deepseek-v4-fp4": lambda s: _quantized(_deepseek_v4(s, expert_dtype="fp4"), FP8_BLOCK | {"scale_fmt": "ue8m0"}),
    "deepseek-v4-base-fp8": lambda s: _quantized(
        _deepseek_v4(s, expert_dtype="fp8"), FP8_BLOCK | {"scale_fmt": "ue8m0"}
    ),
    "deepseek-v4-nvfp4": lambda s: _quantized(
        _deepseek_v4(s, expert_dtype="fp4"),
        FP8_BLOCK
        | {
            "scale_fmt": "ue8m0",
            "quant_algo": "MIXED_PRECISION",
            "moe_quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": ["lm_head", "mtp.*"],
            "quantized_layers": {
                f"layers.{i}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(s["layers"])
            },
        },
    ),
    "qwen3-mxfp8": lambda s: _quantized(
        _qwen(s),
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32, "ignore": ["lm_head", "*mlp.gate"]},
    ),
    "kimi-k2-bf16": _kimi,
    "kimi-k2-thinking-int4": lambda s: _quantized(_kimi(s), CT_INT4),
    "kimi-k2.5-int4": lambda s: _wrapped(
        "kimi_k25",
        _quantized(
            _kimi(s),
            CT_INT4 | {"ignore": ["re:.*lm_head.*", *KIMI_IGNORE[1:], "re:vision_tower.*", "re:mm_projector.*"]},
        ),
        architectures=["KimiK25ForConditionalGeneration"],
    ),
    "nemotron-3-nvfp4": lambda s: _quantized(
        _nemotron(s),
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "producer": {"name": "modelopt", "version": "0.43.0"},
            "ignore": ["backbone.embeddings", "lm_head", "backbone.layers.*.mixer.gate", "mtp*"],
            "quantized_layers": _nemotron_layers(s),
        },
    ),
    "nemotron-3-bf16": _nemotron,
    "glm-4.7-fp8-channel": lambda s: _quantized(
        _glm(s), _fp8_channel("lm_head", "re:.*mlp.gate$", "model.layers.3.mlp.shared_experts.up_proj")
    ),
    "glm-4.7-nvfp4": lambda s: _quantized(
        _glm(s),
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "producer": {"name": "modelopt", "version": "0.39.0"},
            "group_size": 16,
            "ignore": ["lm_head", "model.layers.0*", "model.layers.*.self_attn*", "model.layers.92*"],
        },
    ),
    "glm-4.5-air-nvfp4-ct": lambda s: _quantized(
        _glm(s),
        compressed(
            "nvfp4-pack-quantized",
            NVFP4_WEIGHTS,
            NVFP4_WEIGHTS | {"dynamic": "local"},
            ["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*"],
        ),
    ),
    "qwen3-fp8": lambda s: _quantized(
        _qwen(s),
        FP8_BLOCK
        | {
            "modules_to_not_convert": [
                "lm_head",
                *(f"model.layers.{i}.{part}" for i in range(s["layers"]) for part in ("mlp.gate", "input_layernorm")),
            ]
        },
    ),
    "qwen3-bf16": _qwen,
    "qwen3-gptq": lambda s: _quantized(
        _qwen(s, torch_dtype="float16"),
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "desc_act": False,
            "checkpoint_format": "gptq",
            "dynamic": {r"-:.*mlp\.gate$": {}, r"-:.*self_attn.*": {}},
        },
    ),
    "qwen3-awq": lambda s: _quantized(
        _qwen(s, torch_dtype="float16"),
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": ["mlp.gate"],
        },
    ),
    "qwen3-vl-bf16": lambda s: _wrapped("qwen3_vl_moe", _qwen(s, model_type="qwen3_vl_moe_text")),
    "qwen3.5-bf16": lambda s: _wrapped("qwen3_5_moe", _qwen(s, model_type="qwen3_5_moe_text")),
    "qwen3.5-fp8": lambda s: _quantized(
        _wrapped("qwen3_5_moe", _qwen(s, model_type="qwen3_5_moe_text")),
        FP8_BLOCK | {"modules_to_not_convert": ["lm_head", "model.visual", "mlp.gate", "mlp.shared_expert_gate"]},
    ),
    "qwen3-next-bf16": lambda s: _qwen(s, model_type="qwen3_next", full_attention_interval=4),
    "mixtral-bf16": _mixtral,
    "mixtral-fp8-static": lambda s: _quantized(_mixtral(s), FP8_STATIC),
    "llama4-bf16": _llama4,
    "llama4-fp8-channel": lambda s: _quantized(
        _llama4(s),
        _fp8_channel(
            "re:.*lm_head",
            "re:.*self_attn",
            "re:.*router",
            "re:.*vision_model",
            "re:.*multi_modal_projector",
            "re:.*shared_expert",
        ),
    ),
}


def config(name: str, **sizes: int) -> Config:
    """The config called ``name``; sizes: hidden, intermediate, experts, top_k, layers (and latent, for Nemotron)."""
    unknown = set(sizes) - {*DEFAULTS, "latent"}
    assert not unknown, f"no such sizes: {unknown}"
    return CONFIGS[name](DEFAULTS | sizes)
