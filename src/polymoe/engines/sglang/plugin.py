"""The hooks on SGLang's ``FusedMoE``: for each layer, SGLang's method or polymoe's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_tp_group  # pyright: ignore
from sglang.srt.layers.moe.topk import TopK, TopKOutputFormat  # pyright: ignore
from sglang.srt.layers.moe.utils import get_moe_runner_backend  # pyright: ignore
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore
from sglang.srt.runtime_context import get_server_args  # pyright: ignore

from polymoe.common.units import first_few
from polymoe.engines.serving.chooser import LayerChooser
from polymoe.engines.serving.log import LayerLog
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.sglang.facts import Asked, facts_of, name_of, refusals, role_of, trial_tensors
from polymoe.engines.sglang.hooks import FORWARD, INIT, SETATTR, TENSORS, TOPK
from polymoe.engines.sglang.method import PackedExpertsMethod
from polymoe.errors import UnsupportedProblem

NO_DIRECT = (
    'polymoe has packed this model\'s experts: load_format="direct" copies into tensors that are not there; send the '
    "checkpoint's own names without it, or start SGLang with POLYMOE=0"
)

_TOPK_KNOWS_ITS_LAYER = hasattr(TopK, "bind_runner_backend")  # from 0.5.23 on; before, only its number


def install(settings: EngineSettings, log: LayerLog) -> LayerHooks:
    """Register the hooks of this process, which SGLang then applies."""
    chooser = LayerHooks(settings, log)
    HookRegistry.register(INIT, chooser.construct, HookType.AROUND)
    HookRegistry.register(SETATTR, chooser.set_attribute, HookType.AROUND)
    HookRegistry.register(FORWARD, chooser.require_whole_layers, HookType.BEFORE)
    HookRegistry.register(TENSORS, chooser.update_tensors, HookType.AROUND)
    if not _TOPK_KNOWS_ITS_LAYER:
        HookRegistry.register(TOPK, chooser.choose_format, HookType.BEFORE)
    return chooser


class LayerHooks(LayerChooser):
    """What is called from SGLang: chooses the method of each layer of this process."""

    def __init__(self, settings: EngineSettings, log: LayerLog) -> None:
        super().__init__("SGLang", settings, log)
        self._constructed: list[tuple[Any, Asked]] = []  # the layer that is being made
        self._ours: dict[int, bool] = {}  # whether polymoe runs the layer of this number
        self.unfinished: set[PackedExpertsMethod] = set()

    def construct(self, original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
        """Around ``FusedMoE.__init__``."""
        given = inspect.signature(original).bind(layer, *args, **kwargs).arguments
        self._constructed.append((layer, Asked(given["hidden_size"], given["intermediate_size"])))
        try:
            original(layer, *args, **kwargs)
        finally:
            self._constructed.pop()
        ours = isinstance(layer.quant_method, PackedExpertsMethod)
        if ours:
            # For backends that take ids of the whole layer, or leave the sum to the caller.
            layer.dispatcher.skip_local_expert_mapping = layer.supports_deferred_finalize = False
        alike = self._ours.setdefault(layer.layer_id, ours) == ours
        if not alike and not _TOPK_KNOWS_ITS_LAYER and get_moe_runner_backend().value != "auto":
            raise UnsupportedProblem(
                name_of(layer),
                expected=f"all layers with the number {layer.layer_id} run by one side, as a draft model's may be",
                got="one by polymoe, and another by SGLang",
                hint="POLYMOE=0 runs both without polymoe",
            )

    def set_attribute(self, original: Callable[..., None], layer: Any, name: str, value: Any) -> None:
        """Around ``FusedMoE.__setattr__``: every way to choose a method ends with ``self.quant_method = ...``."""
        if name == "quant_method" and value is not None and not isinstance(value, PackedExpertsMethod):
            asked = next((asked for made, asked in self._constructed if made is layer), None)
            if asked is not None:
                value = self.method(layer, value, asked)
        original(layer, name, value)

    def choose_format(self, topk: Any, *_: Any, **__: Any) -> None:
        """Before ``TopK.forward_cuda``, which by default suits SGLang's backend: polymoe needs ids and weights."""
        if topk.topk_config.output_format is None and self._ours.get(topk.layer_id, False):
            topk.topk_config.output_format = TopKOutputFormat.STANDARD

    def require_whole_layers(self, runner: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
        """Before the model runs: refuse if an update of a layer has not ended, as others may have new weights."""
        if not forward_batch.forward_mode.is_idle():
            self.updates.require_whole(runner.model.modules())
        if self.unfinished and not forward_batch.forward_mode.is_idle():
            names = sorted(method.packed.where for method in self.unfinished)
            missing = sorted({name for method in self.unfinished for name in method.loaded.missing})
            raise UnsupportedProblem(
                first_few(names, 3),
                expected="an update of all tensors of a layer's experts before the next request",
                got=f"none, or not all parts, of {', '.join(missing)}",
                hint="pause generation until the last tensor was sent; after an error, start SGLang again",
            )

    def update_tensors(
        self, original: Callable[..., Any], updater: Any, named_tensors: Any, load_format: str | None = None
    ) -> Any:
        """Around ``WeightUpdater.update_weights_from_tensor``: "direct" names SGLang's stacked tensors, not loaders."""
        if load_format == "direct" and any(self._ours.values()):
            return False, NO_DIRECT
        return original(updater, named_tensors, load_format)

    def method(self, layer: Any, method: Any, asked: Asked) -> Any:
        """Return the method for a layer that is half made: polymoe's, or SGLang's own ``method``.

        Raises:
            PlanError: unless all ranks that share the layer's experts plan alike.
            UnsupportedProblem: if polymoe cannot run the layer and the user requires it.
        """
        server = get_server_args()
        instead = f"{type(method).__name__} on {get_moe_runner_backend().value}"
        ours = self.choose(
            name_of(layer),
            refusals(layer, server, self.settings),
            lambda: trial_tensors(layer, method, asked),
            lambda tensors: (method, facts_of(layer, method, server, asked, tensors), instead),
            PackedExpertsMethod,
            device=torch.empty(0).device.type,  # SGLang makes models with their device as the default one
            role=role_of(server),
            load_format=str(getattr(server.load_format, "value", server.load_format)),
            first_rank=_first_rank(layer),
            ranks=_ranks(layer),
        )
        if ours is None:
            return method
        ours.unfinished = self.unfinished
        return ours


def _ranks(layer: Any) -> Any:
    """The group of the ranks that share a layer's experts; None for one."""
    return None if layer.moe_tp_size * layer.moe_ep_size == 1 else get_tp_group().cpu_group


def _first_rank(layer: Any) -> bool:
    return layer.moe_tp_rank == layer.moe_ep_rank == 0
