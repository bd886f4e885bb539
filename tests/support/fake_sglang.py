"""What polymoe's plug-in uses of SGLang, small, on the CPU: modules to put in place of an SGLang that is not installed.

``tests/engines/sglang/test_contract.py`` compares names, parameters and order of calls with SGLang's sources; whole
engines are in ``test_engine.py``.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class HookType(enum.Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"


class Backend(NamedTuple):
    value: str

    def is_none(self) -> bool:
        return self.value == "none"


class StandardDispatchOutput(NamedTuple):
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_output: Any


class StandardCombineInput(NamedTuple):
    hidden_states: Tensor


class StandardTopKOutput(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Any = None


class TopKOutputFormat(enum.Enum):
    STANDARD = 1
    TRITON_KERNEL = 2


class TopKOutputChecker:
    @staticmethod
    def format_is_standard(topk_output: Any) -> bool:
        return isinstance(topk_output, StandardTopKOutput)


class TopK:
    """As in SGLang 0.5.17, where the backend of the whole server decides what is handed over."""

    def __init__(self, layer_id: int) -> None:
        self.layer_id, self.topk_config = layer_id, SimpleNamespace(output_format=None)

    def forward_cuda(self, hidden_states: Tensor, router_logits: Tensor) -> TopKOutputFormat:
        return self.topk_config.output_format or TopKOutputFormat.TRITON_KERNEL


@dataclass
class MoeRunnerConfig:
    params_dtype: torch.dtype = torch.bfloat16
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True


@dataclass(slots=True)
class ServerArgs:
    """Without class attributes for the defaults, as in 0.5.23."""

    cpu_offload_gb: int = 0
    disaggregation_mode: str = "null"
    dwdp_size: int = 1
    elastic_ep_backend: str | None = None
    enable_deterministic_inference: bool = False
    enable_elastic_expert_backup: bool = False
    enable_eplb: bool = False
    enable_fused_moe_sum_all_reduce: bool = False
    enable_lora: bool | None = None
    enable_paged_experts: bool = False
    enable_single_batch_overlap: bool = False
    enable_symm_mem: bool = False
    enable_two_batch_overlap: bool = False
    ep_num_redundant_experts: int = 0
    init_expert_location: str = "trivial"
    kt_weight_path: str | None = None
    load_format: str = "auto"
    lora_paths: list[str] | None = None
    moe_a2a_backend: str = "none"
    moe_runner_backend: str = "auto"
    offload_group_size: int = -1
    torchao_config: str = ""
    weight_cache_mode: str = "off"
    _resolved_overrides: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    architectures: list[str] = field(default_factory=lambda: ["Qwen3MoeForCausalLM"])

    experts_per_token: int | None = None

    def get_model_config(self) -> Any:
        return SimpleNamespace(
            hf_config=SimpleNamespace(architectures=self.architectures),
            hf_text_config=SimpleNamespace(num_experts_per_tok=self.experts_per_token),
        )


class QuantizeMethodBase:
    def process_weights_after_loading(self, layer: Any) -> None:
        raise AssertionError("SGLang's own processing")


class FusedMoEMethodBase(QuantizeMethodBase):
    def create_weights(self, layer: Any, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
                       params_dtype: torch.dtype, **extra_weight_attrs: Any) -> None:  # fmt: skip
        raise NotImplementedError

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        self.runner = "SGLang's"

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        raise AssertionError("SGLang's own kernel")


def swizzle_blockscale(scale: Tensor) -> Tensor:
    """A second copy of scales, which SGLang 0.5.17 makes on the GPU."""
    if scale.is_meta:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    return torch.zeros(scale.shape, dtype=torch.uint8)


class ScaleParameter(nn.Parameter):
    """As SGLang's parameters that know their loader, which cannot be changed."""

    def __new__(cls, data: Tensor, weight_loader: Callable[..., None]) -> ScaleParameter:
        self = super().__new__(cls, data, requires_grad=False)
        self._weight_loader = weight_loader
        return self

    @property
    def weight_loader(self) -> Callable[..., None]:
        return self._weight_loader


class Fp8MoEMethod(FusedMoEMethodBase):
    """FP8 in blocks of 128; like some backends of SGLang, it asks for up before gate."""

    def __init__(self) -> None:
        self.load_up_proj_weight_first = True

    def create_weights(self, layer: Any, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
                       params_dtype: torch.dtype, **extra_weight_attrs: Any) -> None:  # fmt: skip
        self.load_up_proj_weight_first = True
        e, h, f = num_experts, hidden_size, intermediate_size_per_partition
        for name, shape, dtype in (
            ("w13_weight", (e, 2 * f, h), torch.float8_e4m3fn),
            ("w2_weight", (e, h, f), torch.float8_e4m3fn),
            ("w13_weight_scale_inv", (e, 2 * f // 128, h // 128), torch.float32),
            ("w2_weight_scale_inv", (e, h // 128, f // 128), torch.float32),
        ):
            parameter: Any = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            parameter.weight_loader = extra_weight_attrs["weight_loader"]
            layer.register_parameter(name, parameter)
        scale = ScaleParameter(torch.empty(e), extra_weight_attrs["weight_loader"])
        layer.register_parameter("w2_input_scale", scale)  # which dynamic scales leave unread
        layer.w2_swizzled = nn.Parameter(swizzle_blockscale(layer.w2_weight_scale_inv), requires_grad=False)


class Mxfp4MoEMethod(FusedMoEMethodBase):
    """gpt-oss', with biases."""

    def create_weights(self, layer: Any, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
                       params_dtype: torch.dtype, **extra_weight_attrs: Any) -> None:  # fmt: skip
        e, h, f = num_experts, hidden_size, intermediate_size_per_partition
        for name, shape, dtype in (
            ("w13_weight", (e, 2 * f, h // 2), torch.uint8),
            ("w13_weight_scale", (e, 2 * f, h // 32), torch.uint8),
            ("w13_weight_bias", (e, 2 * f), torch.bfloat16),
            ("w2_weight", (e, h, f // 2), torch.uint8),
            ("w2_weight_scale", (e, h, f // 32), torch.uint8),
            ("w2_weight_bias", (e, h), torch.bfloat16),
        ):
            parameter: Any = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            parameter.weight_loader = extra_weight_attrs["weight_loader"]
            layer.register_parameter(name, parameter)


class BlockInt8MoEMethod(FusedMoEMethodBase):
    """One that polymoe does not know."""

    def create_weights(self, layer: Any, **_: Any) -> None:
        layer.register_parameter("w13_weight", nn.Parameter(torch.empty(1)))


class FusedMoE(nn.Module):
    """A layer of a server with ``ranks`` = (TP rank, TP size, EP rank, EP size)."""

    ranks = (0, 1, 0, 1)

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, layer_id: int, top_k: int,
                 quant_config: Any, prefix: str = "", with_bias: bool = False, **config: Any) -> None:  # fmt: skip
        super().__init__()
        self.layer_name, self.layer_id, self.top_k, self.hidden_size = prefix, layer_id, top_k, hidden_size
        self.moe_tp_rank, self.moe_tp_size, self.moe_ep_rank, self.moe_ep_size = self.ranks
        self.num_experts, self.num_local_experts = num_experts, num_experts // self.moe_ep_size
        self.intermediate_size_per_partition = intermediate_size // self.moe_tp_size
        self.with_bias, self.use_triton_kernels, self.use_flashinfer_trtllm_moe = with_bias, True, True
        self.moe_runner_config = MoeRunnerConfig(**config)
        self.quant_method = None
        self.quant_method = quant_config.get_quant_method(self, prefix)
        self.quant_method.create_weights(
            layer=self, num_experts=self.num_local_experts, hidden_size=hidden_size,
            intermediate_size_per_partition=self.intermediate_size_per_partition, params_dtype=torch.bfloat16,
            weight_loader=self.weight_loader, with_bias=with_bias, moe_intermediate_size=intermediate_size,
        )  # fmt: skip
        self.quant_method.create_moe_runner(self, self.moe_runner_config)
        self.dispatcher = SimpleNamespace(skip_local_expert_mapping=True)
        self.supports_deferred_finalize = True
        self.should_fuse_routed_scaling_factor_in_topk = False
        self.runner = self.quant_method.runner

    def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
        place = expert_id - self.moe_ep_rank * self.num_local_experts
        return place if 0 <= place < self.num_local_experts else -1

    def weight_loader(
        self, param: Any, loaded_weight: Tensor, weight_name: str, shard_id: str | None, expert_id: int | None
    ) -> None:
        if expert_id is None:  # gpt-oss' tensors of all experts
            param.data.copy_(loaded_weight)
            return
        place = self._map_global_expert_id_to_local_expert_id(expert_id)
        if place == -1:
            return
        data = param.data[place].mT if self.use_triton_kernels else param.data[place]
        if self.use_flashinfer_trtllm_moe:
            shard_id = {"w1": "w3", "w3": "w1", "w2": "w2"}[shard_id]
        if shard_id != "w2":
            second = (shard_id == "w3") != self.quant_method.load_up_proj_weight_first
            data = data.chunk(2)[second]
        data.copy_(loaded_weight)

    def weight_loader_fused(self, param: Any, loaded_weight: Tensor, weight_name: str, shard_id: str) -> None:
        param.data.copy_(loaded_weight)


class ModelRunner:
    model: Any = nn.ModuleList()

    def forward(self, forward_batch: Any) -> str:
        return "ran"


class WeightUpdater:
    def update_weights_from_tensor(self, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        return True, "Success"


@contextmanager
def installed(
    server: ServerArgs, *, lacking: str = "", group: Callable[[bytes], list[bytes]] = lambda mine: [mine, mine]
) -> Iterator[Callable[[], type[FusedMoE]]]:
    """Put the modules in place, without the function or class called ``lacking``.

    ``group`` stands for the other ranks of layers with several: it returns what each rank says, given what this one
    does.

    Yields a function that applies the hooks that were registered so far, and returns the class of layers.
    """
    hooks: list[tuple[str, Callable[..., Any], HookType]] = []

    class HookRegistry:
        @classmethod
        def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
            hooks.append((target, hook, hook_type))

    layer_class = type("FusedMoE", (FusedMoE,), {"__init__": _copied(FusedMoE.__init__)})
    topk_class = type("TopK", (TopK,), {})
    moe, srt = "sglang.srt.layers.moe", "sglang.srt"
    contents: dict[str, dict[str, Any]] = {
        "sglang.version": {"__version__": "0.5.17"},
        f"{srt}.distributed.parallel_state": {"get_tp_group": lambda: SimpleNamespace(cpu_group=group)},
        f"{srt}.runtime_context": {"get_server_args": lambda: server},
        f"{srt}.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        f"{moe}.fused_moe_triton.layer": {"FusedMoE": layer_class},
        f"{moe}.moe_runner.base": {"MoeRunnerConfig": MoeRunnerConfig},
        f"{moe}.token_dispatcher.standard": {
            "StandardDispatchOutput": StandardDispatchOutput, "StandardCombineInput": StandardCombineInput,
        },
        f"{moe}.topk": {
            "TopK": topk_class, "TopKOutputChecker": TopKOutputChecker, "TopKOutputFormat": TopKOutputFormat,
        },
        f"{moe}.utils": {
            "get_moe_a2a_backend": lambda: Backend(server.moe_a2a_backend),
            "get_moe_runner_backend": lambda: Backend(server.moe_runner_backend),
            "should_use_flashinfer_cutlass_moe_fp4_allgather": lambda: False,
        },
        f"{srt}.layers.quantization.base_config": {
            "FusedMoEMethodBase": FusedMoEMethodBase, "QuantizeMethodBase": QuantizeMethodBase,
        },
        f"{srt}.model_executor.model_runner": {"ModelRunner": type("ModelRunner", (ModelRunner,), {})},
        f"{srt}.model_executor.model_runner_components.weight_updater": {
            "WeightUpdater": type("WeightUpdater", (WeightUpdater,), {}),
        },
    }  # fmt: skip
    for values in contents.values():
        values.pop(lacking, None)
    ours = [f"polymoe.engines.sglang.{name}" for name in ("plugin", "method")]
    before = {name: m for name, m in sys.modules.items() if name.partition(".")[0] == "sglang" or name in ours}
    for name in before:
        del sys.modules[name]
    for name, values in contents.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            parent = ".".join(parts[:count])
            if parent not in sys.modules:
                sys.modules[parent] = types.ModuleType(parent)
                sys.modules[parent].__path__ = []  # type: ignore[attr-defined]
                if count > 1:
                    setattr(sys.modules[".".join(parts[: count - 1])], parts[count - 1], sys.modules[parent])
        vars(sys.modules[name]).update(values)

    def apply() -> type[FusedMoE]:
        while hooks:
            target, hook, kind = hooks.pop(0)
            path, name = target.rsplit(".", 1)
            owner = sys.modules[path] if path in sys.modules else _in_module(path)
            setattr(owner, name, _hooked(getattr(owner, name), hook, kind))
        return layer_class

    try:
        yield apply
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "sglang" or n in ours]:
            del sys.modules[name]
        sys.modules.update(before)


def _in_module(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(sys.modules[module], name)


def _copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, as an attribute of another class."""

    @functools.wraps(function)
    def copied(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return copied


def _hooked(original: Callable[..., Any], hook: Callable[..., Any], kind: HookType) -> Callable[..., Any]:
    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if kind is HookType.AROUND:
            return hook(original, *args, **kwargs)
        if kind is HookType.BEFORE:
            hook(*args, **kwargs)
            return original(*args, **kwargs)
        found = original(*args, **kwargs)
        changed = hook(found, *args, **kwargs)
        return found if changed is None else changed

    return hooked
