"""An engine's quantization method, with polymoe's computation in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from polymoe.engines.serving.dummy import fill
from polymoe.engines.serving.loading import LoadedParts
from polymoe.engines.serving.sources import StackedExperts
from polymoe.engines.serving.stand_aside import LayerPlan
from polymoe.engines.serving.warm_up import warm_up
from polymoe.layer.packed_layer import PackedLayer
from polymoe.layer.runtime import PlanRequest

__all__ = ["TakenOver", "take_over"]


class TakenOver:
    """Base of the class that comes before an engine's own in one made by :func:`take_over`: what both adapters do.

    Attributes:
        plan: of the layer.
        packed: the layer, which :meth:`pack` packs.
        created: names of the tensors that the engine's method created.
        experts: how they are read from those tensors, without the tensors themselves.
        loaded: which parts of the tensors the engine has loaded.
        dummy: whether the engine loads no checkpoint.
        first_of_its_kind: whether no layer with such a plan was packed before in this process.
        on_packed: called after each time the layer was packed.
    """

    plan: LayerPlan
    packed: PackedLayer
    experts: StackedExperts
    created: tuple[str, ...]
    loaded: LoadedParts
    dummy: bool
    first_of_its_kind: Callable[[LayerPlan], bool]
    on_packed: Callable[[PackedLayer, nn.Module], None]

    def note_created(self, tensors: Mapping[str, Tensor]) -> Set[str]:
        """Note the tensors that the engine's method created; return the names of those that are loaded and not read.

        Raises:
            FormatError: if they are not those that the layer was planned for.
        """
        self.created = tuple(tensors)
        # On the meta device: a reference to a tensor would keep its memory after the layer was packed.
        shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        self.experts = self.plan.experts_in(shapes)
        self.loaded = LoadedParts(self.experts)
        return tensors.keys() - set(self.experts.names)

    def pack(self, layer: Any, drop: Callable[[str], None], *, in_place: torch.device | None = None) -> None:
        """Pack the layer from the engine's tensors, and drop those.

        Args:
            layer: the engine's module.
            drop: removes the tensor of a name from it.
            in_place: where the layer's packed parameters are, if they are to be overwritten; None for new ones, on
                the device of the engine's tensors.

        Raises:
            CheckpointError: if a part of a tensor was never loaded.
            PlanError, VerificationError: as :meth:`PackedLayer.pack`.
        """
        experts = self.plan.experts_in({name: layer._parameters[name].data for name in self.experts.names})
        if self.dummy:
            fill(experts)
        else:
            self.loaded.require_all()
        device = in_place or experts.tensors[experts.names[0]].device
        first = self.first_of_its_kind(self.plan)
        weights = experts.weights(self.plan.problem.spec)
        self.packed.pack(layer, weights, device, check=first, in_place=in_place is not None)
        del experts
        for name in self.created:
            drop(name)
        if first:
            warm_up(self.packed, layer, device)
        self.on_packed(self.packed, layer)


def take_over(
    method: Any,
    base: type[TakenOver],
    plan: LayerPlan,
    request: PlanRequest,
    *,
    dummy: bool,
    first_of_its_kind: Callable[[LayerPlan], bool],
    on_packed: Callable[[PackedLayer, nn.Module], None],
) -> Any:
    """Return an object with the state of ``method``, of a class derived from ``base`` and from the method's own.

    The class has the name of the method's own, because loaders look at it.

    Args:
        method: the engine's, which is not used any more.
        base: what replaces the method's own functions. Its attributes are not hidden by those of the method.
        plan: of the layer.
        request: how the layer was planned.
        dummy, first_of_its_kind, on_packed: see :class:`TakenOver`.
    """
    theirs = type(method)
    kind: Any = type(theirs.__name__, (base, theirs), {"__module__": theirs.__module__})
    ours = object.__new__(kind)  # __init__ chooses a backend; and what a Module has is in its __dict__ too
    ours.__dict__.update({name: value for name, value in method.__dict__.items() if not hasattr(base, name)})
    ours.plan, ours.packed = plan, PackedLayer(plan.experts.where, plan.problem, request)
    ours.dummy, ours.first_of_its_kind, ours.on_packed = dummy, first_of_its_kind, on_packed
    return ours
