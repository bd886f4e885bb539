"""What SGLang says of one layer's experts, in polymoe's terms."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polymoe.engines.serving.loading import load_nothing
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.sources import SGLANG
from polymoe.engines.serving.stand_aside import LayerFacts, method_facts
from polymoe.engines.sglang.hooks import ASKED_SERVER_ARGS
from polymoe.problem.activations import Activation, GeGLU, ReLU2, SwiGLU
from polymoe.problem.verdict import Reasons

# Loaders that load the checkpoint's tensors one by one, through each parameter's loader.
_LOAD_FORMATS = ("auto", "dummy", "fastsafetensors", "mistral", "npcache", "pt", "runai_streamer", "safetensors")
# Models that read a layer's own weights beside the layer.
_SPECIAL = ("Inkling",)
# Methods that make the layer's scheme only when they create the tensors.
_SCHEME_LATER = ("GPTQMarlinMoEMethod",)
_SWIZZLE = "swizzle_blockscale"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a model asks of its ``FusedMoE``, before SGLang pads it for a backend: H, and F of all ranks."""

    hidden: int
    intermediate: int


def name_of(layer: Any) -> str:
    """Return the layer's name; not every model gives it one."""
    return layer.layer_name or f"layers.{layer.layer_id}.experts"


def role_of(server: Any) -> str:
    """Return the role of a server: decode or prefill for one half of a disaggregated deployment, else mixed."""
    mode = str(getattr(server, "disaggregation_mode", None))
    return mode if mode in ("decode", "prefill") else "mixed"


def storing(method: Any, layer: Any) -> Any:
    """Return what stores the layer's tensors: the scheme that ``method`` asks, or ``method`` itself."""
    scheme = getattr(layer, "scheme", None)
    if scheme is None and type(method).__name__ in _SCHEME_LATER:
        scheme = method.quant_config.get_moe_scheme(layer)
    return scheme or method


def refusals(layer: Any, server: Any, settings: EngineSettings) -> Reasons:
    """Return what the user, or SGLang in this layer, asks for that rules polymoe out, before anything is created:
    by the layer, a ``FusedMoE`` that is half made, and the ``ServerArgs``."""
    from sglang.srt.layers.moe import utils  # pyright: ignore

    config, reasons, where = layer.moe_runner_config, Reasons(), name_of(layer)
    settings.need_included(reasons, where)
    memory = settings.expert_memory
    expected = "none: SGLang's own --enable-paged-experts holds experts in host memory"
    reasons.need(memory is None, "POLYMOE_EXPERT_MEMORY", expected, memory)
    asked = _asked_backend(server)
    reasons.need(asked == "auto", "--moe-runner-backend", "auto", asked)
    defaults = inspect.signature(type(server)).parameters  # a dataclass in 0.5.17, a Struct of msgspec in 0.5.23
    for name, what in ASKED_SERVER_ARGS.items():
        known = hasattr(server, name)
        reasons.need(known, f"server argument {name}", "one of this SGLang, as in 0.5.17 to 0.5.23", "none")
        value = getattr(server, name, None)
        reasons.need(not value or value == defaults[name].default, what)
    for name in ("enable_paged_experts", "torchao_config"):  # each in one version only
        reasons.need(not getattr(server, name, None), f"--{name.replace('_', '-')}")
    all_to_all = utils.get_moe_a2a_backend()
    reasons.need(all_to_all.is_none(), "--moe-a2a-backend", "none", all_to_all.value)
    gathers_fp4 = utils.should_use_flashinfer_cutlass_moe_fp4_allgather()
    reasons.need(not gathers_fp4, "x", "16 bits", "NVFP4, as FlashInfer CUTLASS gathers it")
    load_format = str(getattr(server.load_format, "value", server.load_format))
    reasons.need(load_format in _LOAD_FORMATS, "--load-format", " or ".join(_LOAD_FORMATS), load_format)
    reasons.need(not config.no_combine, "output", "the sum over a token's experts", "one for each (no_combine)")
    special = [name for name in _architectures(server) if name.startswith(_SPECIAL)]
    reasons.need(not special, "model", "one that leaves the experts to the layer", ", ".join(special))
    return reasons


def _asked_backend(server: Any) -> str:
    """Return ``--moe-runner-backend`` as the user gave it.

    SGLang 0.5.17 overwrites the argument with its own choice, and keeps a list of what it overwrote. 0.5.23 does not.
    """
    declared = getattr(server, "_resolved_overrides", None) or ()
    if any("moe_runner_backend" in fields for _, fields in declared):
        return "auto"
    return str(server.moe_runner_backend)


def _architectures(server: Any) -> list[str]:
    from sglang.srt import runtime_context  # pyright: ignore

    newer = getattr(runtime_context, "process_model_config", None)
    config = newer() if newer is not None else server.get_model_config()
    return list(getattr(config.hf_config, "architectures", None) or [])


class _Trial(nn.Module):
    """Stands for a layer while its parameters are created on trial: what is set on it is not set on the layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)


def create_tensors(create: Any, layer: Any, device: str, **given: Any) -> Mapping[str, Tensor]:
    """Create parameters on ``device``, "cpu" or "meta", of a layer or what stands for it by ``create``, its method's
    ``create_weights``; return the new ones by name."""
    before = set(layer._parameters)
    # DeepSeek-V4's scales, which are bytes in the checkpoint; SGLang's default is float32.
    given.setdefault("fp4_scale_dtype", torch.float8_e8m0fnu)
    with torch.device(device), _not_swizzled(create):
        create(layer=layer, **given)
    tensors = {name: p for name, p in layer._parameters.items() if name not in before}
    for name, parameter in tensors.items():
        if name.endswith("qzeros") and parameter.dtype != torch.int32:
            # SGLang does not read GPTQ's zero points, so it creates them in any dtype.
            parameter.data = torch.empty(parameter.shape, dtype=torch.int32, device=device)
    return tensors


@contextlib.contextmanager
def _not_swizzled(create: Any) -> Iterator[None]:
    """Keep a method from deriving tensors for its own kernels: SGLang 0.5.17 makes NVFP4's second copy of the scales on
    the GPU when it creates the first."""
    namespace = vars(sys.modules[create.__module__])
    original = namespace.get(_SWIZZLE)
    if original is None:
        yield
        return
    namespace[_SWIZZLE] = lambda scale: torch.empty(0, dtype=scale.dtype, device=scale.device)
    try:
        yield
    finally:
        namespace[_SWIZZLE] = original


def trial_tensors(layer: Any, method: Any, asked: Asked) -> Mapping[str, Tensor]:
    """Return the parameters that ``method`` would create for the layer, on the meta device, by name; none for a method
    whose tensors are not known. It raises whatever it raises for a layer that it cannot have."""
    if type(storing(method, layer)).__name__ not in SGLANG:
        return {}
    return create_tensors(
        method.create_weights,
        _Trial(layer),
        "meta",
        num_experts=layer.num_local_experts,
        hidden_size=layer.hidden_size,
        intermediate_size_per_partition=layer.intermediate_size_per_partition,
        params_dtype=layer.moe_runner_config.params_dtype,
        weight_loader=load_nothing,
        with_bias=layer.with_bias,
        moe_intermediate_size=asked.intermediate,
    )


def facts_of(layer: Any, method: Any, server: Any, asked: Asked, tensors: Mapping[str, Tensor]) -> LayerFacts:
    """Return the facts of a layer whose ``tensors`` are those of :func:`trial_tensors`."""
    config, reasons = layer.moe_runner_config, Reasons()
    stores = storing(method, layer)
    intermediate = layer.intermediate_size_per_partition
    reasons.need(layer.hidden_size == asked.hidden, "hidden size", asked.hidden, f"{layer.hidden_size} with padding")
    whole = intermediate * layer.moe_tp_size
    reasons.need(whole == asked.intermediate, "intermediate size", asked.intermediate, f"{whole} with padding")
    if tensors:
        # MXFP4's tensors may have zeros at the end, and gate and up are halves of what there is.
        intermediate = getattr(method, "intermediate_size_per_partition", intermediate)
    activation = _activation(config)
    reasons.need(activation is not None, "activation", "silu, clamped before it, or gelu, or relu2", _described(config))
    of_method = method_facts(stores, SGLANG, tensors, getattr(stores, "actorder", None), reasons)
    split = layer.moe_ep_size > 1
    top_k = _top_k(layer, server)
    reasons.need(top_k is not None, "experts of a token", "their number, from the layer or the model's config", "none")
    return LayerFacts(
        where=name_of(layer),
        **of_method,
        hidden=layer.hidden_size,
        intermediate=intermediate,
        experts=layer.num_experts,
        first_expert=None if split else 0,  # SGLang's dispatcher maps ids to places on this rank
        activation=activation,
        interleaved=config.gemm1_alpha is not None and bool(config.gate_up_interleaved),
        bias=bool(layer.with_bias),
        top_k=top_k or 1,
        weight_on="input" if config.apply_router_weight_on_input else "output",
        dtype=config.params_dtype,
        tp=layer.moe_tp_size,
        ep=layer.moe_ep_size,
        batch_invariant=bool(getattr(server, "enable_deterministic_inference", False)),
        refused=tuple(reasons.found),
    )


def _top_k(layer: Any, server: Any) -> int | None:
    """Return the number of experts of a token; None if nothing says it.

    SGLang's Llama-4 tells only its router, which the layer does not contain. Its config has the number too.
    """
    if layer.top_k is not None:
        return layer.top_k
    text = getattr(server.get_model_config(), "hf_text_config", None)
    return getattr(text, "num_experts_per_tok", None)


def _activation(config: Any) -> Activation | None:
    """Return polymoe's activation for SGLang's; None if there is none."""
    alpha, limit = config.gemm1_alpha, config.gemm1_clamp_limit
    if not config.is_gated:
        return ReLU2() if config.activation == "relu2" else None
    if config.activation == "gelu":
        return GeGLU() if alpha is None and limit is None else None
    if config.activation != "silu":
        return None
    if alpha is not None:
        beta = getattr(config, "gemm1_beta", None)
        return SwiGLU(float(alpha), 1.0 if beta is None else float(beta), None if limit is None else float(limit))
    if limit is not None:  # clamped after the SiLU
        return None
    return SwiGLU(limit=None if config.swiglu_limit is None else float(config.swiglu_limit))


def _described(config: Any) -> str:
    names = ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")
    constants = [f"{name}={getattr(config, name)}" for name in names if getattr(config, name) is not None]
    return " ".join([config.activation, *([] if config.is_gated else ["without gate"]), *constants])
