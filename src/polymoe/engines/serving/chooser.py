"""LayerChooser: whose method runs a layer, polymoe's or the engine's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from polymoe.backends import BACKENDS
from polymoe.engines.serving.log import LayerLog
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.stand_aside import LayerFacts, LayerPlan, judge_layer
from polymoe.engines.serving.take_over import TakenOver, take_over
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine
from polymoe.planning.agreement import Gather, require_agreement
from polymoe.planning.selection import Selection
from polymoe.problem import Problem
from polymoe.runtime import PlanRequest
from polymoe.verdict import Reason, Reasons

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LayerChooser", "machine_of"]

Created = TypeVar("Created")


class LayerChooser:
    """Chooses for the layers of one process.

    Args:
        engine: its name in messages.
        settings: the user's.
        log: says what was chosen.
    """

    def __init__(self, engine: str, settings: EngineSettings, log: LayerLog) -> None:
        self.engine, self.settings, self.log = engine, settings, log
        self._packed: set[Problem] = set()

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
            where: the layer's name.
            refused: what rules polymoe out before anything is known of the experts.
            create: makes, on trial, what the engine would make for the layer; raises whatever the engine raises for a
                layer that it cannot have.
            describe: returns, of what ``create`` returned, the engine's method, facts of the layer, and what the
                engine would have chosen.
            base: as in :func:`take_over`.
            device: type of the device that the layer will be on.
            role: the engine's, unless the user says otherwise.
            load_format: the engine's.
            first_rank: whether this process speaks for all ranks.
            ranks: those that share the layer's experts, if there are several.

        Raises:
            PlanError: unless all of ``ranks`` plan alike.
            UnsupportedProblem: if polymoe cannot run the layer and the user requires it.
            ArgumentError: for an unknown backend, role or kind of activations in the user's settings.
        """
        reasons, plan, selection = tuple(refused.found), None, None
        if not reasons:
            request = PlanRequest(
                machine_of(device), self.settings.role or role, self.settings.backend, BACKENDS, LAYOUTS
            )
            try:
                created = create()
            except Exception as error:  # the engine says so itself when it makes the layer
                expected = f"a layer that {self.engine}'s method takes"
                reasons = (Reason(type(error).__name__, expected, str(error)),)
            else:
                method, facts, instead = describe(created)
                verdict = judge_layer(facts, request, self.settings)
                if isinstance(verdict, LayerPlan):
                    plan, selection = verdict, _shared(verdict, facts)
                else:
                    reasons = verdict.reasons
        if ranks is not None:
            require_agreement(selection, ranks, where)
        if plan is None:
            self.log.stand_aside(where, reasons, first_rank)
            return None
        return take_over(
            method,
            base,
            plan,
            request,
            dummy=load_format == "dummy",
            first_of_its_kind=self._first_of_its_kind,
            on_packed=lambda packed, module: self.log.packed(packed, module, instead, first_rank),
        )

    def _first_of_its_kind(self, plan: LayerPlan) -> bool:
        new = plan.problem not in self._packed
        self._packed.add(plan.problem)
        return new


def _shared(plan: LayerPlan, facts: LayerFacts) -> Selection:
    """The selection for comparison with other ranks: of a layer that this rank plans as one of its own experts alone,
    with the number of experts of all ranks."""
    if not plan.mapped:
        return plan.selection
    return replace(plan.selection, problem=replace(plan.problem, spec=plan.experts.spec(facts.experts)))


def machine_of(device: str | None) -> Machine:
    """The machine for a device name, without memory to spare for layers that take more than their packed bytes: an
    engine makes all layers before it fills one, and what is left of the memory becomes its cache."""
    return replace(Machine.of(device), layer_bytes=0)
