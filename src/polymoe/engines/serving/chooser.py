"""LayerChooser: whose method runs a layer, polymoe's or the engine's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from polymoe.backends import BACKENDS
from polymoe.engines.serving.log import LayerLog
from polymoe.engines.serving.refit import Updates
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.stand_aside import LayerFacts, LayerPlan, judge_layer
from polymoe.engines.serving.take_over import TakenOver, take_over
from polymoe.errors import ArgumentError
from polymoe.layer.offload import slots_here
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine
from polymoe.planning.agreement import Gather, require_agreement
from polymoe.problem import Problem
from polymoe.problem.verdict import Reason, Reasons, Rejected

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Created = TypeVar("Created")


class LayerChooser:
    """Chooses for the layers of one process, of an engine that messages call ``engine``."""

    def __init__(self, engine: str, settings: EngineSettings, log: LayerLog) -> None:
        self.engine, self.settings, self.log = engine, settings, log
        self._packed: set[Problem] = set()
        self.updates = Updates()
        self._planned: list[Problem] = []
        self._slots: int | None = None
        self._requests: dict[tuple[str, str], PlanRequest] = {}

    def choose(
        self,
        where: str,
        refused: Reasons,
        create: Callable[[], Created],
        describe: Callable[[Created], tuple[Any, LayerFacts, str]],
        base: type[TakenOver],
        *,
        device: str,
        role: str,
        load_format: str,
        first_rank: bool,
        ranks: ProcessGroup | Gather | None = None,
    ) -> Any:
        """Return a method that polymoe has taken over, or None if the engine keeps the layer; the log says why.

        Every rank of ``ranks`` has to call it, in the same order of layers.

        Args:
            refused: what rules polymoe out before anything is known of the experts.
            create: makes, on trial, what the engine would make for the layer; raises whatever the engine raises for a
                layer that it cannot have.
            describe: returns, of what ``create`` returned, the engine's method, facts of the layer, and what the
                engine would have chosen.
            device: its type.
            role, load_format: the engine's; the user may say another role.
            first_rank: whether this process speaks for all ranks.
            ranks: those that share the layer's experts, if there are several.

        Raises:
            PlanError: unless all of ``ranks`` plan alike.
            UnsupportedProblem: if polymoe cannot run the layer and the user requires it.
            ArgumentError: for an unknown backend, role or kind of activations in the user's settings.
        """
        self.settings.check_names()
        method: Any = None
        request, instead = None, ""
        verdict: LayerPlan | Rejected = Rejected(tuple(refused.found))
        if not refused.found:
            request = self._request(device, self.settings.role or role)
            try:
                created = create()
            except Exception as error:  # the engine says so itself when it makes the layer
                expected = f"a layer that {self.engine}'s method takes"
                verdict = Rejected((Reason(type(error).__name__, expected, str(error)),))
            else:
                method, facts, instead = describe(created)
                verdict = judge_layer(facts, request, self.settings)
        if ranks is not None:
            require_agreement(verdict.shared if isinstance(verdict, LayerPlan) else None, ranks, where)
        if isinstance(verdict, Rejected):
            self.log.stand_aside(where, verdict.reasons, first_rank)
            return None
        assert request is not None
        self._planned.append(verdict.problem)
        return take_over(
            method,
            base,
            verdict,
            request,
            dummy=load_format == "dummy",
            first_of_its_kind=self._first_of_its_kind,
            on_packed=lambda packed, module, offloaded: self.log.packed(packed, module, offloaded, instead, first_rank),
            slots=None if self.settings.expert_memory is None else self.slots,
            updates=self.updates,
        )

    def slots(self) -> int:
        """Return the slots of each layer that ``POLYMOE_EXPERT_MEMORY`` gives to the layers chosen until the first of
        them is packed, when an engine has made its model; layers that come later, such as a draft model's, have as
        many.

        Raises:
            ArgumentError: for memory that is too small, or that holds all experts.
            PlanError: for a host without memory for all experts.
        """
        if self._slots is None:
            assert self.settings.expert_memory is not None
            specs, top_k = [p.spec for p in self._planned], max(p.top_k for p in self._planned)
            try:
                self._slots = slots_here(self.settings.expert_memory, specs, top_k)
            except ArgumentError as error:
                error.where = "POLYMOE_EXPERT_MEMORY"
                raise
        return self._slots

    def _request(self, device: str, role: str) -> PlanRequest:
        """Return the same one for all layers, which plans those of one kind once."""
        if (device, role) not in self._requests:
            request = PlanRequest(machine_of(device), role, self.settings.backend, BACKENDS, LAYOUTS)
            self._requests[device, role] = request
        return self._requests[device, role]

    def _first_of_its_kind(self, plan: LayerPlan) -> bool:
        new = plan.problem not in self._packed
        self._packed.add(plan.problem)
        return new


def machine_of(device: str | None) -> Machine:
    """The machine for a device name, without memory to spare for layers that take more than their packed bytes: an
    engine makes all layers before it fills one, and what is left of the memory becomes its cache."""
    return replace(Machine.of(device), layer_bytes=0)
