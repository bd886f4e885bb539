"""refit: new weights for a model that polymoe.load has packed, in place, as a trainer sends them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from polymoe.checkpoint.arrangement import Fused
from polymoe.checkpoint.plain_experts import PlainExperts
from polymoe.common.units import first_few
from polymoe.engines.transformers.families import PackedExperts
from polymoe.errors import ArgumentError, CheckpointError, FormatError, UnsupportedProblem, nearest
from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import OffloadedExperts
from polymoe.layer.refit import IncomingExperts


def refit(model: Any, tensors: Iterable[tuple[str, Tensor]], *, check: bool = False) -> None:
    """Give a model that :func:`load` has packed new weights, in place, while it is loaded.

    Experts in 16 bits are quantized to the format in which their layer is held, on its device and one at a time, as
    :func:`load` does with ``experts=``; every other tensor is copied. Addresses stay, so that captured CUDA graphs
    compute with the new weights.

    Until every tensor has come, calls of the model's experts raise :class:`~polymoe.PlanError`, also after an error;
    another refit of all tensors ends that. A CUDA graph cannot raise: do not replay one meanwhile.

    Args:
        model: from :func:`load`, ``from_pretrained`` with :class:`PolymoeConfig`, or :func:`install`.
        tensors: each parameter and persistent buffer of the model once, under the model's own names; those of experts
            in bfloat16 or float16, under the names that the model's checkpoints or Transformers give them.
        check: compare packed experts with what was quantized, and results of a few with the reference.

    Raises:
        ArgumentError: for a dictionary instead of its items. Nothing is changed then.
        UnsupportedProblem: for a model without packed experts, one that is split among ranks, or with experts in host
            memory; for static scales of inputs, and for formats that polymoe only reads; while another refit of the
            model runs. Nothing is changed then.
        CheckpointError: for a tensor that is missing, that comes twice, or that the model does not have.
        FormatError: for a tensor of another dtype or shape, or with numbers that are not finite.
        PlanError: if scales of the new experts reach further than those that a layer was planned for.
    """
    if isinstance(tensors, Mapping):
        expected, hint = "pairs of a name and a tensor", "model.state_dict().items() gives them"
        raise ArgumentError("tensors", expected=expected, got=type(tensors).__name__, hint=hint)
    layers = _layers(model)
    arriving = {
        name: IncomingExperts(name, module.fused.problem, module.plain.whole, device=module.fused.device)
        for name, module in layers.items()
    }
    index = _index(layers)
    others = _Others(model)
    decided: dict[str, Fused] = {}
    seen: set[str] = set()
    with _suspended([module.fused for module in layers.values()]):
        for name, tensor in tensors:
            if name in seen:
                raise CheckpointError(name, expected="each tensor once in a refit", got="a second one")
            seen.add(name)
            if name not in index:
                others.copy(name, tensor)
                continue
            layer, part, expert, arrangements = index[name]
            if layer not in arriving:
                expected, got = "each expert once in a refit", "a second one under another name"
                raise CheckpointError(name, expected=expected, got=got)
            found: Iterable[tuple[str, int, Tensor]] = [(part, expert, tensor)]
            if arrangements:
                plain: PlainExperts = layers[layer].plain
                arrangement = _arrangement(plain.fitting(arrangements, part, tensor, name), decided.get(layer), name)
                if not part.endswith("_bias"):
                    decided[layer] = arrangement
                found = plain.split(arrangement, part, tensor)
            for one, e, part_of_it in found:
                arriving[layer].put(one, e, part_of_it, name)
            if arriving[layer].complete:
                fused = layers[layer].fused
                fused._layer.update(fused, arriving.pop(layer).weights(), check=check, wait=False, of_model=True)
        for experts in arriving.values():
            experts.require_complete()
        others.require_all()


@contextmanager
def _suspended(layers: list[FusedExperts]) -> Iterator[None]:
    """Refuse calls of ``layers`` until the block has ended without an error, and other updates while it runs."""
    begun: list[FusedExperts] = []
    whole = False
    try:
        for fused in layers:
            fused._layer.suspend(fused, wait=True)
            begun.append(fused)
        yield
        whole = True
    finally:
        for fused in begun:
            fused._layer.resume(fused, whole=whole)


def _arrangement(fitting: list[Fused], decided: Fused | None, name: str) -> Fused:
    """Return the one of ``fitting`` in which a layer's stacked tensors are: its matrices are alike."""
    if decided is not None and decided in fitting:
        return decided
    if len({arrangement.k_first for arrangement in fitting}) > 1:
        raise FormatError(
            name,
            expected="experts whose shape tells rows from columns",
            got="square ones",
            hint="send the layer's other projection first",
        )
    return fitting[0]


def _layers(model: Any) -> dict[str, Any]:
    """The packed experts modules of ``model`` by name, all of which can be refilled."""
    layers: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, PackedExperts)}
    if not layers:
        raise UnsupportedProblem(
            "refit",
            expected="a model with packed experts",
            got="none",
            hint="load_state_dict gives other models new weights",
        )
    for name, module in layers.items():
        if isinstance(module.fused, OffloadedExperts):
            raise UnsupportedProblem(
                f"refit of {name}",
                expected="experts on the GPU",
                got="experts in host memory",
                hint="load the model without expert_memory",
            )
        if module.fused.problem.tp * module.fused.problem.ep > 1:
            raise UnsupportedProblem(
                f"refit of {name}",
                expected="a model on one rank",
                got="one that is split: ranks could not agree on what has come",
                hint="vLLM and SGLang take new weights on several ranks",
            )
    return layers


def _index(layers: dict[str, Any]) -> dict[str, tuple[str, str, int, list[Fused]]]:
    """By the name of each tensor of experts: their module, the part, the expert, and arrangements of stacked ones."""
    index: dict[str, tuple[str, str, int, list[Fused]]] = {}
    for layer, module in layers.items():
        for name, arrangement, part, expert in module.plain.names():
            found = index.setdefault(name, (layer, part, expert, []))
            if isinstance(arrangement, Fused):
                found[3].append(arrangement)
    return index


class _Others:
    """The tensors of a model outside its experts, which are overwritten."""

    def __init__(self, model: Any) -> None:
        self._tensors: dict[str, Tensor] = model.state_dict()
        split = [name for name, tensor in self._tensors.items() if hasattr(tensor, "device_mesh")]
        if split:
            raise UnsupportedProblem("refit", expected="a model on one rank", got=f"{split[0]}, split among several")
        away = [name for name, tensor in self._tensors.items() if tensor.is_meta]
        if away:
            raise UnsupportedProblem(
                "refit",
                expected="a model whose tensors stay on their devices",
                got=f"{away[0]}, which accelerate brings for each call",
                hint="load the model without offloading",
            )
        quantized = [name for name, own in self._tensors.items() if own.itemsize == 1 and own.dtype != torch.bool]
        if quantized:
            raise UnsupportedProblem(
                "refit",
                expected="tensors outside the experts in 16 or 32 bits",
                got=f"{quantized[0]} in {str(self._tensors[quantized[0]].dtype).removeprefix('torch.')}",
                hint="load a checkpoint whose other matrices are not quantized",
            )
        patterns = [*(model._keys_to_ignore_on_load_unexpected or ())]
        self._ignored = [re.compile(pattern) for pattern in patterns]
        self._copied: set[int] = set()

    @torch.no_grad()
    def copy(self, name: str, tensor: Tensor) -> None:
        """Copy ``tensor`` over the model's of this name."""
        own = self._tensors.get(name)
        if own is None:
            if any(pattern.search(name) for pattern in self._ignored):
                return
            raise CheckpointError(name, expected="a tensor of the model", got="none of this name",
                                  hint=nearest(name, tuple(self._tensors)))  # fmt: skip
        same = tensor.dtype == own.dtype or (tensor.is_floating_point() and own.is_floating_point())
        if tensor.shape != own.shape or not same:
            raise FormatError(
                name, expected=f"{own.dtype} {list(own.shape)}", got=f"{tensor.dtype} {list(tensor.shape)}"
            )
        tensor = tensor.to(own.device, own.dtype)
        if not bool(torch.isfinite(tensor).all()):
            kind = str(own.dtype).removeprefix("torch.")
            raise FormatError(name, expected=f"numbers that are finite in {kind}", got="NaN or infinity")
        own.copy_(tensor)
        self._copied.add(own.data_ptr())

    def require_all(self) -> None:
        """Raise CheckpointError if one was not copied; of tied ones, which share memory, one is enough."""
        missing = [name for name, own in self._tensors.items() if own.data_ptr() not in self._copied and own.numel()]
        if missing:
            raise CheckpointError(
                "refit",
                expected="every tensor of the model",
                got=f"none for {first_few(missing)}",
                hint="send all of them again",
            )
