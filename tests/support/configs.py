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


def _sized(s: Config, model_type: str, *architectures: str, **own: Any) -> Config:
    """What the configs of all these models have in common."""
    return {
        **({"architectures": list(architectures)} if architectures else {}),
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": s["hidden"],
        "num_experts_per_tok": s["top_k"],
        "num_hidden_layers": s["layers"],
        "torch_dtype": "bfloat16",
    } | own


def _routed(s: Config, architecture: str, model_type: str, **own: Any) -> Config:
    """What DeepSeek-V3's config and those that follow it have in common."""
    sizes = {"moe_intermediate_size": s["intermediate"], "n_routed_experts": s["experts"], "n_shared_experts": 1}
    others = {"num_nextn_predict_layers": 1, "norm_topk_prob": True}
    return _sized(s, model_type, f"{architecture}ForCausalLM", **sizes, **others) | own


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
    sizes = {"intermediate_size": 3 * s["hidden"], "moe_intermediate_size": s["intermediate"]}
    experts = {"num_experts": s["experts"], "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return _sized(s, "qwen3_moe", "Qwen3MoeForCausalLM", **sizes, **experts) | changed


def _wrapped(model_type: str, text: Config, **changed: Any) -> Config:
    return {"model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 16}} | changed


def _mixtral(s: Config, **changed: Any) -> Config:
    sizes = {"intermediate_size": s["intermediate"], "num_local_experts": s["experts"]}
    return _sized(s, "mixtral", "MixtralForCausalLM", **sizes) | changed


def _llama4(s: Config, **changed: Any) -> Config:
    sizes = {"intermediate_size": s["intermediate"], "intermediate_size_mlp": 2 * s["intermediate"]}
    experts = {"interleave_moe_layer_step": 2, "num_local_experts": s["experts"], "num_experts_per_tok": 1}
    text = _sized(s, "llama4_text", **sizes, **experts)
    return _wrapped("llama4", text, architectures=["Llama4ForConditionalGeneration"]) | changed


def _gpt_oss(s: Config, **changed: Any) -> Config:
    experts = {"num_local_experts": s["experts"], "experts_per_token": s["top_k"], "swiglu_limit": 7.0}
    return _sized(s, "gpt_oss", "GptOssForCausalLM", intermediate_size=s["intermediate"], **experts) | changed


DENSE = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": DENSE}
FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8_UE8M0 = FP8_BLOCK | {"scale_fmt": "ue8m0"}
MIXTRAL_IGNORE = ["model.layers.0.block_sparse_moe.gate", "lm_head"]
FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": MIXTRAL_IGNORE}
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


INT4_GROUPS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT4_G32 = INT4_GROUPS | {"dynamic": False, "actorder": None}
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


def _modelopt(algorithm: str, ignore: list[str], **more: Any) -> Config:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignore, **more}


def _deepseek_v4_nvfp4(s: Config) -> Config:
    nvfp4 = {"quant_algo": "NVFP4", "group_size": 16}
    layers = {f"layers.{i}.ffn.experts": nvfp4 for i in range(s["layers"])}
    mixed = {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16, "quantized_layers": layers}
    return _quantized(_deepseek_v4(s, expert_dtype="fp4"), FP8_UE8M0 | mixed | {"ignore": ["lm_head", "mtp.*"]})


def _kimi_k25(s: Config) -> Config:
    ignore = ["re:.*lm_head.*", *KIMI_IGNORE[1:], "re:vision_tower.*", "re:mm_projector.*"]
    text = _quantized(_kimi(s), CT_INT4 | {"ignore": ignore})
    return _wrapped("kimi_k25", text, architectures=["KimiK25ForConditionalGeneration"])


def _nemotron_nvfp4(s: Config) -> Config:
    ignore = ["backbone.embeddings", "lm_head", "backbone.layers.*.mixer.gate", "mtp*"]
    producer = {"name": "modelopt", "version": "0.43.0"}
    section = _modelopt("MIXED_PRECISION", ignore, producer=producer, quantized_layers=_nemotron_layers(s))
    return _quantized(_nemotron(s), section)


def _qwen_fp8(s: Config) -> Config:
    parts = [f"model.layers.{i}.{part}" for i in range(s["layers"]) for part in ("mlp.gate", "input_layernorm")]
    return _quantized(_qwen(s), FP8_BLOCK | {"modules_to_not_convert": ["lm_head", *parts]})


QWEN35_IGNORE = ["lm_head", "model.visual", "mlp.gate", "mlp.shared_expert_gate"]
GLM_IGNORE = ["lm_head", "model.layers.0*", "model.layers.*.self_attn*", "model.layers.92*"]
GLM_NVFP4 = _modelopt("NVFP4", GLM_IGNORE, group_size=16, producer={"name": "modelopt", "version": "0.39.0"})
GLM_AIR_IGNORE = ["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*"]
CT_NVFP4 = compressed("nvfp4-pack-quantized", NVFP4_WEIGHTS, NVFP4_WEIGHTS | {"dynamic": "local"}, GLM_AIR_IGNORE)
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "checkpoint_format": "gptq",
    "dynamic": {r"-:.*mlp\.gate$": {}, r"-:.*self_attn.*": {}},
}  # fmt: skip
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
    "modules_to_not_convert": ["mlp.gate"],
}  # fmt: skip
LLAMA4_PARTS = ("lm_head", "self_attn", "router", "vision_model", "multi_modal_projector", "shared_expert")

CONFIGS = {
    "gpt-oss-mxfp4": lambda s: _quantized(_gpt_oss(s), MXFP4),
    "gpt-oss-bf16": _gpt_oss,
    "deepseek-v3-fp8": lambda s: _quantized(_deepseek(s), FP8_BLOCK),
    "deepseek-v3.1-ue8m0": lambda s: _quantized(_deepseek(s), FP8_UE8M0),
    "deepseek-v4-fp4": lambda s: _quantized(_deepseek_v4(s, expert_dtype="fp4"), FP8_UE8M0),
    "deepseek-v4-base-fp8": lambda s: _quantized(_deepseek_v4(s, expert_dtype="fp8"), FP8_UE8M0),
    "deepseek-v4-nvfp4": _deepseek_v4_nvfp4,
    "qwen3-mxfp8": lambda s: _quantized(_qwen(s), _modelopt("MXFP8", ["lm_head", "*mlp.gate"], group_size=32)),
    "kimi-k2-bf16": _kimi,
    "kimi-k2-thinking-int4": lambda s: _quantized(_kimi(s), CT_INT4),
    "kimi-k2.5-int4": _kimi_k25,
    "nemotron-3-nvfp4": _nemotron_nvfp4,
    "nemotron-3-bf16": _nemotron,
    "glm-4.7-fp8-channel": lambda s: _quantized(
        _glm(s), _fp8_channel("lm_head", "re:.*mlp.gate$", "model.layers.3.mlp.shared_experts.up_proj")
    ),
    "glm-4.7-nvfp4": lambda s: _quantized(_glm(s), GLM_NVFP4),
    "glm-4.5-air-nvfp4-ct": lambda s: _quantized(_glm(s), CT_NVFP4),
    "qwen3-fp8": _qwen_fp8,
    "qwen3-bf16": _qwen,
    "qwen3-gptq": lambda s: _quantized(_qwen(s, torch_dtype="float16"), GPTQ),
    "qwen3-awq": lambda s: _quantized(_qwen(s, torch_dtype="float16"), AWQ),
    "qwen3-vl-bf16": lambda s: _wrapped("qwen3_vl_moe", _qwen(s, model_type="qwen3_vl_moe_text")),
    "qwen3.5-bf16": lambda s: _wrapped("qwen3_5_moe", _qwen(s, model_type="qwen3_5_moe_text")),
    "qwen3.5-fp8": lambda s: _quantized(
        CONFIGS["qwen3.5-bf16"](s), FP8_BLOCK | {"modules_to_not_convert": QWEN35_IGNORE}
    ),
    "qwen3-next-bf16": lambda s: _qwen(s, model_type="qwen3_next", full_attention_interval=4),
    "mixtral-bf16": _mixtral,
    "mixtral-fp8-static": lambda s: _quantized(_mixtral(s), FP8_STATIC),
    "llama4-bf16": _llama4,
    "llama4-fp8-channel": lambda s: _quantized(_llama4(s), _fp8_channel(*(f"re:.*{part}" for part in LLAMA4_PARTS))),
}


def config(name: str, **sizes: int) -> Config:
    """The config called ``name``; sizes: hidden, intermediate, experts, top_k, layers (and latent, for Nemotron)."""
    unknown = set(sizes) - {*DEFAULTS, "latent"}
    assert not unknown, f"no such sizes: {unknown}"
    return CONFIGS[name](DEFAULTS | sizes)
