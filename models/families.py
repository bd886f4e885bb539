"""The model families that can be trained: how each looks in Transformers and on disk. One function a family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sums import EOS, PAD, SYMBOLS
from torch import Tensor, nn

from polymoe.formats import FORMATS


@dataclass(frozen=True, slots=True)
class Family:
    """How one model family looks in Transformers and on disk."""

    directory: str
    """The checkpoint's, under models/."""
    config: dict
    """config.json, with the field names of the family's own releases."""
    build: Callable[[dict], nn.Module]
    """config.json to an untrained float32 Transformers model."""
    experts_forward: Callable[..., Tensor]
    """What its experts modules run in training: (module, x_TH, topk_ids_TA, topk_weights_TA) -> y_TH. Where the
    module's attribute `rounded` is true, with the weights as the stored format will return them."""
    stored: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    """State dict to the tensors of the safetensors files."""


def gpt_oss() -> Family:
    """openai/gpt-oss-20b, shrunk. Hidden and intermediate size are no multiple of 128 on purpose, and the sliding
    window is shorter than a question with its answer, so that it matters."""
    config = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": EOS,
        "experts_per_token": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 192,
        "initial_context_length": 64,
        "initializer_range": 0.05,
        "intermediate_size": 192,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 256,
        "model_type": "gpt_oss",
        "num_attention_heads": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "pad_token_id": PAD,
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
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": len(SYMBOLS),
    }
    return Family("sums-gpt-oss-mxfp4", config, _build_gpt_oss, _gpt_oss_experts, _stored_gpt_oss)


def _build_gpt_oss(config: dict) -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    arguments = {key: value for key, value in config.items() if key != "quantization_config"}
    model = GptOssForCausalLM._from_config(GptOssConfig(**arguments), attn_implementation="eager", dtype="float32")
    # Biases that start at zero stay so small that a kernel without them, or without the clamp at 7, would answer right
    # all the same. These are used from the first step, and their heavy tail puts some units at the clamp.
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.5)
        for layer in model.model.layers:
            gate_up_bias = layer.mlp.experts.gate_up_proj_bias
            gate_up_bias.copy_(torch.distributions.StudentT(2.0).sample(gate_up_bias.shape))
            layer.mlp.experts.down_proj_bias.normal_()
    return model


def _gpt_oss_experts(module: nn.Module, x_TH: Tensor, topk_ids_TA: Tensor, topk_weights_TA: Tensor) -> Tensor:
    # Every expert on every token, the routing weights (mostly 0) choosing: two matrix products, fast to train.
    weights_TE = topk_weights_TA.new_zeros(len(x_TH), module.num_experts).scatter(1, topk_ids_TA, topk_weights_TA)
    gate_up_EHF, down_EFH = module.gate_up_proj, module.down_proj  # Transformers has K, the input axis, before N
    if module.rounded:
        gate_up_EHF = _rounded(gate_up_EHF.mT).mT
        down_EFH = _rounded(down_EFH.mT).mT
    gate_up_TF = F.linear(x_TH, gate_up_EHF.mT.flatten(0, 1), module.gate_up_proj_bias.flatten())
    hidden_TEF = module._apply_gate(gate_up_TF.unflatten(-1, (module.num_experts, -1))) * weights_TE[..., None]
    return hidden_TEF.flatten(1) @ down_EFH.flatten(0, 1) + weights_TE @ module.down_proj_bias


def _rounded(w_ENK: Tensor) -> Tensor:
    # The gradient passes straight through (arXiv:1308.3432).
    value = w_ENK.detach()
    return w_ENK + (FORMATS["mxfp4"].quantize(value.contiguous()).dequantize() - value)


def _stored_gpt_oss(state: dict[str, Tensor]) -> dict[str, Tensor]:
    stored = {}
    for name, value in state.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed = FORMATS["mxfp4"].quantize(
                value.float().mT.contiguous()
            )  # gate and up rows are interleaved already
            assert packed.scales is not None
            stored[f"{name}_blocks"] = packed.codes.unflatten(-1, (-1, 16)).contiguous()
            stored[f"{name}_scales"] = packed.scales.view(torch.uint8).contiguous()
        else:
            stored[name] = value.bfloat16().contiguous()
    return stored


FAMILIES: dict[str, Callable[[], Family]] = {"gpt-oss": gpt_oss}
"""By the name that `train_sums.py --family` takes."""
