"""Select: every backend's verdict on a problem, and the plan made of those that fit.

``auto`` compares layouts by the mean of predicted time over floor across the role's token counts, and takes the least.
Backends that read the same layout then share the token range: each range goes to the fastest. Kernels that never ran on
the GPU model are taken only where nothing better accepts. A backend that the user names is taken or refused, never
replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata

from polymoe.backend_names import backend_hint
from polymoe.backends.base import Backend, layouts_for
from polymoe.backends.features import judge
from polymoe.cost import cost
from polymoe.errors import ArgumentError
from polymoe.layouts import LAYOUTS, Layout
from polymoe.machine import Machine
from polymoe.planning.measured import Table
from polymoe.planning.plan import ROLE_TOKENS, Plan, PlanStep, role_tokens
from polymoe.planning.predictor import Predictor
from polymoe.planning.proof import Proofs, ProofStatus, shipped
from polymoe.planning.selection import Candidate, Selection
from polymoe.planning.table_files import installed
from polymoe.problem import Problem
from polymoe.verdict import Accepted, Reason, Rejected, Verdict

__all__ = ["select"]

_FOREIGN = "another library's kernels: auto takes them where `polymoe tune` has measured them faster on this machine"


@dataclass(frozen=True, slots=True)
class _Reader:
    """A backend that accepts, and what may be chosen of it."""

    predictor: Predictor
    max_tokens: int | None
    only_measured: bool
    proofs: Proofs

    def takes(self, tokens: int) -> bool:
        """Whether it may run calls of ``tokens`` tokens."""
        fits = self.max_tokens is None or tokens <= self.max_tokens
        return fits and (not self.only_measured or self.predictor.measured(tokens))

    def family(self, tokens: int) -> str:
        """The kernels that would run ``tokens`` tokens."""
        return self.predictor.configure(tokens).kernel_family

    def status(self, family: str) -> ProofStatus:
        """How far a kernel family is proven on the machine's GPU model."""
        p = self.predictor
        if any(point.config.kernel_family == family for point in p.points):
            return "measured"
        return self.proofs.status(p.backend.name, family, p.problem, p.machine.device)

    def rank(self, tokens: int) -> tuple[bool, float]:
        """The least is best: what ran on this GPU model before what never did, then the predicted time."""
        return self.status(self.family(tokens)) == "unrun", self.predictor.predict(tokens).time_us


def select(
    problem: Problem,
    machine: Machine,
    *,
    role: str = "mixed",
    backend: str = "auto",
    layout: str | None = None,
    backends: Mapping[str, Backend] | None = None,
    layouts: Mapping[str, Layout] = LAYOUTS,
    table: Table | None = None,
    proofs: Proofs | None = None,
) -> Selection:
    """Ask every backend, then plan. The machine is an argument, so a laptop can ask for a GPU.

    Args:
        problem: what is to run.
        machine: where.
        role: "decode", "prefill" or "mixed": the token counts at which layouts are compared.
        backend: "auto" or a name.
        layout: only backends that read this layout (for weights that are packed already).
        backends: the table to choose from; all of polymoe's by default.
        layouts: the table that says which layouts can hold the experts.
        table: measured times; by default the user's and the shipped ones for the machine's device. The first source
            is what was measured on this machine.
        proofs: how far kernels are proven on which GPU model; by default the shipped ones.

    Raises:
        ArgumentError: for an unknown role or backend name.
    """
    if backends is None:
        from polymoe.backends import BACKENDS as backends
    if table is None:
        table = installed(machine.device.name)
    points = role_tokens(role)
    if backend != "auto" and backend not in backends:
        raise ArgumentError("backend", got=repr(backend), hint=backend_hint(backend, ["auto", *backends]))
    if proofs is None:
        proofs = shipped()
    candidates = []
    usable: dict[str, tuple[_Reader, tuple[str, ...]]] = {}
    for name, candidate in backends.items():
        verdict, held = _with_layouts(candidate, judge(candidate, problem, machine), problem, layouts)
        answered = Candidate(name, layouts_for(candidate, verdict), verdict)
        if isinstance(verdict, Accepted):
            if _registered_by_others(candidate):
                verdict = replace(verdict, foreign=True)
            rows = Table(table.sources[:1]) if verdict.foreign else table
            predictor = Predictor.of(candidate, problem, machine, rows)
            if verdict.foreign and not verdict.opt_in_reason and not predictor.points:
                verdict = replace(verdict, opt_in_reason=_FOREIGN)
            reader = _Reader(predictor, verdict.max_tokens, verdict.foreign and backend == "auto", proofs)
            fitting = [t for t in points if verdict.max_tokens is None or t <= verdict.max_tokens]
            families = dict.fromkeys(map(reader.family, fitting))
            answered = replace(
                answered,
                verdict=verdict,
                predictions=tuple((t, predictor.predict(t)) for t in fitting),
                proofs=tuple((family, reader.status(family)) for family in families),
                tunable=predictor.tunable,
            )
            if backend == name or (backend == "auto" and not verdict.opt_in_reason):
                usable[name] = reader, held
        candidates.append(answered)

    plans: dict[str, Plan] = {}
    ranks: dict[str, tuple[bool, float]] = {}
    for name in dict.fromkeys(n for _, held in usable.values() for n in held):
        if layout not in (None, name):
            continue
        readers = {n: reader for n, (reader, held) in usable.items() if name in held}
        found = _plan(name, readers, any_number=backend == "auto")
        if found is not None:
            plans[name] = found
            ranks[name] = _rank(found, readers, problem, machine, points)
    best = min(ranks, key=ranks.__getitem__, default=None)
    plan = plans[best] if best else None
    statuses: tuple[ProofStatus, ...] = (
        tuple(usable[s.backend][0].status(s.config.kernel_family) for s in plan.steps) if plan else ()
    )
    scores = {name: score for name, (_, score) in ranks.items()}
    return Selection(problem, machine, role, backend, tuple(candidates), scores, plan, statuses, layout)


def _registered_by_others(backend: Backend) -> bool:
    """Whether another package registered the backend: its kernels are foreign, whatever its verdict says."""
    return type(backend).__module__.partition(".")[0] in _registering_packages()


@cache
def _registering_packages() -> frozenset[str]:
    return frozenset(point.module.partition(".")[0] for point in metadata.entry_points(group="polymoe.backends"))


def _rank(
    plan: Plan, readers: Mapping[str, _Reader], problem: Problem, machine: Machine, points: Sequence[int]
) -> tuple[bool, float]:
    """The least is best: plans without kernels that never ran on this GPU model before those with some, then the mean
    of predicted time over floor."""
    last = plan.steps[-1].max_tokens
    ranks = {t: readers[plan.step(t).backend].rank(t) for t in points if last is None or t <= last}
    ratios = [time_us / cost(problem, machine.device, t).floor_us for t, (_, time_us) in ranks.items()]
    score = sum(ratios) / len(ratios) if ratios else float("inf")
    return any(unrun for unrun, _ in ranks.values()), score


def _with_layouts(
    backend: Backend, verdict: Verdict, problem: Problem, layouts: Mapping[str, Layout]
) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict, and those of its layouts that can hold the experts; a rejection if there is none, with the reasons
    of the layout that lacks least beside the backend's own."""
    names = layouts_for(backend, verdict)
    refused = {name: layouts[name].check(problem.spec, problem.scales) if name in layouts else () for name in names}
    held = tuple(name for name, reasons in refused.items() if not reasons)
    if held:
        return verdict, held
    name = min(refused, key=lambda n: len(refused[n]))
    found = tuple(Reason(f"layout {name}, {r.what}", r.expected, r.got) for r in refused[name])
    return Rejected((verdict.reasons if isinstance(verdict, Rejected) else ()) + found), ()


def _plan(layout: str, readers: Mapping[str, _Reader], *, any_number: bool) -> Plan | None:
    """Best reader of ``layout`` for each token range. Ranges end at powers of two, at readers' limits and at the token
    counts that were measured. None if some number of tokens has no reader, where the plan must take ``any_number``."""
    limits = [r.max_tokens for r in readers.values() if r.max_tokens is not None]
    unlimited = len(limits) < len(readers)
    measured = [point.tokens for r in readers.values() for point in r.predictor.points]
    points = sorted({*ROLE_TOKENS["mixed"], 512, *limits, *measured})
    if not unlimited:
        if any_number:
            return None
        points = [p for p in points if p <= max(limits)]
    # Beyond the largest point only unlimited readers remain; the last step is theirs.
    ranges = [(p, p) for p in points] + ([(points[-1], None)] if unlimited else [])
    steps: list[PlanStep] = []
    for tokens, last in ranges:
        fitting = [r for r in readers.values() if r.takes(tokens) and (last is not None or r.max_tokens is None)]
        if not fitting:
            return None
        best = min(fitting, key=lambda reader: reader.rank(tokens))
        new = PlanStep(last, best.predictor.backend.name, best.predictor.configure(tokens))
        if steps and (steps[-1].backend, steps[-1].config) == (new.backend, new.config):
            steps.pop()
        steps.append(new)
    return Plan(layout, tuple(steps))
