"""PackedExpertsMethod: what replaces loading's end and the computation in one of SGLang's quantization methods.

SGLang's method keeps its class name, its attributes, and the part that its loader uses: ``create_weights``. SGLang
loads the whole model before it processes any layer, so the tensors are created on the CPU. SGLang moves them to the GPU
layer by layer, where they are packed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput  # pyright: ignore
from sglang.srt.layers.moe.topk import TopKOutputChecker  # pyright: ignore
from torch import Tensor, nn

from polymoe.engines.serving.take_over import TakenOver
from polymoe.engines.sglang.facts import create_tensors
from polymoe.errors import UnsupportedProblem

__all__ = ["NO_UPDATES", "PackedExpertsMethod"]

NO_UPDATES = (
    "polymoe has packed this model's experts, and does not update them while SGLang runs: start SGLang again, or with "
    "POLYMOE=0"
)


class PackedExpertsMethod(TakenOver):
    """What comes before SGLang's own functions."""

    # SGLang's kernels, which are not made here. Without a runner, no x arrives quantized, and SGLang gives ids.
    runner = None

    done: bool
    device: torch.device
    """Of the model, to which each layer is moved."""

    @property
    def load_up_proj_weight_first(self) -> bool:
        """False: gate comes before up, whatever SGLang's method sets."""
        return False

    @load_up_proj_weight_first.setter
    def load_up_proj_weight_first(self, value: bool) -> None:
        pass

    def create_weights(self, layer: Any, **given: Any) -> None:  # as SGLang calls it: all by keyword
        """Create SGLang's tensors on the CPU.

        Raises:
            FormatError: if they are not those that the layer was planned for.
        """
        # For backends that transpose or exchange the tensors while they are loaded.
        layer.use_triton_kernels = layer.use_flashinfer_trtllm_moe = False
        given["weight_loader"] = self._noting(layer, given["weight_loader"])
        self.device = torch.empty(0).device  # SGLang makes models with their device as the default one
        unread = self.note_created(create_tensors(super().create_weights, layer, "cpu", **given))  # type: ignore[misc]
        for name in unread:  # loaded by name
            _replace(layer, name, _discard)
        self.done = False

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Make none."""
        self.moe_runner_config = moe_runner_config

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the layer from SGLang's tensors, and drop those.

        Raises:
            CheckpointError: if a part of a tensor was never loaded.
            PlanError, VerificationError: as :meth:`PackedLayer.pack`.
        """
        if self.done:
            return
        for name in self.created:
            tensor = layer._parameters[name]
            if tensor.device != self.device:  # SGLang's loader of dummy weights moves no layer
                made = torch.empty_like(tensor, device=self.device)
                layer._parameters[name] = nn.Parameter(made, requires_grad=False)
        self.pack(layer, lambda name: _replace(layer, name, _refuse))
        self.done = True

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Refuse: SGLang would load into tensors that are not there.

        Raises:
            UnsupportedProblem: always.
        """
        _refuse()

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Return this rank's weighted sum [T, H], which SGLang combines and reduces.

        Raises:
            UnsupportedProblem: if SGLang quantized x, or did not choose the experts.
        """
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
        """Return SGLang's loader of a parameter, which now also notes what was loaded."""

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
            place = None if expert is None else layer._map_global_expert_id_to_local_expert_id(expert)
            if place != -1:
                self.loaded.note(name, loaded_weight, shard_id, place)
            return theirs(param, loaded_weight, weight_name, shard_id, *expert_id, **more)

        return load


def _routed_scale(layer: Any, x: Tensor) -> float:
    """Return what the layer multiplies its output by: the routed scaling factor, unless it is in the routing weights
    already, or the model multiplies by it, as models do on devices other than GPUs."""
    if not x.is_cuda or layer.should_fuse_routed_scaling_factor_in_topk:
        return 1.0
    factor = layer.moe_runner_config.routed_scaling_factor
    return 1.0 if factor is None else float(factor)


def _replace(layer: nn.Module, name: str, load: Callable[..., None]) -> None:
    """Replace a parameter by an empty one of its name and dtype, which ``load`` loads."""
    old = layer._parameters[name]
    assert old is not None
    delattr(layer, name)
    empty: Any = nn.Parameter(torch.empty(0, dtype=old.dtype, device=old.device), requires_grad=False)
    empty.weight_loader = load
    layer.register_parameter(name, empty)


def _discard(*_: Any, **__: Any) -> None:
    """Load nothing: the tensor is not read."""


def _refuse(*_: Any, **__: Any) -> None:
    """Load nothing, and say so."""
    raise UnsupportedProblem("update of weights", expected="none of packed experts", got="one", hint=NO_UPDATES)
