"""Whether polymoe runs a layer of a serving engine: facts of the layer in, a plan or every reason against it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.sources import StackedExperts, StackedSource
from polymoe.errors import ArgumentError, FormatError, PolymoeError
from polymoe.layer.rows import need_rows
from polymoe.layer.runtime import PlanRequest
from polymoe.planning.selection import Selection
from polymoe.problem import Problem, WeightOn
from polymoe.problem.activation_quantization import UNQUANTIZED, ActivationQuantization
from polymoe.problem.activations import Activation
from polymoe.problem.call import DTYPES
from polymoe.problem.verdict import Reason, Reasons, Rejected

BALANCING = "load balancing of experts (EPLB)"
"""What engines move experts between ranks for, in messages."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerFacts:
    """What an engine says of the experts of one layer on one rank.

    Attributes:
        where: the layer's name.
        method, sources: class name of the engine's method, and the engine's table of them.
        tensors: what the method creates for the layer, on the meta device, by name.
        k_first, symmetric: as in :class:`~polymoe.engines.serving.sources.StackedExperts`.
        hidden, intermediate: H, and F on this rank, with padding.
        experts: E of the whole layer.
        first_expert: the first one on this rank; None if this rank's experts are not a range: the adapter maps ids to
            places on this rank.
        activation: the function between the projections; None if polymoe has no such function.
        interleaved: whether the engine's activation takes rows of gate and up that alternate.
        bias: whether the experts have biases.
        top_k, weight_on, dtype: as in a :class:`~polymoe.problem.Problem`, the dtype as torch's.
        tp, ep: sizes of the parallel groups.
        batch_invariant: whether the engine promises results that do not depend on the rest of the batch.
        balanced: whether the engine moves experts between ranks while it runs (EPLB).
        refused: what the engine does in this layer that its adapter does not serve.
    """

    where: str
    method: str
    sources: Mapping[str, StackedSource]
    tensors: Mapping[str, Tensor]
    k_first: bool = False
    symmetric: bool = False
    hidden: int
    intermediate: int
    experts: int
    first_expert: int | None
    activation: Activation | None
    interleaved: bool = False
    bias: bool = False
    top_k: int
    weight_on: WeightOn = "output"
    dtype: torch.dtype
    tp: int = 1
    ep: int = 1
    batch_invariant: bool = False
    balanced: bool = False
    refused: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlan:
    """A layer that polymoe runs.

    Attributes:
        problem: what is computed.
        experts: how this rank's experts are read.
        selection: every backend with its verdict, and the plan by token count.
        shared: the selection as other ranks see it: also where ids are mapped, it counts the experts of all of them.
        mapped: whether the adapter maps ids to places on this rank; otherwise they are the router's.
    """

    problem: Problem
    experts: StackedExperts
    selection: Selection
    shared: Selection
    mapped: bool

    def experts_in(self, tensors: Mapping[str, Tensor]) -> StackedExperts:
        """Return the experts in ``tensors``, which the engine's method created.

        Raises:
            FormatError: if they are not stored as planned.
        """
        found = replace(self.experts, tensors=tensors)
        if found.encodings() != self.experts.encodings():
            raise FormatError(
                self.experts.where,
                expected=" and ".join(map(str, self.experts.encodings())),
                got=" and ".join(map(str, found.encodings())),
                hint="POLYMOE=0 runs this model without polymoe; please report it",
            )
        return found


def judge_layer(facts: LayerFacts, request: PlanRequest, settings: EngineSettings) -> LayerPlan | Rejected:
    """Return the plan of a layer, or every reason why the engine keeps it.

    Raises:
        ArgumentError: for an unknown backend, role or kind of activations in the user's settings.
    """
    asked = None if settings.activations == "auto" else ActivationQuantization.of(settings.activations)
    reasons = Reasons(list(facts.refused))
    reasons.need(facts.dtype in DTYPES, "dtype of x", "bfloat16, float16 or float32", facts.dtype)
    experts = _experts(facts, reasons)
    if reasons.found or experts is None or facts.activation is None:
        return Rejected(tuple(reasons.found))
    if asked is not None:
        return _judge(facts, facts.activation, experts, request, asked)
    verdict = Rejected(())
    if request.machine.device.flops_fp8 and experts.recipe().quantized:
        verdict = _judge(facts, facts.activation, experts, request, experts.recipe())
    if isinstance(verdict, Rejected):  # or no kernel takes inputs that are held so
        verdict = _judge(facts, facts.activation, experts, request, UNQUANTIZED)
    return verdict


def _judge(
    facts: LayerFacts,
    activation: Activation,
    experts: StackedExperts,
    request: PlanRequest,
    quantization: ActivationQuantization,
) -> LayerPlan | Rejected:
    """Return the plan of a layer with these activations, or every reason against it."""
    experts = replace(experts, static=quantization.static)
    mapped, first = facts.first_expert is None, facts.first_expert or 0
    try:
        problem = Problem(
            spec=experts.spec(experts.count if mapped else facts.experts, first),
            activation=activation,
            top_k=facts.top_k,
            weight_on=facts.weight_on,
            dtype=DTYPES[facts.dtype],
            activations=quantization,
            tp=facts.tp,
            ep=facts.ep,
            batch_invariant=facts.batch_invariant,
        )
    except (ArgumentError, FormatError) as error:
        return Rejected((reason_of(error),))
    selection = request.select(problem)
    if selection.plan is None:
        found = [
            replace(reason, what=f"{candidate.backend}: {reason.what}")
            for candidate in selection.candidates
            if request.backend in ("auto", candidate.backend) and isinstance(candidate.verdict, Rejected)
            for reason in candidate.verdict.reasons
        ]
        return Rejected(tuple(found))
    if facts.balanced:
        reasons = Reasons()
        need_rows(reasons, selection)
        if reasons.found:
            return Rejected(tuple(replace(r, what=f"{BALANCING}, {r.what}") for r in reasons.found))
    shared = selection
    if mapped:
        shared = replace(selection, problem=replace(problem, spec=experts.spec(facts.experts)))
    return LayerPlan(problem, experts, selection, shared, mapped)


def reason_of(error: PolymoeError) -> Reason:
    """Return an error as a reason."""
    return Reason(error.where, error.expected or "something else", error.got or "it")


def _experts(facts: LayerFacts, reasons: Reasons) -> StackedExperts | None:
    """Return how the experts are read; note why they cannot be."""
    source = facts.sources.get(facts.method)
    reasons.need(source is not None, "method", f"one of {', '.join(facts.sources)}", facts.method)
    if source is None:
        return None
    if source.interleaved is None:
        source = replace(source, interleaved=facts.interleaved)
    orders = {True: "alternating", False: "all of gate, then all of up"}
    reasons.need(
        source.interleaved == facts.interleaved,
        "rows of w13",
        orders[bool(source.interleaved)],
        orders[facts.interleaved],
    )
    try:
        experts = StackedExperts(
            where=facts.where,
            source=source,
            tensors=facts.tensors,
            hidden=facts.hidden,
            intermediate=facts.intermediate,
            gated=facts.activation is None or facts.activation.gated,
            bias=facts.bias,
            k_first=facts.k_first,
            symmetric=facts.symmetric,
        )
        experts.encodings()
    except FormatError as error:
        reasons.found.append(reason_of(error))
        return None
    return experts


def method_facts(
    method: Any, sources: Mapping[str, StackedSource], tensors: Mapping[str, Tensor], actorder: Any, reasons: Reasons
) -> dict[str, Any]:
    """Return the facts that an engine's method says of the layer's tensors, by name.

    Args:
        method: the engine's, or what stores its tensors.
        actorder: compressed-tensors' order of columns, a string or a member of an enumeration; or None.
        reasons: those found so far; if activations reorder columns, that is added.
    """
    config = getattr(method, "quant_config", None)
    actorder = getattr(actorder, "value", actorder)
    order = "desc_act" if getattr(config, "desc_act", False) else f"actorder {actorder}"
    natural = order != "desc_act" and actorder not in ("group", "dynamic")
    reasons.need(natural, "order of columns", "the natural one", f"by activation ({order})")
    return {
        "method": type(method).__name__,
        "sources": sources,
        "tensors": tensors,
        "k_first": any(getattr(tensor, "is_transposed", False) for tensor in tensors.values()),
        "symmetric": bool(getattr(config, "is_sym", False)),
    }
