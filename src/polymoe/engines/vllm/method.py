"""PackedMethod: what replaces loading's end and the computation in one of vLLM's quantization methods.

vLLM's method keeps its class name, its attributes, and the part that its loader uses: ``create_weights``. The tensors
are created on the meta device, so that vLLM materializes, fills and hands over one layer at a time.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig  # pyright: ignore
from vllm.model_executor.model_loader.reload.layerwise import (  # pyright: ignore
    get_layerwise_info,
    initialize_online_processing,
)

from polymoe.backends.base import mapped_ids
from polymoe.engines.hooks import missing_hooks, wrap
from polymoe.engines.serving.loading import LoadedParts, load_nothing
from polymoe.engines.serving.refit import Updates
from polymoe.engines.serving.stand_aside import BALANCING
from polymoe.engines.serving.take_over import PLAIN, TakenOver
from polymoe.engines.vllm.balancing import let_experts_move
from polymoe.engines.vllm.facts import exchanges_batches, gathers
from polymoe.engines.vllm.hooks import RUN_HOOK
from polymoe.errors import UnsupportedProblem
from polymoe.problem.activation_quantization import FP8_GROUP128
from polymoe.problem.call import TORCH_DTYPES

_DONE = "_already_called_process_weights_after_loading"


class PackedMethod(TakenOver):
    """What comes before vLLM's own functions."""

    uses_meta_device = True
    supports_pre_processed_weights = False
    is_monolithic = False
    skip_forward_padding = False
    has_unpadded_output = False
    supports_eplb = True

    cleared: set[str]
    moe_kernel: Any

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        """The dtype of ids that vLLM's all-to-all backend requires; any, if there is none."""
        return None if self.moe_kernel is None else self.moe_kernel.prepare_finalize.topk_indices_dtype()

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any) -> Any:
        """No padding but that of the loader of vLLM's method."""
        return hidden_size, self.plan.experts.intermediate

    def create_weights(self, layer: Any, **given: Any) -> None:  # as vLLM calls it: all by keyword
        """Create vLLM's tensors on the meta device."""
        given["weight_loader"] = MethodType(_load, layer)
        layer.weight_loader = given["weight_loader"]  # trainers such as verl set it on parameters again
        before = set(layer._parameters)
        with torch.device("meta"):
            super().create_weights(layer=layer, **given)  # type: ignore[misc]
        unread = self.note_created({n: p for n, p in layer._parameters.items() if n not in before})
        for name in unread | (set(PLAIN) - set(self.experts.names)):  # loaded by name
            layer.register_parameter(name, self._nothing(layer, name, torch.device("meta")))
        self.cleared = set()
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the layer from vLLM's tensors, and drop those; make vLLM's kernel, unless its runner gathers tokens."""
        if getattr(layer, _DONE, False):
            return
        if self.incoming is not None:
            self.pack_incoming(layer, in_place=False)
            self._end(layer)
            return
        if any(layer._parameters[name].is_meta for name in self.experts.names):
            raise UnsupportedProblem(
                self.packed.where,
                expected="tensors that vLLM loaded one by one",
                got="none",
                hint="use --load-format auto, safetensors, runai_streamer or dummy, or POLYMOE=0",
            )

        self.pack(layer, lambda name: None)
        self._end(layer)
        if self.moe_kernel is None and not gathers(layer.moe_config.moe_parallel_config):
            from polymoe.engines.vllm.modular import modular_kernel

            self.moe_kernel = modular_kernel(self, layer)
        if self.is_balanced(layer):
            let_experts_move(self, layer)

    def is_balanced(self, layer: Any) -> bool:
        """Whether vLLM moves the experts of ``layer`` between ranks while it runs."""
        return layer.moe_config.moe_parallel_config.enable_eplb

    def require_places(self, layer: Any) -> None:
        """Refuse new weights of a packed layer whose experts may have moved: vLLM loads each to the place that it had
        at first, and tells nobody."""
        if self.updated and self.is_balanced(layer):
            raise UnsupportedProblem(
                f"new weights of {self.packed.where}",
                expected="experts where they were loaded",
                got=f"{BALANCING}, which may have moved them",
                hint="start the engine again with the new weights, or without --enable-eplb",
            )

    def _end(self, layer: Any) -> None:
        """Drop vLLM's tensors. What comes after the layer is complete is still looked for by name: other ranks'
        experts, and new weights in 16 bits."""
        for name in {*self.created, *PLAIN}:
            layer.register_parameter(name, self._nothing(layer, name, self.device))
        self.loaded, self.cleared = LoadedParts(self.experts), set()
        setattr(layer, _DONE, True)

    def _nothing(self, layer: Any, name: str, device: torch.device | None) -> nn.Parameter:
        """Return an empty parameter. A reload replaces parameters, and no other attributes."""
        empty = nn.Parameter(torch.empty(0, device=device), requires_grad=False)
        read = name in self.experts.names or name in PLAIN
        empty.weight_loader = MethodType(_load, layer) if read else load_nothing  # type: ignore[attr-defined]
        return empty

    def maybe_make_prepare_finalize(self, *_: Any, **__: Any) -> None:
        """Return None, so that vLLM's runner gathers the tokens of all ranks itself.

        Versions such as 0.26 ask with data and expert parallelism, and would make a kernel of their own of the layer.
        """

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        """vLLM's kernels get nothing from here; its steps before batches of experts learn whether to send FP8."""
        if exchanges_batches(layer.moe_config.moe_parallel_config) and self._takes_fp8(layer):
            return FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=[128, 128])
        return FusedMoEQuantConfig.make()

    def _takes_fp8(self, layer: Any) -> bool:
        """Whether x may come in FP8, with a scale for each 128 columns of a row."""
        if self.offloaded or self.plan.problem.activations != FP8_GROUP128:
            return False
        steps = self.packed.runtime(layer).steps(TORCH_DTYPES[self.plan.problem.dtype])
        return all("x_scales" in step.runner.options for step in steps)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> Tensor:
        """Return the weighted sum [T, H] of this rank's experts, or with data parallelism in vLLM's kernel that of all
        ranks for this rank's tokens; shared experts are vLLM's to run."""
        kernel, problem = self.moe_kernel, self.plan.problem
        if kernel is None:
            return self.run(layer, x, topk_weights, topk_ids)
        # vLLM reads nothing of the weights but their number: the tensors of packed experts have other shapes.
        experts = torch.empty(problem.spec.local_experts, 0, 0, device=x.device)
        return kernel.apply(
            hidden_states=x,
            w1=experts,
            w2=experts,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.moe_config.activation,
            global_num_experts=layer.moe_config.num_experts,
            expert_map=layer.expert_map,
            # Otherwise polymoe does it, where the model asks for it.
            apply_router_weight_on_input=kernel.fused_experts.weighs_input and problem.weight_on == "input",
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )

    def run(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the weighted sum [T, H] of this rank's experts, in ``out`` if given; ids are those of the whole
        layer."""
        if self.plan.mapped:
            topk_ids = mapped_ids(topk_ids, layer.expert_map)
        return self.run_experts(layer, x, topk_ids, topk_weights.to(torch.float32), out)


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
    done = not param.is_meta and getattr(layer, _DONE, False)
    plain = done or method.is_plain(name, loaded_weight)
    if plain or (param.is_meta and method.updated and name in method.experts.biases):
        success = _load_plain(layer, param, name, loaded_weight, shard_id, expert_id, done=done)
        if plain or method.incoming is not None:
            return success if return_success else None
    method.require_places(layer)
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


def _load_plain(
    layer: Any, param: Any, name: str, loaded_weight: Tensor, shard: str | None, expert: int | None, *, done: bool
) -> bool:
    """Take new weights in 16 bits for a layer that is packed; with the last one, pack it.

    They come in a reload, which vLLM ends itself, or (``done``) by the model's ``load_weights`` alone.
    """
    method: PackedMethod = layer.quant_method
    place = expert if expert is None or layer.expert_map is None else int(layer.expert_map[expert])
    if place == -1:  # another rank's
        return False
    method.require_places(layer)
    if not param.is_meta and not done:  # the reload hands over again what has arrived
        return True
    if not method.updates.pending:
        _guard_model_runs(method.updates)
    info = get_layerwise_info(layer)
    if param.is_meta and len(info.loaded_weights) == 1:
        method.forget_early()  # of a reload that ended before its last tensor
        method.incoming = None
    parallel = layer.moe_config.moe_parallel_config
    with _disable_current_modes():  # vLLM counts what is copied
        last = method.take(loaded_weight, name, shard, place, (parallel.tp_rank, parallel.tp_size))
        if done and last:
            method.pack_incoming(layer, in_place=True)
    if param.is_meta:
        info.load_numel_total = 0 if last else sys.maxsize
    return True


def _guard_model_runs(updates: Updates) -> None:
    """Make this process refuse to run a model, or its drafter, while one of ``updates`` has not ended.

    Raises:
        UnsupportedProblem: if this vLLM has no such place; nothing is changed then.
    """
    lacking = missing_hooks((RUN_HOOK,))
    if lacking:
        raise UnsupportedProblem("new weights in 16 bits", expected=f"vLLM with {RUN_HOOK}", got=f"no {lacking[0]}")
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # pyright: ignore

    def execute_model(theirs: Any, worker: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(scheduler_output, "total_num_scheduled_tokens", 1):
            runner = worker.worker.model_runner
            models: tuple[Any, ...] = (runner.get_model(), getattr(getattr(runner, "drafter", None), "model", None))
            for model in models:
                if hasattr(model, "modules"):  # other drafters than models have none
                    updates.require_whole(model.modules())
        return theirs(worker, scheduler_output, *args, **kwargs)

    wrap(WorkerWrapperBase, "execute_model", execute_model)
