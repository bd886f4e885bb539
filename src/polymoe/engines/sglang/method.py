"""PackedExpertsMethod: what replaces loading's end and the computation in one of SGLang's quantization methods.

SGLang's method keeps its class name, its attributes, and the part that its loader uses: ``create_weights``. SGLang
loads the whole model before it processes any layer, so the tensors are created on the CPU. SGLang moves them to the GPU
layer by layer, where they are packed.

When SGLang updates weights, a layer gets its tensors back, on the CPU, with the first part that arrives. With the last
part it is packed into the parameters that it has, so that CUDA graphs stay valid. Until then it has the old weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput  # pyright: ignore
from sglang.srt.layers.moe.topk import TopKOutputChecker  # pyright: ignore
from torch import Tensor, nn

from polymoe.engines.serving.loading import LoadedParts, load_nothing
from polymoe.engines.serving.take_over import PLAIN, TakenOver
from polymoe.engines.sglang.facts import create_tensors
from polymoe.errors import UnsupportedProblem


class PackedExpertsMethod(TakenOver):
    """What comes before SGLang's own functions."""

    # SGLang's kernels, which are not made here. Without a runner, no x arrives quantized, and SGLang gives ids.
    runner = None

    unfinished: set[PackedExpertsMethod]
    """Of all layers of the process, those whose update has begun and not ended."""

    again: tuple[Callable[[], Any], ...] = ()
    """Load the biases that came :attr:`early`."""

    @property
    def load_up_proj_weight_first(self) -> bool:
        """False: gate comes before up, whatever SGLang's method sets."""
        return False

    @load_up_proj_weight_first.setter
    def load_up_proj_weight_first(self, value: bool) -> None:
        pass

    def create_weights(self, layer: Any, **given: Any) -> None:  # as SGLang calls it: all by keyword
        """Create SGLang's tensors on the CPU."""
        # For backends that transpose or exchange the tensors while they are loaded.
        layer.use_triton_kernels = layer.use_flashinfer_trtllm_moe = False
        given["weight_loader"] = self._noting(layer, given["weight_loader"])
        # Of the model, to which each layer is moved.
        self.device = torch.empty(0).device  # SGLang makes models with their device as the default one
        unread = self.note_created(create_tensors(super().create_weights, layer, "cpu", **given))  # type: ignore[misc]
        in_16_bits = set(PLAIN) - set(self.created)  # by these names new weights come in 16 bits
        for name in unread | in_16_bits:
            empty = nn.Parameter(torch.empty(0), requires_grad=False)
            empty.weight_loader = load_nothing if name in unread else given["weight_loader"]  # type: ignore[attr-defined]
            layer.register_parameter(name, empty)
        # From 0.5.23 on, SGLang moves what it finds new in a layer to the device of what was there, if that was one.
        layer.register_buffer("packed_on", torch.empty(0), persistent=False)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Make none."""
        self.moe_runner_config = moe_runner_config

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the layer from SGLang's tensors, and drop those; or require that an update is whole."""
        if self.updated:
            if self in self.unfinished:  # the end of an update from disk or through IPC
                self.loaded.require_all()
            self.require_incoming()
            return
        for name in self.created:
            tensor = layer._parameters[name]
            if tensor.device != self.device:  # SGLang's loader of dummy weights moves no layer
                made: Any = nn.Parameter(torch.empty_like(tensor, device=self.device), requires_grad=False)
                made.__dict__.update(tensor.__dict__)  # its loader, and what else SGLang has set
                layer._parameters[name] = made
        self.pack(layer, lambda name: _empty(layer, name))
        self.loaded = LoadedParts(self.experts)

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Do nothing: the first part that arrives makes room for all."""

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Return this rank's weighted sum [T, H], which SGLang combines and reduces."""
        x, chosen = dispatch_output.hidden_states, dispatch_output.topk_output
        if dispatch_output.hidden_states_scale is not None or not TopKOutputChecker.format_is_standard(chosen):
            raise UnsupportedProblem(
                self.packed.where,
                expected="x in 16 bits, with ids and weights of experts",
                got=f"{x.dtype} and {type(chosen).__name__}",
                hint="POLYMOE=0 runs this model without polymoe; please report it",
            )
        weights, scale = chosen.topk_weights.to(torch.float32), _routed_scale(layer, x)
        if scale == 1.0:
            return StandardCombineInput(hidden_states=self.packed(layer, x, chosen.topk_ids, weights))
        if self.plan.problem.weight_on == "input":
            return StandardCombineInput(hidden_states=self.packed(layer, x, chosen.topk_ids, weights) * scale)
        return StandardCombineInput(hidden_states=self.packed(layer, x, chosen.topk_ids, weights * scale))

    def _noting(self, layer: Any, theirs: Callable[..., Any]) -> Callable[..., Any]:
        """Return SGLang's loader of a parameter, which now also notes what was loaded, and packs an updated layer."""

        @functools.wraps(theirs)
        def load(
            param: Any,
            loaded_weight: Tensor,
            weight_name: str,
            shard_id: str | None,
            *expert_id: int | None,
            **more: Any,
        ) -> Any:
            name = next(name for name, parameter in layer._parameters.items() if parameter is param)
            expert = more.get("expert_id", expert_id[0] if expert_id else None)
            rest = (weight_name, shard_id, *expert_id)
            place = None if expert is None else layer._map_global_expert_id_to_local_expert_id(expert)
            if place == -1:  # another rank's
                return theirs(param, loaded_weight, *rest, **more)
            bias = self.updated and name in self.experts.biases and self not in self.unfinished
            if bias or self.is_plain(name, loaded_weight):
                if bias and self.incoming is None:  # to be loaded by SGLang, if the first matrix is not in 16 bits
                    kept = functools.partial(load, param, loaded_weight.clone(), *rest, **more)
                    self.again = (*(self.again if self.early else ()), kept)
                if self.take(loaded_weight, name, shard_id, place, (layer.moe_tp_rank, layer.moe_tp_size)):
                    self.pack_incoming(layer, in_place=True)
                return None
            if self.updated:
                self._begin_update(layer)
            new = self.loaded.note(name, loaded_weight, shard_id, place)
            if self.updated and not new:  # an update that failed is sent once more
                self.loaded = LoadedParts(self.experts)
                self.loaded.note(name, loaded_weight, shard_id, place)
            result = theirs(param, loaded_weight, *rest, **more)
            if self.updated and not self.loaded.missing:
                self._end_update(layer)
            return result

        return load

    def _begin_update(self, layer: Any) -> None:
        if self not in self.unfinished:
            self.unfinished.add(self)
            for name in self.experts.names:
                made = torch.empty_like(self.experts.tensors[name], device="cpu")
                made.view(torch.uint8).zero_()  # padding is never loaded
                layer._parameters[name].data = made
            again = self.again if self.early else ()
            self.forget_early()
            for load in again:
                load()

    def _end_update(self, layer: Any) -> None:
        self.dummy = False
        try:
            self.pack(layer, lambda name: _empty(layer, name), in_place=self.device)
        finally:
            self.loaded = LoadedParts(self.experts)  # after an error all parts must come again
        self.unfinished.discard(self)


def _routed_scale(layer: Any, x: Tensor) -> float:
    """Return what the layer multiplies its output by: the routed scaling factor, unless it is in the routing weights
    already, or the model multiplies by it, as models do on devices other than GPUs."""
    if not x.is_cuda or layer.should_fuse_routed_scaling_factor_in_topk:
        return 1.0
    factor = layer.moe_runner_config.routed_scaling_factor
    return 1.0 if factor is None else float(factor)


def _empty(layer: nn.Module, name: str) -> None:
    """Free a parameter's memory. It stays the same parameter, with its loader and what else SGLang has set."""
    parameter = layer._parameters[name]
    assert parameter is not None
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
