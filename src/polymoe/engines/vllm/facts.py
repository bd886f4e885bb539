"""What vLLM says of one layer's experts, in polymoe's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polymoe.engines.hooks import missing_hooks
from polymoe.engines.serving.loading import load_nothing
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.sources import VLLM
from polymoe.engines.serving.stand_aside import BALANCING, LayerFacts, method_facts
from polymoe.engines.vllm.hooks import BALANCE_HOOKS
from polymoe.problem.activations import Activation, GeGLU, ReLU2, SwiGLU
from polymoe.problem.verdict import Reasons

# Models of vLLM that read a layer's own weights, or ask for its own kernel, beside the layer.
_SPECIAL = ("DeepseekV41ForCausalLM", "FlintForCausalLM")
# Loaders that put derived tensors, or whole files of them, where the layer's tensors are.
_WHOLE_TENSORS = ("bitsandbytes", "gguf", "ipc_cache", "sharded_state", "tensorizer")
# Backends with which vLLM gathers tokens itself, and those that exchange rows of tokens through a modular kernel.
_GATHERED = ("allgather_reducescatter", "naive")
_EXCHANGED = ("deepep_high_throughput", "deepep_v2")
_BATCHED = ("deepep_low_latency",)  # a batch of rows for each expert
_EXCHANGED_COLUMNS = 256  # DeepEP copies 512 bytes at once, and vLLM would pad
_BATCHED_COLUMNS = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # those that its low-latency kernels have
_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}


def role_of(config: Any) -> str:
    """Return the role of a worker: decode or prefill for one half of a disaggregated deployment, else mixed."""
    transfer = getattr(config, "kv_transfer_config", None)
    return _ROLES.get(str(getattr(transfer, "kv_role", None)), "mixed")


def refusals(layer: Any, moe: Any, config: Any, settings: EngineSettings, where: str) -> Reasons:
    """Return what the user, or vLLM in this layer, asks for that rules polymoe out, before anything is created: by the
    layer, a ``RoutedExperts``, its ``FusedMoEConfig`` and the ``VllmConfig``."""
    parallel, reasons = moe.moe_parallel_config, Reasons()
    settings.need_included(reasons, where)
    reasons.need(moe.moe_backend == "auto", "--moe-backend", "auto", moe.moe_backend)
    reasons.need(not moe.is_lora_enabled, "LoRA")
    if parallel.enable_eplb:
        _need_balanced(reasons, config, settings)
    if needs_kernel(parallel):
        backend = parallel.all2all_backend
        if backend in _EXCHANGED and settings.mode == "require":  # never run with one of these packages
            fits = moe.hidden_dim % _EXCHANGED_COLUMNS == 0
            reasons.need(fits, "hidden size", f"a multiple of {_EXCHANGED_COLUMNS} with {backend}", moe.hidden_dim)
        elif backend in _BATCHED and settings.mode == "require":
            sizes = ", ".join(map(str, _BATCHED_COLUMNS))
            fits = moe.hidden_dim in _BATCHED_COLUMNS
            reasons.need(fits, "hidden size", f"one of {sizes} with {backend}", moe.hidden_dim)
        else:
            tried = f", or {' or '.join((*_EXCHANGED, *_BATCHED))} with POLYMOE=require"
            reasons.need(False, "--all2all-backend", f"{_GATHERED[0]}{tried}", backend)
    shared = getattr(layer.expert_map_manager, "num_fused_shared_experts", 0)
    reasons.need(not shared, "shared experts among the routed ones", 0, shared)
    architectures = getattr(config.model_config, "architectures", None) or []
    special = [name for name in architectures if name in _SPECIAL]
    reasons.need(not special, "model", "one whose decoding leaves the experts to the layer", ", ".join(special))
    load_format = str(getattr(config.load_config, "load_format", "auto"))
    reasons.need(
        load_format not in _WHOLE_TENSORS, "--load-format", "one that loads the checkpoint's tensors", load_format
    )
    if settings.expert_memory is not None:
        sleeps = bool(getattr(config.model_config, "enable_sleep_mode", False))
        reasons.need(not sleeps, "POLYMOE_EXPERT_MEMORY", "an engine without --enable-sleep-mode", "one that sleeps")
        halves = bool(getattr(getattr(config, "parallel_config", None), "enable_dbo", False))
        reasons.need(not halves, "POLYMOE_EXPERT_MEMORY", "an engine without --enable-dbo", "two batches at once")
    offload = config.offload_config
    moved = offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size
    reasons.need(not moved, "offloading of weights to the CPU")
    return reasons


def _need_balanced(reasons: Reasons, config: Any, settings: EngineSettings) -> None:
    """Add to ``reasons`` what experts that vLLM moves between ranks cannot have: all layers of a model move alike, in
    GPU memory, on ranks that stay."""
    reasons.need(not is_elastic(config), "elastic expert parallelism")
    none = "none with --enable-eplb"
    reasons.need(settings.layers is None, "POLYMOE_LAYERS", none, settings.layers)
    reasons.need(settings.expert_memory is None, "POLYMOE_EXPERT_MEMORY", none, settings.expert_memory)
    for lack in missing_hooks(BALANCE_HOOKS):
        reasons.need(False, f"{BALANCING} in a vLLM without {lack}")


def is_elastic(config: Any) -> bool:
    """Whether ranks come and go while this engine runs, by its ``VllmConfig``."""
    return bool(getattr(getattr(config, "parallel_config", None), "enable_elastic_ep", False))


def needs_kernel(parallel: Any) -> bool:
    """Whether tokens reach this rank's experts only through a modular kernel, by vLLM's ``FusedMoEParallelConfig``."""
    backend = parallel.all2all_backend
    return (parallel.use_all2all_kernels or backend == "passthrough") and backend not in _GATHERED


def exchanges_rows(parallel: Any) -> bool:
    """Whether the experts get rows of tokens, as polymoe's take them: by a gather, or from some all-to-all backends."""
    return not needs_kernel(parallel) or parallel.all2all_backend in _EXCHANGED


def exchanges_batches(parallel: Any) -> bool:
    """Whether each expert gets a batch of rows of tokens from its all-to-all backend."""
    return needs_kernel(parallel) and parallel.all2all_backend in _BATCHED


def gathers(parallel: Any) -> bool:
    """Whether vLLM's runner gathers the tokens of all ranks itself, so that a layer must have no modular kernel.

    Versions such as 0.24 and 0.26 do, and ask methods that have a kernel for parts of another one; later ones leave it
    to the kernel's prepare and finalize steps.
    """
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase  # pyright: ignore

    return hasattr(FusedMoEMethodBase, "maybe_make_prepare_finalize") and not needs_kernel(parallel)


def created_tensors(method: Any, layer: Any, moe: Any, intermediate: int) -> Mapping[str, Tensor]:
    """Return the parameters that ``method`` would create for the layer, on the meta device, by name; it raises whatever
    it raises for a layer that it cannot have."""
    trial: Any = nn.Module()
    # Of ModelOpt's MXFP8: it compares its arguments with the layer's sizes.
    trial.hidden_size, trial.intermediate_size_per_partition = moe.hidden_dim, intermediate
    with torch.device("meta"):
        method.create_weights(
            layer=trial,
            num_experts=moe.num_local_experts,
            hidden_size=moe.hidden_dim,
            intermediate_size_per_partition=intermediate,
            params_dtype=layer.params_dtype,
            weight_loader=load_nothing,
            global_num_experts=moe.num_experts,
            unpadded_hidden_size=moe.hidden_dim,
            intermediate_size_full=moe.intermediate_size,
        )
    return dict(trial.named_parameters())


def facts_of(
    layer: Any, method: Any, moe: Any, tensors: Mapping[str, Tensor], intermediate: int, where: str, invariant: bool
) -> LayerFacts:
    """Return the facts of the layer.

    Args:
        method: its quantization method, made with a neutral choice of backend.
        tensors: as :func:`created_tensors` returns them.
        intermediate: F on this rank, with padding.
        invariant: whether vLLM promises batch invariance.
    """
    parallel, reasons = moe.moe_parallel_config, Reasons()
    name = moe.activation.value
    activation = activation_of(name, layer, moe)
    reasons.need(activation is not None, "activation", "silu, swigluoai, gelu, gelu_tanh or relu2_no_mul", name)
    actorder = getattr(getattr(method, "weight_quant", None), "actorder", None)
    of_method = method_facts(method, VLLM, tensors, actorder, reasons)
    return LayerFacts(
        where=where,
        **of_method,
        hidden=moe.hidden_dim,
        intermediate=intermediate,
        experts=moe.num_experts,
        first_expert=_first_expert(layer),
        activation=activation,
        interleaved=name == "swigluoai",
        bias=bool(moe.has_bias),
        top_k=moe.experts_per_token,
        weight_on="input" if layer.apply_router_weight_on_input else "output",
        dtype=moe.in_dtype,
        tp=parallel.tp_size,
        ep=parallel.ep_size,
        batch_invariant=invariant,
        balanced=parallel.enable_eplb,
        refused=tuple(reasons.found),
    )


def activation_of(name: str, layer: Any, moe: Any) -> Activation | None:
    """Return polymoe's activation for vLLM's, with the layer's constants; None if there is none."""
    if name in ("silu", "swigluoai", "swigluoai_uninterleave"):
        default = (1.0, 0.0, None) if name == "silu" else (1.702, 1.0, 7.0)
        given = [getattr(layer, f"swiglu_{part}", None) for part in _CONSTANTS]
        given = [g if g is not None else getattr(moe, f"swiglu_{p}") for g, p in zip(given, _CONSTANTS, strict=True)]
        alpha, beta, limit = (d if g is None else float(g) for g, d in zip(given, default, strict=True))
        return SwiGLU(alpha, beta, limit)  # type: ignore[arg-type]
    return {"gelu": GeGLU(), "gelu_tanh": GeGLU("tanh"), "relu2_no_mul": ReLU2()}.get(name)


_CONSTANTS = ("alpha", "beta", "limit")


def _first_expert(layer: Any) -> int | None:
    """Return the first of this rank's experts, or None if they are not a range in order."""
    expert_map = layer.expert_map_manager.expert_map
    if expert_map is None:
        return 0
    local = (expert_map >= 0).nonzero().flatten().tolist()
    places = expert_map[expert_map >= 0].tolist()
    ordered = (
        bool(local) and local == list(range(local[0], local[0] + len(local))) and places == list(range(len(local)))
    )
    return local[0] if ordered else None
