"""PackedMethod: what replaces loading's end and the computation in one of vLLM's quantization methods.

vLLM's method keeps its class name, its attributes, and the part that its loader uses: ``create_weights``. The tensors
are created on the meta device, so that vLLM materializes, fills and hands over one layer at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig  # pyright: ignore
from vllm.model_executor.model_loader.reload.layerwise import (  # pyright: ignore
    get_layerwise_info,
    initialize_online_processing,
)

from polymoe.backends.base import mapped_ids
from polymoe.engines.serving.dummy import fill
from polymoe.engines.serving.loading import LoadedParts
from polymoe.engines.serving.packed_layer import PackedLayer
from polymoe.engines.serving.sources import StackedExperts
from polymoe.engines.serving.stand_aside import LayerPlan
from polymoe.engines.serving.take_over import derived_method
from polymoe.errors import UnsupportedProblem
from polymoe.runtime import PlanRequest

__all__ = ["PackedMethod", "take_over"]

_DONE = "_already_called_process_weights_after_loading"


class PackedMethod:
    """Base class that comes before vLLM's method in a class made by :func:`take_over`."""

    uses_meta_device = True
    supports_pre_processed_weights = False
    is_monolithic = False
    skip_forward_padding = False
    has_unpadded_output = False
    supports_eplb = False
    topk_indices_dtype = None

    plan: LayerPlan
    packed: PackedLayer
    experts: StackedExperts
    created: tuple[str, ...]
    dummy: bool
    on_packed: Callable[[PackedMethod, nn.Module], None]
    loaded: LoadedParts
    cleared: set[str]

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any) -> Any:
        """No padding but that of the loader of vLLM's method."""
        return hidden_size, self.plan.experts.intermediate

    def create_weights(self, layer: Any, **given: Any) -> None:  # as vLLM calls it: all by keyword
        """Create vLLM's tensors on the meta device.

        Raises:
            FormatError: if they are not those that the layer was planned for.
        """
        given["weight_loader"] = MethodType(_load, layer)
        before = set(layer._parameters)
        with torch.device("meta"):
            super().create_weights(layer=layer, **given)  # type: ignore[misc]
        tensors = {n: p for n, p in layer._parameters.items() if n not in before}
        self.created = tuple(tensors)
        self.experts = self.plan.experts_in(tensors)
        for name in tensors.keys() - set(self.experts.names):  # loaded by name, and not read
            layer.register_parameter(name, _nothing(torch.device("meta")))
        self.loaded, self.cleared = LoadedParts(self.experts), set()
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the layer from vLLM's tensors, and drop those.

        Raises:
            CheckpointError: if a part of a tensor was never loaded.
            PlanError, VerificationError: as :meth:`PackedLayer.pack`.
        """
        if getattr(layer, _DONE, False):
            return
        tensors = {name: layer._parameters[name].data for name in self.experts.names}
        if any(tensor.is_meta for tensor in tensors.values()):
            raise UnsupportedProblem(
                self.packed.where,
                expected="tensors that vLLM loaded one by one",
                got="none",
                hint="use --load-format auto, safetensors, runai_streamer or dummy, or POLYMOE=0",
            )
        experts = self.plan.experts_in(tensors)
        if self.dummy:
            fill(experts)
        else:
            self.loaded.require_all()
        weights = experts.weights(self.plan.problem.spec)
        device = next(iter(tensors.values())).device
        self.packed.pack(layer, weights, device, check=self.check(self.plan))
        for name in self.created:
            # What comes after the layer is complete, such as other ranks' experts, is still looked for by name.
            layer.register_parameter(name, _nothing(device))
        self.loaded, self.cleared = LoadedParts(self.experts), set()
        setattr(layer, _DONE, True)
        self.on_packed(self, layer)

    check: Callable[[LayerPlan], bool]

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        """vLLM's kernels get nothing from here."""
        return FusedMoEQuantConfig.make()

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> Tensor:
        """Return this rank's weighted sum [T, H]; shared experts are vLLM's to run."""
        if self.plan.mapped:
            topk_ids = mapped_ids(topk_ids, layer.expert_map)
        return self.packed(layer, x, topk_ids, topk_weights.to(torch.float32))


def take_over(
    method: Any,
    plan: LayerPlan,
    request: PlanRequest,
    where: str,
    *,
    dummy: bool,
    check: Callable[[LayerPlan], bool],
    on_packed: Callable[[PackedMethod, nn.Module], None],
) -> Any:
    """Return ``method`` with polymoe's computation: an instance of a class of the same name, derived from its own.

    Args:
        method: vLLM's method, which is not used any more.
        plan: of the layer.
        request: how the layer was planned.
        where: the layer's name.
        dummy: whether vLLM loads no checkpoint.
        check: whether the packed experts are compared with the reference.
        on_packed: called after each time the layer was packed.
    """
    return derived_method(
        method,
        PackedMethod,
        plan=plan,
        packed=PackedLayer(where, plan.problem, request),
        dummy=dummy,
        check=check,
        on_packed=on_packed,
    )


def _load(
    layer: Any,
    param: Any,
    loaded_weight: Tensor,
    weight_name: str,
    shard_id: str | None,
    expert_id: int | None,
    return_success: bool = False,
) -> bool | None:
    """Load with vLLM's ``weight_loader``, and note what was loaded: vLLM counts elements, some of them twice.

    On the meta device nothing is loaded; vLLM only looks whether the layer is complete. Then it calls this again with
    memory that holds anything, of which some, the padding, is never loaded: so it is cleared first.
    """
    method: PackedMethod = layer.quant_method
    name = next(name for name, parameter in layer._parameters.items() if parameter is param)
    if not param.is_meta and name not in method.cleared:
        param.data.zero_()
        method.cleared.add(name)
        method.loaded.forget(name)
    load = type(layer).weight_loader
    success = load(layer, param, loaded_weight, weight_name, shard_id, expert_id, return_success=True)
    if success is not False:
        method.loaded.note(name, loaded_weight, shard_id, expert_id)
    if param.is_meta:
        get_layerwise_info(layer).load_numel_total = sys.maxsize if method.loaded.missing else 0
    return success if return_success else None


_load.supports_moe_loading = True  # type: ignore[attr-defined]


def _nothing(device: torch.device) -> nn.Parameter:
    """Return an empty parameter into which nothing is loaded. A reload replaces parameters, and no other attributes."""
    empty = nn.Parameter(torch.empty(0, device=device), requires_grad=False)
    empty.weight_loader = _discard  # type: ignore[attr-defined]
    return empty


def _discard(param: Any, loaded_weight: Tensor, *_: Any, return_success: bool = False, **__: Any) -> bool | None:
    """Load nothing: the tensor is not read."""
    return True if return_success else None
