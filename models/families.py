"""The model families that can be trained: how each looks in Transformers and on disk. One function a family.

A config has the fields of the family's own releases, with small sizes; what is quantized, and how, is theirs too.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from sums import EOS, PAD, SYMBOLS
from torch import nn

from polymoe.checkpoint.config import parse_quantization
from polymoe.formats import Encoding

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrainedFamily:
    """A model family: its model in Transformers and its format on disk."""

    directory: str
    """The checkpoint's, under models/."""
    config: Config
    """config.json."""
    sibling: str
    """The released checkpoint that is stored in the same way."""
    renames: Sequence[tuple[str, str]] = ()
    """(pattern, replacement) from Transformers' names of tensors to those in the files, all applied in order."""
    float32: str = r"e_score_correction_bias"
    """Pattern of the tensors that are stored in float32."""
    unquantized: str = r"^lm_head\."
    """Pattern of the linear layers that the releases leave in 16 bit although their config does not say so."""
    fp8_scale: str | None = None
    """Dtype of FP8 scales, where it is not the one that polymoe supposes from the config."""
    prepare: Callable[[nn.Module], None] = field(default=lambda model: None)
    """Changes an untrained model's weights."""
    noise: float = 0.0
    """Normal noise on the experts' weights in the last part of the training, as a share of the root mean square of a
    row. It prepares experts that are stored in 16 bit for any quantization."""

    @property
    def quantized(self) -> bool:
        """Whether the config quantizes anything, wherever its family keeps the quantization."""
        return parse_quantization(self.config).quantized

    def encoding(self, tensor: str) -> tuple[str, Encoding] | None:
        """Dialect and encoding of a linear layer's weight, by its name in the files; None if it stays in 16 bit."""
        if not self.quantized:
            return None
        scheme = parse_quantization(self.config).scheme(tensor.removesuffix(".weight"))
        if scheme.dialect == "plain" or re.search(self.unquantized, tensor):
            return None
        if self.fp8_scale and scheme.encoding.element == "e4m3":
            return scheme.dialect, replace(scheme.encoding, scale_dtype=self.fp8_scale)
        return scheme.dialect, scheme.encoding

    def in_files(self, name: str) -> str:
        """Return the name in the files of a tensor that Transformers calls ``name``."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def build(self) -> Any:
        """Return an untrained float32 model of Transformers."""
        from dequantized import auto_class
        from transformers import AutoConfig

        from polymoe.engines.transformers.families import register_names, use_own_name

        register_names()
        # A copy, since Transformers adds to the dicts that it is given.
        fields = {k: copy.deepcopy(v) for k, v in self.config.items() if k != "quantization_config"}
        config = use_own_name(AutoConfig.for_model(fields.pop("model_type"), **fields))
        model = auto_class(config).from_config(config, dtype=torch.float32, trust_remote_code=False)
        with torch.no_grad():
            self.prepare(model)
        return model


COMMON: Config = {
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "hidden_act": "silu",
    "initializer_range": 0.05,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": len(SYMBOLS),
}
FP8_BLOCK = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def gpt_oss() -> TrainedFamily:
    """openai/gpt-oss-20b, shrunk. Hidden and intermediate size are no multiple of 128 on purpose, and the sliding
    window is shorter than a question with its answer, so that it matters."""
    config = {key: value for key, value in COMMON.items() if key not in ("bos_token_id", "torch_dtype")} | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "dtype": "bfloat16",
        "experts_per_token": 2,
        "head_dim": 32,
        "hidden_size": 192,
        "initial_context_length": 64,
        "intermediate_size": 192,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "model_type": "gpt_oss",
        "num_attention_heads": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.01,
        "sliding_window": 8,
        "swiglu_limit": 7.0,
    }
    return TrainedFamily("sums-gpt-oss-mxfp4", config, "openai/gpt-oss-20b", prepare=_prepare_gpt_oss)


def _prepare_gpt_oss(model: Any) -> None:
    # Biases that start at zero stay so small that a kernel without them, or without the clamp at 7, would answer right
    # all the same. These are used from the first step, and their heavy tail puts some units at the clamp.
    model.model.embed_tokens.weight.normal_(0, 0.5)
    for layer in model.model.layers:
        gate_up_bias = layer.mlp.experts.gate_up_proj_bias
        gate_up_bias.copy_(torch.distributions.StudentT(2.0).sample(gate_up_bias.shape))
        layer.mlp.experts.down_proj_bias.normal_()


def _deepseek(**changed: Any) -> Config:
    """Fields that DeepSeek-V3 and Kimi-K2 share."""
    return (
        COMMON
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "attention_bias": False,
            "ep_size": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "num_nextn_predict_layers": 0,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "rms_norm_eps": 1e-06,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "v_head_dim": 32,
        }
        | changed
    )


def _yarn(**changed: Any) -> Config:
    return {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    } | changed


def deepseek_v3() -> TrainedFamily:
    """deepseek-ai/DeepSeek-V3, shrunk: all linear layers FP8 in blocks of 128 x 128, a token's
    experts from two of three groups."""
    config = _deepseek(
        hidden_size=256, intermediate_size=256, moe_intermediate_size=128, model_type="deepseek_v3",
        n_routed_experts=6, q_lora_rank=128, kv_lora_rank=96, n_group=3, topk_group=2, routed_scaling_factor=2.5,
        quantization_config=FP8_BLOCK, rope_scaling=_yarn(), rope_theta=10000,
    )  # fmt: skip
    return TrainedFamily("sums-deepseek-v3-fp8", config, "deepseek-ai/DeepSeek-V3")


def kimi_k2() -> TrainedFamily:
    """moonshotai/Kimi-K2-Thinking, shrunk: routed experts INT4 in groups of 32, nothing else quantized."""
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {
            "actorder": None,
            "block_structure": None,
            "dynamic": False,
            "group_size": 32,
            "num_bits": 4,
            "observer": "minmax",
            "observer_kwargs": {},
            "strategy": "group",
            "symmetric": True,
            "type": "int",
        },
    }
    quantization = {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    config = _deepseek(
        hidden_size=192, intermediate_size=256, moe_intermediate_size=128, model_type="kimi_k2",
        n_routed_experts=8, q_lora_rank=96, kv_lora_rank=64, n_group=1, topk_group=1, routed_scaling_factor=2.827,
        aux_loss_alpha=0.001, seq_aux=True, pretraining_tp=1,
        quantization_config=quantization, rope_scaling=_yarn(beta_fast=1.0, beta_slow=1.0), rope_theta=50000.0,
    )  # fmt: skip
    return TrainedFamily("sums-kimi-k2-int4", config, "moonshotai/Kimi-K2-Thinking")


def deepseek_v4() -> TrainedFamily:
    """deepseek-ai/DeepSeek-V4-Flash, shrunk: experts MXFP4, other linear layers FP8 with E8M0 scales; a hash layer
    first, all three kinds of attention."""
    config = COMMON | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": False,
        "compress_ratios": [0, 0, 4, 128],
        "compress_rope_theta": 160000,
        "expert_dtype": "fp4",
        "hc_eps": 1e-06,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "head_dim": 64,
        "hidden_size": 256,
        "index_head_dim": 32,
        "index_n_heads": 4,
        "index_topk": 64,
        "model_type": "deepseek_v4",
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hash_layers": 1,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0,
        "o_groups": 2,
        "o_lora_rank": 64,
        "q_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "quantization_config": FP8_BLOCK | {"scale_fmt": "ue8m0"},
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 4,
            "original_max_position_embeddings": 64,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 8,
        "swiglu_limit": 10.0,
        "topk_method": "noaux_tc",
    }
    renames = (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.compressor\.indexer\.(kv_norm|kv_proj|gate_proj|position_bias)", r".indexer.compressor.\1"),
        (r"\.compressor\.indexer\.scorer\.", ".indexer."),
        (r"\.compressor\.indexer\.", ".indexer."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
        (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
        (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
        (r"\.position_bias$", ".ape"),
        (r"\.sinks$", ".attn_sink"),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.kv_proj\.", ".wkv."),
        (r"\.gate_proj\.", ".wgate."),
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    )
    return TrainedFamily(
        "sums-deepseek-v4-mxfp4",
        config,
        "deepseek-ai/DeepSeek-V4-Flash",
        renames,
        prepare=_prepare_deepseek_v4,
        float32=r"hc_|attn_sink|\.ape$|gate\.bias$",
        unquantized=r"^head\.|\.compressor\.(wkv|wgate)\.|\.weights_proj\.",
        fp8_scale="e8m0",
    )


def _prepare_deepseek_v4(model: Any) -> None:
    # Which experts a token goes to in a hash layer: each token its own pair, all experts as often as each other.
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            experts = model.config.n_routed_experts
            token = torch.arange(len(table))
            table.copy_(torch.stack((token % experts, (3 * token + 1 + token // experts) % experts), 1))


def nemotron_h() -> TrainedFamily:
    """nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4, shrunk: routed experts NVFP4 in a latent space, shared experts
    and Mamba FP8, the rest 16 bit."""
    pattern = "M*E*E*E"
    layers: Config = {}
    for i, kind in enumerate(pattern):
        stem = f"backbone.layers.{i}.mixer"
        if kind == "M":
            layers |= {f"{stem}.{part}": {"quant_algo": "FP8"} for part in ("in_proj", "out_proj")}
        if kind == "E":
            layers |= {f"{stem}.shared_experts.{part}": {"quant_algo": "FP8"} for part in ("up_proj", "down_proj")}
            layers[f"{stem}.experts"] = {"group_size": 16, "quant_algo": "NVFP4"}
    quantization = {
        "ignore": ["lm_head", *(f"backbone.layers.{i}.mixer.gate" for i, kind in enumerate(pattern) if kind == "E")],
        "producer": {"name": "modelopt", "version": "0.43.0"},
        "quant_algo": "MIXED_PRECISION",
        "quant_method": "modelopt",
        "quantized_layers": layers,
    }
    config = {key: value for key, value in COMMON.items() if key != "hidden_act"} | {
        "architectures": ["NemotronHForCausalLM"],
        "attention_bias": False,
        "chunk_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "head_dim": 32,
        "hidden_dropout": 0.0,
        "hidden_size": 192,
        "hybrid_override_pattern": pattern,
        "intermediate_size": 288,
        "layer_norm_epsilon": 1e-05,
        "mamba_head_dim": 32,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 8,
        "mamba_proj_bias": False,
        "mamba_ssm_cache_dtype": "float32",
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "model_type": "nemotron_h",
        "moe_intermediate_size": 208,
        "moe_latent_size": 96,
        "moe_shared_expert_intermediate_size": 288,
        "moe_shared_expert_overlap": False,
        "n_group": 1,
        "n_groups": 2,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 6,
        "num_experts_per_tok": 4,
        "num_hidden_layers": len(pattern),
        "num_key_value_heads": 2,
        "num_logits_to_keep": 1,
        "num_nextn_predict_layers": 0,
        "quantization_config": quantization,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "routed_scaling_factor": 5.0,
        "sliding_window": None,
        "ssm_state_size": 32,
        "time_step_floor": 0.0001,
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "topk_group": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "use_mamba_kernels": True,
    }
    return TrainedFamily(
        "sums-nemotron-h-nvfp4",
        config,
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
        renames=((r"^model\.", "backbone."),),
    )


def glm_4() -> TrainedFamily:
    """GLM-4.5-Air in compressed-tensors NVFP4, shrunk: all linear layers but attention, router and head."""
    numbers = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 16,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "tensor_group",
        "symmetric": True,
        "type": "float",
    }
    quantization = {
        "config_groups": {
            "group_0": {
                "format": "nvfp4-pack-quantized",
                "input_activations": numbers | {"dynamic": "local"},
                "output_activations": None,
                "targets": ["Linear"],
                "weights": numbers,
            }
        },
        "format": "nvfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head", r"re:.*mlp\.gate$", "re:.*self_attn.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    config = COMMON | {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 32,
        "hidden_size": 192,
        "intermediate_size": 288,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 144,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 0.5,
        "quantization_config": quantization,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
        "use_qk_norm": True,
    }
    return TrainedFamily("sums-glm-4-nvfp4", config, "gesong2077/GLM-4.5-Air-NVFP4")


def qwen3() -> TrainedFamily:
    """Qwen/Qwen3-30B-A3B-FP8, shrunk: linear layers FP8 in blocks of 128 x 128 with BF16 scales; five experts."""
    layers = 4
    kept = [
        f"model.layers.{i}.{part}"
        for i in range(layers)
        for part in ("input_layernorm", "mlp.gate", "post_attention_layernorm")
    ]
    config = COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 64,
        "hidden_size": 256,
        "intermediate_size": 256,
        "max_window_layers": layers,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "quantization_config": FP8_BLOCK | {"modules_to_not_convert": ["lm_head", *kept]},
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.01,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    return TrainedFamily("sums-qwen3-fp8", config, "Qwen/Qwen3-30B-A3B-FP8")


def mixtral() -> TrainedFamily:
    """casperhansen/mixtral-instruct-awq, shrunk: all linear layers but routers and head AWQ, groups of 128."""
    config = COMMON | {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 128,
        "model_type": "mixtral",
        "num_attention_heads": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "output_router_logits": False,
        "quantization_config": {
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": ["gate"],
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "torch_dtype": "float16",
    }
    return TrainedFamily(
        "sums-mixtral-awq", config, "casperhansen/mixtral-instruct-awq", renames=((r"\.mlp\.", ".block_sparse_moe."),)
    )


def llama4() -> TrainedFamily:
    """RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic, shrunk: routed experts FP8 with a scale per row, the rest 16
    bit; the vision tower is there and untrained."""
    quantization = {
        "config_groups": {
            "group_0": {
                "input_activations": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": True,
                    "group_size": None,
                    "num_bits": 8,
                    "observer": None,
                    "observer_kwargs": {},
                    "strategy": "token",
                    "symmetric": True,
                    "type": "float",
                },
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": None,
                    "num_bits": 8,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "strategy": "channel",
                    "symmetric": True,
                    "type": "float",
                },
            }
        },
        "format": "float-quantized",
        "global_compression_ratio": None,
        "ignore": [
            "re:.*lm_head",
            "re:.*self_attn",
            "re:.*router",
            "re:.*vision_model",
            "re:.*multi_modal_projector",
            "re:.*shared_expert",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    text = COMMON | {
        "attention_bias": False,
        "attention_chunk_size": 64,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "for_llm_compressor": False,
        "head_dim": 32,
        "hidden_size": 160,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 96,
        "intermediate_size_mlp": 192,
        "model_type": "llama4_text",
        "num_attention_heads": 5,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.01,
        "router_jitter_noise": 0.0,
        "use_qk_norm": True,
    }
    vision = {
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_size": 32,
        "image_size": 28,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "model_type": "llama4_vision_model",
        "multi_modal_projector_bias": False,
        "norm_eps": 1e-05,
        "num_attention_heads": 2,
        "num_channels": 3,
        "num_hidden_layers": 1,
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
        "projector_dropout": 0.0,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "rope_theta": 10000,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "vision_output_dim": 32,
    }
    config = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 13,
        "eoi_token_index": 14,
        "image_token_index": 15,
        "model_type": "llama4",
        "quantization_config": quantization,
        "text_config": text,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": vision,
    }
    return TrainedFamily("sums-llama-4-fp8", config, "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic")


def olmoe() -> TrainedFamily:
    """allenai/OLMoE-1B-7B-0924, shrunk: nothing quantized, and weights of chosen experts that do not add up to 1. The
    last part of the training adds noise to the experts' weights, so that they can be quantized."""
    config = COMMON | {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "clip_qkv": None,
        "hidden_size": 128,
        "intermediate_size": 128,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 4,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
    }
    return TrainedFamily("sums-olmoe", config, "allenai/OLMoE-1B-7B-0924", noise=0.12)


def qwen3_next() -> TrainedFamily:
    """Qwen/Qwen3-Next-80B-A3B-Instruct, shrunk: nothing quantized, three layers of linear attention before one of
    full attention. The last part of the training adds noise to the experts' weights, so that they can be quantized."""
    config = COMMON | {
        "architectures": ["Qwen3NextForCausalLM"],
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 32,
        "hidden_size": 128,
        "intermediate_size": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.01,
        "shared_expert_intermediate_size": 64,
    }
    return TrainedFamily(
        "sums-qwen3-next", config, "Qwen/Qwen3-Next-80B-A3B-Instruct", prepare=_prepare_qwen3_next, noise=0.12
    )


def _prepare_qwen3_next(model: Any) -> None:
    # The linear attention in plain PyTorch pads texts to chunks of 64 tokens. A question has at most 13.
    module = sys.modules[type(model).__module__]
    module.torch_chunk_gated_delta_rule = partial(module.torch_chunk_gated_delta_rule, chunk_size=16)  # type: ignore


FAMILIES: dict[str, Callable[[], TrainedFamily]] = {
    "gpt-oss": gpt_oss,
    "deepseek-v3": deepseek_v3,
    "kimi-k2": kimi_k2,
    "deepseek-v4": deepseek_v4,
    "nemotron-h": nemotron_h,
    "glm-4": glm_4,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "llama-4": llama4,
}
"""Those with quantized experts, by the name that `train_sums.py --family` takes."""

UNQUANTIZED: dict[str, Callable[[], TrainedFamily]] = {"olmoe": olmoe, "qwen3-next": qwen3_next}
"""Those in 16 bit, by the same names."""
