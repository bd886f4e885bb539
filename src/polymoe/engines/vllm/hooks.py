"""HOOKS: every name of vLLM that the plug-in uses."""

from __future__ import annotations

from polymoe.engines.hooks import Hook

_MOE = "vllm.model_executor.layers.fused_moe"
_METHOD, _MODULAR = f"{_MOE}.fused_moe_method_base", f"{_MOE}.modular_kernel"
_QUANTIZATION = "vllm.model_executor.layers.quantization.base_config"
_RELOAD = "vllm.model_executor.model_loader.reload"

SELECTORS: tuple[Hook, ...] = (
    Hook(f"{_MOE}.oracle.fp8", "select_fp8_moe_backend"),
    Hook(f"{_MOE}.oracle.int_wna16", "select_wna16_moe_backend"),
    Hook(f"{_MOE}.oracle.mxfp4", "select_deepseek_v4_mxfp4_moe_backend"),
    Hook(f"{_MOE}.oracle.mxfp4", "select_mxfp4_moe_backend"),
    Hook(f"{_MOE}.oracle.nvfp4", "select_nvfp4_moe_backend"),
    Hook(f"{_MOE}.oracle.unquantized", "select_unquantized_moe_backend"),
)
"""The functions that choose vLLM's own backend, which are replaced while a method is made. Without one of them vLLM
would choose a backend unseen, and might pad or transpose weights for it."""

HOOKS: tuple[Hook, ...] = (
    *SELECTORS,
    Hook(f"{_MOE}.routed_experts", "RoutedExperts._get_quant_method: self, prefix, quant_config, moe_config"),
    Hook(
        f"{_MOE}.routed_experts",
        "RoutedExperts.weight_loader: self, param, loaded_weight, weight_name, shard_id, expert_id, return_success",
    ),
    Hook(
        _METHOD,
        "FusedMoEMethodBase.create_weights: "
        "self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype",
    ),
    Hook(
        _METHOD,
        "FusedMoEMethodBase.maybe_roundup_sizes: "
        "self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config",
    ),
    Hook(_METHOD, "FusedMoEMethodBase.get_fused_moe_quant_config: self, layer"),
    Hook(
        _METHOD,
        "FusedMoEMethodBase.apply: self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input",
    ),
    Hook(
        _METHOD,
        "FusedMoEMethodBase: "
        "is_monolithic, skip_forward_padding, has_unpadded_output, supports_eplb, topk_indices_dtype",
    ),
    Hook(_QUANTIZATION, "QuantizeMethodBase.process_weights_after_loading: self, layer"),
    Hook(_QUANTIZATION, "QuantizeMethodBase: uses_meta_device"),
    Hook(f"{_RELOAD}.layerwise", "initialize_online_processing: layer"),
    Hook(f"{_RELOAD}.layerwise", "get_layerwise_info: layer"),
    Hook(f"{_RELOAD}.types", "LayerReloadingInfo: load_numel_total"),
    Hook(
        f"{_MOE}.config",
        "FusedMoEConfig: num_experts, num_local_experts, experts_per_token, hidden_dim, intermediate_size, "
        "intermediate_size_per_partition, activation, in_dtype, device, moe_backend, moe_parallel_config, has_bias, "
        "is_lora_enabled, swiglu_alpha, swiglu_beta, swiglu_limit",
    ),
    Hook(
        f"{_MOE}.config",
        "FusedMoEParallelConfig: "
        "tp_size, tp_rank, ep_size, ep_rank, dp_rank, all2all_backend, enable_eplb, use_all2all_kernels",
    ),
    Hook(f"{_MOE}.config", "FusedMoEQuantConfig.make"),
    Hook(f"{_MOE}.activation", "MoEActivation: SILU, SWIGLUOAI"),
    Hook("vllm.config", "get_current_vllm_config"),
    Hook("vllm.distributed.parallel_state", "get_ep_group"),
)
"""What the plug-in uses. Attributes that a version may lack are read with a default, and are not here."""

RUN_HOOK = Hook("vllm.v1.worker.worker_base", "WorkerWrapperBase.execute_model: self, scheduler_output")
"""Wrapped when new weights arrive in 16 bits: the model must not run until all of them have come."""

BALANCE_HOOKS: tuple[Hook, ...] = (
    Hook(f"{_MOE}.routed_experts", "RoutedExperts.get_expert_weights: self"),
    Hook("vllm.distributed.eplb.eplb_state", "EplbState.add_model: self, model, model_config"),
)
"""What is used besides with ``--enable-eplb``: replaced in each layer, and wrapped."""

_PREPARE = (
    "self, a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config, "
    "defer_input_quant"
)
_FINALIZE = (
    "self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl"
)

MODULAR_HOOKS: tuple[Hook, ...] = (
    Hook(_MODULAR, "FusedMoEKernel: apply, fused_experts, prepare_finalize"),
    Hook(
        _MODULAR,
        "FusedMoEKernel.apply: self, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, "
        "expert_map, apply_router_weight_on_input, shared_experts, shared_experts_input",
    ),
    Hook(_MODULAR, "FusedMoEExpertsModular.apply: self, output, hidden_states, topk_weights, topk_ids"),
    Hook(_MODULAR, "FusedMoEExpertsModular.workspace_shapes: self, M, N, K"),
    Hook(_MODULAR, "FusedMoEExpertsModular.moe_problem_size: self, a1, w1, w2, topk_ids"),
    Hook(_MODULAR, "FusedMoEExpertsModular.finalize_weight_and_reduce_impl: self"),
    Hook(_MODULAR, "FusedMoEExperts.expects_unquantized_inputs"),
    Hook(_MODULAR, "FusedMoEActivationFormat: BatchedExperts, Standard"),
    Hook(_MODULAR, "FusedMoEExperts.__init__: self, moe_config, quant_config, max_num_tokens, num_dispatchers"),
    Hook(_MODULAR, "ExpertTokensMetadata: expert_num_tokens"),
    Hook(_MODULAR, f"FusedMoEPrepareAndFinalizeModular.prepare: {_PREPARE}"),
    Hook(_MODULAR, f"FusedMoEPrepareAndFinalizeModular.finalize: {_FINALIZE}"),
    Hook(f"{_MOE}.topk_weight_and_reduce", "TopKWeightAndReduceDelegate: apply"),
    Hook(f"{_MOE}.topk_weight_and_reduce", "TopKWeightAndReduceNoOP: apply"),
    Hook(
        f"{_MOE}.all2all_utils", "maybe_make_prepare_finalize: moe, quant_config, routing_tables, allow_new_interface"
    ),
)
"""What is used besides where an all-to-all backend exchanges tokens."""

_DEEPEP = f"{_MOE}.prepare_finalize.deepep"
DEEPEP_HOOKS: tuple[Hook, ...] = (
    Hook(f"{_DEEPEP}_ht", f"DeepEPHTPrepareAndFinalize.prepare_async: {_PREPARE}"),
    Hook(f"{_DEEPEP}_ht", f"DeepEPHTPrepareAndFinalize.finalize_async: {_FINALIZE}"),
    Hook(f"{_DEEPEP}_ll", f"DeepEPLLPrepareAndFinalize.prepare_async: {_PREPARE}"),
    Hook(f"{_DEEPEP}_ll", f"DeepEPLLPrepareAndFinalize.finalize_async: {_FINALIZE}"),
    Hook(f"{_DEEPEP}_v2", f"DeepEPV2PrepareAndFinalize.prepare: {_PREPARE}"),
    Hook(f"{_DEEPEP}_v2", f"DeepEPV2PrepareAndFinalize.finalize: {_FINALIZE}"),
)
"""What prepares and finalizes with DeepEP: only parsed, as vLLM imports these modules where DeepEP is installed."""
