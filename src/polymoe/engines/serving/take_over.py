"""An engine's quantization method, with polymoe's computation in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polymoe.checkpoint.shard import Shard
from polymoe.engines.serving.loading import LoadedParts, fill_dummy
from polymoe.engines.serving.refit import Updates
from polymoe.engines.serving.sources import StackedExperts
from polymoe.engines.serving.stand_aside import LayerPlan
from polymoe.engines.serving.warm_up import warm_up
from polymoe.errors import CheckpointError, UnsupportedProblem
from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import OffloadedExperts
from polymoe.layer.packed_layer import PackedLayer
from polymoe.layer.refit import IncomingExperts
from polymoe.layer.runtime import PlanRequest
from polymoe.problem.call import CallArguments
from polymoe.problem.tensors import ExpertWeights

PLAIN = ("w13_weight", "w2_weight")
"""Names of the stacked tensors of experts in 16 bits, in both engines."""


def _is_in_16_bits(name: str, tensor: Tensor) -> bool:
    return name in PLAIN and tensor.dtype in (torch.bfloat16, torch.float16)


class TakenOver:
    """Base of the class that comes before an engine's own in one made by :func:`take_over`: what both adapters do.

    Attributes:
        packed: the layer, which :meth:`pack` packs.
        created: names of the tensors that the engine's method created.
        experts: how they are read from those tensors, without the tensors themselves.
        loaded: which parts of the tensors the engine has loaded.
        dummy: whether the engine loads no checkpoint.
        first_of_its_kind: whether no layer with such a plan was packed before in this process.
        on_packed: called after each time the layer was packed.
        slots: returns the number of experts that lie on the device while all of them lie in host memory; None if all
            lie on the device, as also where the layer has no more of them.
        offloaded: these experts, once packed: none or one. In a tuple, so that no engine takes them for a submodule.
        device: where it is packed.
        incoming: new experts in 16 bits, as far as they have arrived; None if no such update has begun, or one failed.
        early: arguments of :meth:`take` for biases that came before any matrix. Biases are in 16 bits in any update:
            the first matrix tells whether experts arrive in 16 bits, or as the checkpoint stores them.
        stale: whether an update in 16 bits has begun and not ended.
        updated: the number of the pass in which the layer got the weights that it has; 0 before the first.
        updates: of all layers of the process.
    """

    plan: LayerPlan
    packed: PackedLayer
    experts: StackedExperts
    created: tuple[str, ...]
    loaded: LoadedParts
    dummy: bool
    first_of_its_kind: Callable[[LayerPlan], bool]
    on_packed: Callable[[PackedLayer, nn.Module, OffloadedExperts | None], None]
    slots: Callable[[], int] | None = None
    offloaded: tuple[OffloadedExperts, ...] = ()
    device: torch.device | None = None
    incoming: IncomingExperts | None = None
    early: tuple[tuple[Tensor, str, str | None, int | None, tuple[int, int]], ...] = ()
    stale = False
    updated = 0
    updates: Updates

    def is_plain(self, name: str, tensor: Tensor) -> bool:
        """Whether ``tensor``, of the stacked tensor called ``name``, is in 16 bits while the layer's own are not."""
        own = self.experts.tensors.get(name) if name in self.experts.names else None
        return _is_in_16_bits(name, tensor) and not (own is not None and _is_in_16_bits(name, own))

    def take(self, tensor: Tensor, name: str, shard: str | None, place: int | None, tp: tuple[int, int]) -> bool:
        """Take new weights in 16 bits, whole; return whether they are the layer's last.

        Args:
            tensor: a matrix [F, H], or [H, F] of ``shard`` w2, before it is sliced for tensor parallelism, or its bias;
                or those of all experts on this rank, where the engine hands them over so.
            name: of the engine's stacked tensor.
            shard: w1 (gate, or up of experts without a gate), w2 (down) or w3 (up); None if the engine says none.
            place: of the expert on this rank; None for all.
            tp: rank and size of the tensor parallel group.

        Raises:
            UnsupportedProblem: for a layer that cannot be updated so: with static scales of inputs, or of all experts
                at once with tensor parallelism.
            CheckpointError: before the layer was packed, and for anything but matrices and biases in 16 bits; otherwise
                as :meth:`IncomingExperts.put`, with which all of the layer must come again.
            FormatError: as there, and for stacked tensors of another size.
        """
        known = _is_in_16_bits(name, tensor) or name in self.experts.biases
        single = shard in ("w1", "w2", "w3") and place is not None and tensor.dim() == 2 - (name in self.experts.biases)
        stacked = shard is None and place is None and self.experts.source.plain_k_first
        if not self.updated or not known or not (single or stacked):
            raise CheckpointError(
                f"{self.packed.where}: {name}",
                expected="single experts' matrices in 16 bits, as new weights of a layer that was loaded before",
                got=f"{tensor.dtype} {list(tensor.shape)}",
                hint="send anything else as the checkpoint stores it, to vLLM by reload_weights",
            )
        self.updates.pending.add(self)
        if name in self.experts.biases and self.incoming is None:
            self.early += ((tensor.detach().clone(), name, shard, place, tp),)
            return False
        self._take((tensor, name, shard, place, tp))
        assert self.incoming is not None
        return self.incoming.complete

    def require_incoming(self) -> None:
        """Require that no update in 16 bits has begun and not ended.

        Raises:
            CheckpointError: naming the tensors that are missing; all of the layer must come again.
        """
        if self.early:
            self._take()
        incoming, self.incoming = self.incoming, None
        if incoming is not None:
            incoming.require_complete()

    def forget_early(self) -> None:
        """Forget biases that came before any matrix, as they were of experts that are not in 16 bits."""
        if self.early and not self.stale:
            self.updates.pending.discard(self)
        self.early = ()

    def _take(self, *given: tuple[Tensor, str, str | None, int | None, tuple[int, int]]) -> None:
        """Take new weights, after those that came early."""
        assert self.device is not None
        self.stale = True
        incoming, early, self.early = self.incoming, self.early, ()
        self.incoming = None  # after an error all parts must come again
        for tensor, name, shard, place, tp in (*early, *given):
            problem = self.packed.problem
            if incoming is None:
                whole = replace(problem.spec, intermediate=problem.spec.intermediate * tp[1])
                incoming = IncomingExperts(self.packed.where, problem, whole, device=self.device, shard=Shard.of(tp))
            if shard is None and tp[1] > 1:
                raise UnsupportedProblem(
                    f"new weights of {self.packed.where}",
                    expected="matrices of single experts, or expert parallelism without tensor parallelism",
                    got=f"{name} of all experts in 16 bits, cut by the engine as if it was quantized",
                    hint="send the tensors as the checkpoint stores them, to vLLM by reload_weights",
                )
            if shard is None or place is None:
                parts = list(self.experts.plain_parts(name, tensor))
            else:
                part = "down" if shard == "w2" else "gate" if shard == "w1" and problem.spec.gated else "up"
                parts = [(f"{part}_bias" if name in self.experts.biases else part, place, tensor)]
            its = name if shard is None else f"{name} {shard}"
            for part, e, one in parts:
                incoming.put(part, e, one, f"{its} of expert {problem.spec.first_expert + e}")
        self.incoming = incoming

    def pack_incoming(self, layer: Any, *, in_place: bool) -> None:
        """Pack the new experts, all of which have arrived; as :meth:`PackedLayer.pack`."""
        assert self.incoming is not None
        assert self.device is not None
        incoming, self.incoming = self.incoming, None
        self._pack(layer, incoming.weights(), check=False, in_place=in_place)
        self.stale = self.dummy = False
        self.updates.end(self)
        self._report(layer)

    def note_created(self, tensors: Mapping[str, Tensor]) -> Set[str]:
        """Note the tensors that the engine's method created; return the names of those that are loaded and not read.

        Raises:
            FormatError: if they are not those that the layer was planned for.
        """
        self.created = tuple(tensors)
        # On the meta device: a reference to a tensor would keep its memory after the layer was packed.
        # And not by empty_like, which imports sympy: seconds where no other code has done so.
        shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
        self.experts = self.plan.experts_in(shapes)
        self.loaded = LoadedParts(self.experts)
        return tensors.keys() - set(self.experts.names)

    def pack(self, layer: Any, drop: Callable[[str], None], *, in_place: torch.device | None = None) -> None:
        """Pack the layer from the engine's tensors, and drop those.

        Args:
            drop: removes the tensor of a name from it.
            in_place: where the layer's packed parameters are, if they are to be overwritten; None for new ones, on
                the device of the engine's tensors.

        Raises:
            CheckpointError: if a part of a tensor was never loaded.
            PlanError, VerificationError: as :meth:`PackedLayer.pack`.
        """
        experts = self.plan.experts_in({name: layer._parameters[name].data for name in self.experts.names})
        if self.dummy:
            fill_dummy(experts)
        else:
            self.loaded.require_all()
        self.device = device = in_place or experts.tensors[experts.names[0]].device
        first = self.first_of_its_kind(self.plan)
        weights = experts.weights(self.plan.problem.spec)
        self._pack(layer, weights, check=first, in_place=in_place is not None)
        self.forget_early()
        self.incoming, self.stale = None, False
        self.updates.end(self)
        del experts
        for name in self.created:
            drop(name)
        if first and not self.offloaded:
            warm_up(self.packed, layer, device)
        local = self.plan.problem.spec.local_experts
        if self.slots is not None and not self.offloaded and (slots := self.slots()) < local:
            self._offload(layer, slots)
        self._report(layer)

    def run_experts(
        self,
        layer: Any,
        x_TH: Tensor,
        ids_TA: Tensor,
        weights_TA: Tensor,
        out: Tensor | None = None,
        x_scales: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum of this rank's experts, as :meth:`polymoe.layer.experts.FusedExperts.forward`."""
        for experts in self.offloaded:
            return experts(x_TH, ids_TA, weights_TA, out=out, x_scales=x_scales)
        return self.packed.run(layer, CallArguments(x_TH, ids_TA, weights_TA, out, x_scales=x_scales))

    def _pack(self, layer: Any, weights: ExpertWeights, *, check: bool, in_place: bool) -> None:
        """Pack ``weights`` on the device, or over those in host memory."""
        assert self.device is not None
        for experts in self.offloaded:
            experts.update(weights, check=True)
            return
        self.packed.pack(layer, weights, self.device, check=check, in_place=in_place)

    def _offload(self, layer: Any, slots: int) -> None:
        """Move the packed experts to host memory; ``slots`` of them have room on the device."""
        packed = self.packed
        resident = FusedExperts(packed.problem, packed.packed(layer), packed.plans.request)
        packed.release(layer)
        experts = OffloadedExperts(resident, slots)
        experts.reserve()
        self.offloaded = (experts,)

    def _report(self, layer: Any) -> None:
        self.on_packed(self.packed, layer, self.offloaded[0] if self.offloaded else None)


def take_over(
    method: Any,
    base: type[TakenOver],
    plan: LayerPlan,
    request: PlanRequest,
    *,
    dummy: bool,
    first_of_its_kind: Callable[[LayerPlan], bool],
    on_packed: Callable[[PackedLayer, nn.Module, OffloadedExperts | None], None],
    slots: Callable[[], int] | None = None,
    updates: Updates | None = None,
) -> Any:
    """Return an object with the state of ``method``, of a class derived from ``base`` and from the method's own.

    The class has the name of the method's own, because loaders look at it.

    Args:
        method: the engine's, which is not used any more.
        base: what replaces the method's own functions. Its attributes are not hidden by those of the method.
        dummy, first_of_its_kind, on_packed, slots, updates: see :class:`TakenOver`.
    """
    theirs = type(method)
    kind: Any = type(theirs.__name__, (base, theirs), {"__module__": theirs.__module__})
    ours = object.__new__(kind)  # __init__ chooses a backend; and what a Module has is in its __dict__ too
    ours.__dict__.update({name: value for name, value in method.__dict__.items() if not hasattr(base, name)})
    ours.plan, ours.packed = plan, PackedLayer(plan.experts.where, plan.problem, request)
    ours.dummy, ours.first_of_its_kind, ours.on_packed, ours.slots = dummy, first_of_its_kind, on_packed, slots
    ours.updates = Updates() if updates is None else updates
    return ours
