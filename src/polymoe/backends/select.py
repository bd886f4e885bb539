"""Select: every backend's verdict on a problem, and the plan made of those that fit.

``auto`` compares layouts by the mean of predicted time over floor across the role's token counts, and takes the least.
Backends that read the same layout then share the token range: each range goes to the fastest. A backend that the user
names is taken or refused, never replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polymoe.backends.base import Backend, Prediction
from polymoe.errors import ArgumentError, UnsupportedProblem, nearest
from polymoe.layouts import LAYOUTS, Layout
from polymoe.machine import Machine
from polymoe.planning.cost import cost
from polymoe.planning.plan import ROLE_TOKENS, Plan, PlanStep, role_tokens
from polymoe.problem import Problem
from polymoe.verdict import Accepted, Reason, Rejected, Verdict

__all__ = ["Candidate", "Selection", "select"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend's verdict, and where accepted its predictions at the role's token counts."""

    backend: str
    layouts: tuple[str, ...]
    verdict: Verdict
    predictions: tuple[tuple[int, Prediction], ...] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """What was considered and what was chosen; ``print()`` it.

    Attributes:
        problem, machine, role, requested: the question; ``requested`` is "auto" or a backend's name.
        candidates: every backend with its verdict, in table order.
        scores: mean of predicted time over floor for each layout that covers every token count.
        plan: the choice, or None if nothing fits.
    """

    problem: Problem
    machine: Machine
    role: str
    requested: str
    candidates: tuple[Candidate, ...]
    scores: Mapping[str, float] = field(hash=False)
    plan: Plan | None

    def require(self, where: str = "experts") -> Plan:
        """The plan.

        Raises:
            UnsupportedProblem: if there is none, with every candidate's reasons and the backends that run when named.
        """
        if self.plan is not None:
            return self.plan
        raise UnsupportedProblem(
            f"{where} ({self.problem}) on {self.machine.device}",
            expected="a backend that runs it" if self.requested == "auto" else f"backend {self.requested!r} to run it",
            got="none:\n  " + "\n  ".join(self._verdict_lines()),
            hint=" or ".join(f'backend="{name}"' for name in self._runs_when_named()) or None,
        )

    def _runs_when_named(self) -> list[str]:
        return [c.backend for c in self.candidates if isinstance(c.verdict, Accepted) and c.backend != self.requested]

    def _verdict_lines(self) -> list[str]:
        lines = []
        for c in self.candidates:
            if isinstance(c.verdict, Rejected):
                lines += [f"{c.backend}: {reason}" for reason in c.verdict.reasons]
            else:
                lines.append(f"{c.backend}: {describe(c.verdict)}")
        return lines

    def floor_us(self, tokens: int) -> float:
        """Time below which no kernel can go on this device."""
        return cost(self.problem, self.machine.device, tokens).floor_us

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "problem": str(self.problem),
            "device": {
                "name": self.machine.device.name,
                "arch": self.machine.device.arch,
                "rates": self.machine.device.rates,
            },
            "role": self.role,
            "requested": self.requested,
            "candidates": [
                {
                    "backend": c.backend,
                    "layouts": list(c.layouts),
                    "accepted": isinstance(c.verdict, Accepted),
                    "note": describe(c.verdict) if isinstance(c.verdict, Accepted) else "",
                    "reasons": [
                        {"what": r.what, "wanted": r.wanted, "got": r.got}
                        for r in (c.verdict.reasons if isinstance(c.verdict, Rejected) else ())
                    ],
                    "predicted": [
                        {
                            "tokens": t,
                            "time_us": round(p.time_us, 2),
                            "floor_us": round(self.floor_us(t), 2),
                            "source": p.source,
                        }
                        for t, p in c.predictions
                    ],
                }
                for c in self.candidates
            ],
            "layout_scores": {name: round(score, 3) for name, score in self.scores.items()},
            "plan": None
            if self.plan is None
            else {
                "layout": self.plan.layout,
                "steps": [
                    {"tokens": tokens, "max_tokens": s.max_tokens, "backend": s.backend, "config": str(s.config)}
                    for tokens, s in self.plan.ranges()
                ],
            },
        }

    def __str__(self) -> str:
        lines = [f"{self.problem}", f"on {self.machine.device}, role {self.role}, backend {self.requested}"]
        lines += [f"  {line}" for line in self._verdict_lines()]
        if self.plan is None:
            named = self._runs_when_named()
            return "\n".join([*lines, "no plan" + (f": name {' or '.join(named)} to run it here" if named else "")])
        lines.append(f"layout {self.plan.layout}")
        lines += [f"  {tokens} tokens: {step.backend} ({step.config})" for tokens, step in self.plan.ranges()]
        return "\n".join(lines)


def describe(verdict: Accepted) -> str:
    """One line about an acceptance: token limit, capturable, by name only."""
    facts = [f"up to {verdict.max_tokens} tokens"] if verdict.max_tokens is not None else []
    facts += ["CUDA graphs"] if verdict.capturable else []
    facts += [verdict.by_name_only] if verdict.by_name_only else []
    return "accepted" + (f" ({', '.join(facts)})" if facts else "")


def select(
    problem: Problem,
    machine: Machine,
    *,
    role: str = "mixed",
    backend: str = "auto",
    layout: str | None = None,
    backends: Mapping[str, Backend] | None = None,
    layouts: Mapping[str, Layout] = LAYOUTS,
) -> Selection:
    """Ask every backend, then plan. Pure: the machine is an argument, so a laptop can ask for a GPU.

    Args:
        problem: what is to run.
        machine: where.
        role: "decode", "prefill" or "mixed": the token counts at which layouts are compared.
        backend: "auto" or a name.
        layout: only backends that read this layout (for weights that are packed already).
        backends: the table to choose from; all of polymoe's by default.
        layouts: the table that says which layouts can hold the experts.

    Raises:
        ArgumentError: for an unknown role or backend name.
    """
    if backends is None:
        from polymoe.backends import BACKENDS as backends
    points = role_tokens(role)
    if backend != "auto" and backend not in backends:
        raise ArgumentError("backend", got=repr(backend), hint=nearest(backend, ["auto", *backends]))
    candidates = []
    usable: dict[str, tuple[Backend, Accepted]] = {}
    readable: dict[str, tuple[str, ...]] = {}
    for name, candidate in backends.items():
        verdict, held = _with_layouts(candidate, candidate.check(problem, machine), problem, layouts)
        predictions: tuple[tuple[int, Prediction], ...] = ()
        if isinstance(verdict, Accepted):
            fitting = [t for t in points if verdict.max_tokens is None or t <= verdict.max_tokens]
            predictions = tuple((t, candidate.predict(problem, machine, t)) for t in fitting)
            if backend == name or (backend == "auto" and not verdict.by_name_only):
                usable[name] = (candidate, verdict)
                readable[name] = held
        candidates.append(Candidate(name, candidate.layouts, verdict, predictions))

    plans: dict[str, Plan] = {}
    scores: dict[str, float] = {}
    for name in dict.fromkeys(n for held in readable.values() for n in held):
        if layout not in (None, name):
            continue
        readers = {n: candidate for n, candidate in usable.items() if name in readable[n]}
        unlimited = any(v.max_tokens is None for _, v in readers.values())
        if not unlimited and backend == "auto":
            continue  # a plan of auto must take any number of tokens
        plans[name] = _plan(problem, machine, name, readers)
        covered = [t for t in points if unlimited or t <= (plans[name].steps[-1].max_tokens or t)]
        ratios = [
            readers[plans[name].step(t).backend][0].predict(problem, machine, t).time_us
            / cost(problem, machine.device, t).floor_us
            for t in covered
        ]
        scores[name] = sum(ratios) / len(ratios) if ratios else float("inf")
    best = min(scores, key=scores.__getitem__, default=None)
    return Selection(problem, machine, role, backend, tuple(candidates), scores, plans[best] if best else None)


def _with_layouts(
    backend: Backend, verdict: Verdict, problem: Problem, layouts: Mapping[str, Layout]
) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict, and the backend's layouts that can hold the experts; a rejection if there is none, with every
    layout's reasons beside the backend's own."""
    refused = {name: layouts[name].check(problem.spec) if name in layouts else () for name in backend.layouts}
    held = tuple(name for name, reasons in refused.items() if not reasons)
    if held:
        return verdict, held
    found = tuple(Reason(f"layout {n}, {r.what}", r.wanted, r.got) for n, reasons in refused.items() for r in reasons)
    return Rejected((verdict.reasons if isinstance(verdict, Rejected) else ()) + found), ()


def _plan(problem: Problem, machine: Machine, layout: str, readers: Mapping[str, tuple[Backend, Accepted]]) -> Plan:
    """Fastest reader of ``layout`` for each token range. Ranges end at powers of two and at readers' limits."""
    limits = {v.max_tokens for _, v in readers.values()}
    points = sorted({*ROLE_TOKENS["mixed"], 512, *(limit for limit in limits if limit is not None)})
    if None not in limits:
        points = [p for p in points if p <= max(limit for limit in limits if limit is not None)]

    steps: list[PlanStep] = []
    for tokens in points:
        fitting = [b for b, v in readers.values() if v.max_tokens is None or tokens <= v.max_tokens]
        fastest = min(fitting, key=lambda b: b.predict(problem, machine, tokens).time_us)
        step = PlanStep(tokens, fastest.name, fastest.configure(problem, machine, tokens))
        if steps and (steps[-1].backend, steps[-1].config) == (step.backend, step.config):
            steps.pop()
        steps.append(step)
    if None in limits:
        # Beyond the largest point only unlimited readers remain; the last step is theirs.
        tail = min(
            (b for b, v in readers.values() if v.max_tokens is None),
            key=lambda b: b.predict(problem, machine, points[-1]).time_us,
        )
        last = PlanStep(None, tail.name, tail.configure(problem, machine, points[-1]))
        if steps and (steps[-1].backend, steps[-1].config) == (last.backend, last.config):
            steps.pop()
        steps.append(last)
    return Plan(layout, tuple(steps))
