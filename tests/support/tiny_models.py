"""A tiny model of every architecture of the installed Transformers that has its experts interface.

Nothing is listed: sizes are those keys of a config's defaults whose names say what they are. ``EXTRA`` has what a few
configs need besides, mostly because their defaults alone build no model of experts.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from packaging.version import Version
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

__all__ = ["HIDDEN", "INTERMEDIATE", "KNOWS_CONVERSIONS", "OTHER_GENERATION", "architectures", "tiny_config"]

KNOWS_CONVERSIONS = Version(transformers.__version__) >= Version("5.23")
"""Whether this Transformers has the functions that name the tensors of models without a row in a table of families."""

HIDDEN, INTERMEDIATE = 64, 32
"""2 F = H, so that shapes do not tell a stacked matrix from its transpose."""

_SIZES = (
    (r".*vocab_size(_per_layer_input)?", 96),
    (r"num_hidden_layers|num_layers|n_layers|max_window_layers|depth|encoder_layers|decoder_layers", 2),
    (r"(num|n)_(dense|hash)_layers|first_k_dense_replace|num_nextn_predict_layers", 0),
    (r"(.*_)?head_dim", 16),
    (r".*intermediate_size|.*ffn_dim|mlp_dim", INTERMEDIATE),
    (r"hidden_size|d_model|embed_dim|out_hidden_size|projection_dim|.*_hidden_size", HIDDEN),
    (r"hidden_size_per_layer_input", 16),
    (r"num_heads|n_heads|(.*_)?(num_key_value|num_attention|attention)_heads", 4),
    (r"num_local_experts|num_experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r".*lora_rank", 16),
)

_GEMMA = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": INTERMEDIATE}

EXTRA: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma": {"text_config": _GEMMA},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
        "vision_config": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [INTERMEDIATE, 96],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0, "mrope_section": [3, 3, 2]},
        },
    },
    "flint": {"mlp_only_layers": []},
    "gemma4": {"text_config": _GEMMA},
    "glm4v_moe": {"text_config": {"rope_parameters": {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 32, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 16},
    "hy_v4": {"indexer_types": ["full", "full"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mimo_v2_flash": {"layer_types": ["full_attention", "full_attention"]},
    "mistral4": {"head_dim": 32, "qk_head_dim": 32},
    "mistral_large4": {"text_config": {"kv_source_layers": [0, 1]}},
    "nemotron_h": {"layers_block_type": ["moe", "full_attention"]},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 1},
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
            "indexer_compress_ratio": 4,
        },
    },
}  # fmt: skip


OTHER_GENERATION = {"diffusion_gemma": "it generates by diffusion, which `polymoe.load` does not do"}
"""Architectures whose experts are known, and that ``polymoe.load`` refuses for another reason."""


@cache
def architectures() -> tuple[str, ...]:
    """Model types of whole models, one for each of Transformers' folders that has experts of the interface."""
    found = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if not re.search(r"^@use_experts_implementation", file.read_text(encoding="utf-8"), re.MULTILINE):
            continue
        for model_type, kind in ((t, CONFIG_MAPPING[t]) for t in CONFIG_MAPPING if _folder(t) == file.parent.name):
            for rank, mapping in enumerate((MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)):
                if kind in mapping:
                    found.setdefault(file.parent.name, []).append((rank, model_type))
        found.setdefault(file.parent.name, [(9, file.parent.name)])
    return tuple(min(types)[1] for types in found.values())


def _folder(model_type: str) -> str:
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    return model_type_to_module_name(model_type)


def tiny_config(model_type: str) -> Any:
    """A config of two layers, at least one of them with experts."""
    return CONFIG_MAPPING[model_type].from_dict(_merged(_shrunk(CONFIG_MAPPING[model_type]), EXTRA.get(model_type, {})))


def _merged(fields: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return fields | {k: _merged(fields.get(k, {}), v) if isinstance(v, dict) else v for k, v in more.items()}


def _shrunk(kind: type[PretrainedConfig]) -> dict[str, Any]:
    defaults = kind()
    fields: dict[str, Any] = {}
    for key, value in defaults.to_dict().items():
        if key == "per_layer_config":
            continue
        part = vars(defaults).get(key)
        subs: Any = kind.sub_configs
        sub = subs.get(key)
        if isinstance(part, PretrainedConfig):
            fields[key] = {**_shrunk(type(part)), "model_type": part.model_type}
        elif sub is not None and sub.__name__ != "AutoConfig":
            fields[key] = _shrunk(sub)
        elif key.endswith("_token_id") and type(value) is int:
            fields[key] = 1
        elif type(value) is int and value > 0:
            size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, key)), value)
            fields[key] = min(size, value)
        elif isinstance(value, list) and len(value) == getattr(defaults, "num_hidden_layers", 0) > 2:
            fields[key] = value[-2:]
    return fields
