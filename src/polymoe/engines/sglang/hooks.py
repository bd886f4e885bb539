"""HOOKS: every name of SGLang that the plug-in uses."""

from __future__ import annotations

from polymoe.engines.hooks import Hook

_MOE = "sglang.srt.layers.moe"
_LAYER = f"{_MOE}.fused_moe_triton.layer"
_QUANTIZATION = "sglang.srt.layers.quantization.base_config"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"

INIT = f"{_LAYER}.FusedMoE.__init__"
"""Hooked: a layer is made."""
SETATTR = f"{_LAYER}.FusedMoE.__setattr__"
"""Hooked: a layer gets its method."""
TOPK = f"{_MOE}.topk.TopK.forward_cuda"
"""Hooked where a TopK is not told its layer's backend (before 0.5.23)."""
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
"""Hooked: the model runs a batch, perhaps from a CUDA graph."""
TENSORS = f"{_UPDATER}.WeightUpdater.update_weights_from_tensor"
"""Hooked: weights are updated from tensors while the engine runs."""

HOOKS: tuple[Hook, ...] = (
    Hook("sglang.srt.plugins.hook_registry", "HookRegistry.register: target, hook, hook_type"),
    Hook("sglang.srt.plugins.hook_registry", "HookType: AFTER, AROUND, BEFORE"),
    Hook("sglang.srt.runtime_context", "get_server_args"),
    Hook("sglang.srt.distributed.parallel_state", "get_tp_group"),
    Hook(_LAYER, "FusedMoE.__init__: self, hidden_size, intermediate_size, quant_config, prefix"),
    Hook(_LAYER, "FusedMoE.weight_loader: self, param, loaded_weight, weight_name, shard_id, expert_id"),
    Hook(_LAYER, "FusedMoE.weight_loader_fused: self, param, loaded_weight, weight_name, shard_id"),
    Hook(_LAYER, "FusedMoE._map_global_expert_id_to_local_expert_id: self, expert_id"),
    Hook(
        _QUANTIZATION,
        "FusedMoEMethodBase.create_weights: "
        "self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype",
    ),
    Hook(
        _QUANTIZATION,
        "FusedMoEMethodBase.create_moe_runner: self, layer, moe_runner_config",
    ),
    Hook(_QUANTIZATION, "FusedMoEMethodBase.apply: self, layer, dispatch_output"),
    Hook(_QUANTIZATION, "QuantizeMethodBase.process_weights_after_loading: self, layer"),
    Hook(
        f"{_MOE}.moe_runner.base",
        "MoeRunnerConfig: activation, apply_router_weight_on_input, gate_up_interleaved, gemm1_alpha, "
        "gemm1_clamp_limit, is_gated, no_combine, params_dtype, routed_scaling_factor, swiglu_limit",
    ),
    Hook(
        f"{_MOE}.token_dispatcher.standard", "StandardDispatchOutput: hidden_states, hidden_states_scale, topk_output"
    ),
    Hook(f"{_MOE}.token_dispatcher.standard", "StandardCombineInput: hidden_states"),
    Hook(f"{_MOE}.topk", "TopKOutputChecker.format_is_standard: topk_output"),
    Hook(f"{_MOE}.topk", "TopKOutputFormat: STANDARD"),
    Hook(f"{_MOE}.topk", "TopK.forward_cuda: self, hidden_states, router_logits"),
    Hook(f"{_MOE}.utils", "get_moe_a2a_backend"),
    Hook(f"{_MOE}.utils", "get_moe_runner_backend"),
    Hook(f"{_MOE}.utils", "should_use_flashinfer_cutlass_moe_fp4_allgather"),
    Hook("sglang.srt.model_executor.model_runner", "ModelRunner.forward: self, forward_batch"),
    Hook(_UPDATER, "WeightUpdater.update_weights_from_tensor: self, named_tensors, load_format"),
)
"""What the plug-in uses. Attributes that a version may lack are read with a default, and are not here."""

LAYER_ATTRIBUTES = (
    "dispatcher", "hidden_size", "intermediate_size_per_partition", "layer_id", "layer_name", "moe_ep_rank",
    "moe_ep_size", "moe_runner_config", "moe_tp_rank", "moe_tp_size", "num_experts", "num_local_experts",
    "quant_method", "should_fuse_routed_scaling_factor_in_topk", "top_k", "use_flashinfer_trtllm_moe",
    "use_triton_kernels", "with_bias",
)  # fmt: skip
"""What ``FusedMoE.__init__`` sets, of what the plug-in uses."""

ASKED_SERVER_ARGS = {
    "cpu_offload_gb": "offloading of weights to the CPU",
    "dwdp_size": "DWDP",
    "elastic_ep_backend": "elastic expert parallelism",
    "enable_elastic_expert_backup": "elastic expert parallelism",
    "enable_eplb": "load balancing of experts (EPLB)",
    "enable_fused_moe_sum_all_reduce": "--enable-fused-moe-sum-all-reduce",
    "enable_lora": "LoRA",
    "enable_single_batch_overlap": "--enable-single-batch-overlap",
    "enable_symm_mem": "--enable-symm-mem",
    "enable_two_batch_overlap": "--enable-two-batch-overlap",
    "ep_num_redundant_experts": "redundant experts (EPLB)",
    "init_expert_location": "--init-expert-location",
    "kt_weight_path": "experts on the CPU (KTransformers)",
    "lora_paths": "LoRA",
    "offload_group_size": "offloading of weights to the CPU",
    "weight_cache_mode": "--weight-cache-mode",
}
"""Arguments of the server that make SGLang keep a layer unless they have their default, and what they ask for. A
version that lacks one keeps all layers: it may have it under another name."""
