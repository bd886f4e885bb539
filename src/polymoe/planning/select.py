"""Select: every backend's verdict on a problem, and the plan made of those that fit.

``auto`` compares layouts by the mean of predicted time over floor across the role's token counts, and takes the least.
Backends that read the same layout then share the token range: each range goes to the fastest. A backend that the user
names is taken or refused, never replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polymoe.backend_names import backend_hint
from polymoe.backends.base import Backend, Prediction, layouts_for
from polymoe.cost import cost
from polymoe.errors import ArgumentError, UnsupportedProblem
from polymoe.layouts import LAYOUTS, Layout
from polymoe.machine import Machine
from polymoe.planning.measured import Table
from polymoe.planning.plan import ROLE_TOKENS, Plan, PlanStep, role_tokens
from polymoe.planning.predictor import Predictor
from polymoe.planning.table_files import installed
from polymoe.problem import Problem
from polymoe.verdict import Accepted, Reason, Rejected, Verdict

__all__ = ["Candidate", "Selection", "select"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend's verdict, and where accepted its predictions at the role's token counts, and whether there is
    something that tuning could choose and has not."""

    backend: str
    layouts: tuple[str, ...]
    verdict: Verdict
    predictions: tuple[tuple[int, Prediction], ...] = ()
    tunable: bool = False


@dataclass(frozen=True, slots=True)
class Selection:
    """What was considered and what was chosen; ``print()`` it.

    Attributes:
        problem, machine, role, requested: the question; ``requested`` is "auto" or a backend's name.
        candidates: every backend with its verdict, in table order.
        scores: mean of predicted time over floor for each layout that covers every token count.
        plan: the choice, or None if nothing fits.
        packed_as: the layout that the weights are in already, which the plan keeps; None before they are packed.
    """

    problem: Problem
    machine: Machine
    role: str
    requested: str
    candidates: tuple[Candidate, ...]
    scores: Mapping[str, float] = field(hash=False)
    plan: Plan | None
    packed_as: str | None = None

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
            hint=" or ".join(f'backend="{name}"' for name in self._runs_when_named())
            or (f"load them on {self.machine.device} anew" if self.packed_as else None),
        )

    def _runs_when_named(self) -> list[str]:
        """Backends that accept and read the layout, and were not asked for."""
        readers = [c for c in self.candidates if self.packed_as in (None, *c.layouts)]
        return [c.backend for c in readers if isinstance(c.verdict, Accepted) and c.backend != self.requested]

    def _verdict_lines(self) -> list[str]:
        lines = []
        for c in self.candidates:
            if isinstance(c.verdict, Rejected):
                lines += [f"{c.backend}: {reason}" for reason in c.verdict.reasons]
            elif self.plan is None and self.packed_as not in (None, *c.layouts):
                expected = " or ".join(c.layouts)
                lines.append(f"{c.backend}: {Reason('packed layout', expected, str(self.packed_as))}")
            else:
                lines.append(f"{c.backend}: {describe(c.verdict)}")
        return lines

    def floor_us(self, tokens: int) -> float:
        """Time below which no kernel can go on this device."""
        return cost(self.problem, self.machine.device, tokens).floor_us

    @property
    def untuned(self) -> tuple[str, ...]:
        """Backends of the plan that run as their heuristic says, because no table has this problem on this GPU."""
        chosen = {step.backend for step in self.plan.steps} if self.plan else set()
        gpu = self.machine.device.kind == "cuda"
        return tuple(c.backend for c in self.candidates if c.tunable and c.backend in chosen and gpu)

    def ranges(self) -> list[tuple[str, PlanStep, str]]:
        """Each step of the plan with its token range and the times expected at its ends, as text: ``("1-4", ...,
        "75.2 us at 1 to 180 us at 4 (measured)")``; "" where the role has no token count in the range."""
        result = []
        for tokens, step in self.plan.ranges() if self.plan else ():
            predictions = next(c.predictions for c in self.candidates if c.backend == step.backend)
            within = [(t, p) for t, p in predictions if self.plan and self.plan.step(t) is step]
            ends = dict.fromkeys((*within[:1], *within[-1:]))
            times = " to ".join(f"{p.time_us:.{0 if p.time_us >= 100 else 1}f} us at {t}" for t, p in ends)
            sources = "; ".join(dict.fromkeys(p.source for _, p in ends))
            result.append((tokens, step, f"{times} ({sources})" if within else ""))
        return result

    def summary(self, tune: str = "polymoe tune") -> str:
        """One line for a log: layout, backends by token range, where times come from, and the command ``tune`` where it
        would help."""
        plan = self.require()
        steps = "; ".join(
            f"{tokens} tokens: {step.backend} ({step.config})" + (f", {time}" if time else "")
            for tokens, step, time in self.ranges()
        )
        text = f"{self.problem} on {self.machine.device}: layout {plan.layout}, {steps}"
        if self.untuned:
            text += f". {', '.join(self.untuned)} is not tuned for this on this GPU and goes by a heuristic: `{tune}`"
        return text

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
                        {"what": r.what, "expected": r.expected, "got": r.got}
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
            "untuned": list(self.untuned),
        }

    def __str__(self) -> str:
        lines = [f"{self.problem}", f"on {self.machine.device}, role {self.role}, backend {self.requested}"]
        lines += [f"  {line}" for line in self._verdict_lines()]
        if self.plan is None:
            named = self._runs_when_named()
            return "\n".join([*lines, "no plan" + (f": name {' or '.join(named)} to run it here" if named else "")])
        lines.append(f"layout {self.plan.layout}")
        for tokens, step, time in self.ranges():
            lines.append(f"  {tokens} tokens: {step.backend} ({step.config})" + (f", {time}" if time else ""))
        lines += [f"  {name}: not tuned for this problem on this GPU: `polymoe tune` does" for name in self.untuned]
        return "\n".join(lines)


def describe(verdict: Accepted) -> str:
    """One line about an acceptance: token limit, capturable, by name only."""
    facts = [f"up to {verdict.max_tokens} tokens"] if verdict.max_tokens is not None else []
    facts += ["CUDA graphs"] if verdict.capturable else []
    facts += [verdict.opt_in_reason] if verdict.opt_in_reason else []
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
    table: Table | None = None,
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
        table: measured times; by default the user's and the shipped ones for the machine's device.

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
    candidates = []
    usable: dict[str, tuple[Predictor, Accepted]] = {}
    readable: dict[str, tuple[str, ...]] = {}
    for name, candidate in backends.items():
        verdict, held = _with_layouts(candidate, candidate.check(problem, machine), problem, layouts)
        predictions: tuple[tuple[int, Prediction], ...] = ()
        tunable = False
        if isinstance(verdict, Accepted):
            planner = Predictor.of(candidate, problem, machine, table)
            fitting = [t for t in points if verdict.max_tokens is None or t <= verdict.max_tokens]
            predictions, tunable = tuple((t, planner.predict(t)) for t in fitting), planner.tunable
            if backend == name or (backend == "auto" and not verdict.opt_in_reason):
                usable[name] = (planner, verdict)
                readable[name] = held
        candidates.append(Candidate(name, layouts_for(candidate, verdict), verdict, predictions, tunable))

    plans: dict[str, Plan] = {}
    scores: dict[str, float] = {}
    for name in dict.fromkeys(n for held in readable.values() for n in held):
        if layout not in (None, name):
            continue
        readers = {n: candidate for n, candidate in usable.items() if name in readable[n]}
        unlimited = any(v.max_tokens is None for _, v in readers.values())
        if not unlimited and backend == "auto":
            continue  # a plan of auto must take any number of tokens
        plans[name] = _plan(name, readers)
        covered = [t for t in points if unlimited or t <= (plans[name].steps[-1].max_tokens or t)]
        ratios = [
            readers[plans[name].step(t).backend][0].predict(t).time_us / cost(problem, machine.device, t).floor_us
            for t in covered
        ]
        scores[name] = sum(ratios) / len(ratios) if ratios else float("inf")
    best = min(scores, key=scores.__getitem__, default=None)
    plan = plans[best] if best else None
    return Selection(problem, machine, role, backend, tuple(candidates), scores, plan, layout)


def _with_layouts(
    backend: Backend, verdict: Verdict, problem: Problem, layouts: Mapping[str, Layout]
) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict, and those of its layouts that can hold the experts; a rejection if there is none, with the reasons
    of the layout that lacks least beside the backend's own."""
    names = layouts_for(backend, verdict)
    refused = {name: layouts[name].check(problem.spec) if name in layouts else () for name in names}
    held = tuple(name for name, reasons in refused.items() if not reasons)
    if held:
        return verdict, held
    name = min(refused, key=lambda n: len(refused[n]))
    found = tuple(Reason(f"layout {name}, {r.what}", r.expected, r.got) for r in refused[name])
    return Rejected((verdict.reasons if isinstance(verdict, Rejected) else ()) + found), ()


def _plan(layout: str, readers: Mapping[str, tuple[Predictor, Accepted]]) -> Plan:
    """Fastest reader of ``layout`` for each token range. Ranges end at powers of two, at readers' limits and at the
    token counts that were measured."""
    limits = [v.max_tokens for _, v in readers.values() if v.max_tokens is not None]
    unlimited = len(limits) < len(readers)
    measured = [point.tokens for planner, _ in readers.values() for point in planner.points]
    points = sorted({*ROLE_TOKENS["mixed"], 512, *limits, *measured})
    if not unlimited:
        points = [p for p in points if p <= max(limits)]

    def step(tokens: int, last: int | None) -> PlanStep:
        fitting = [
            p for p, v in readers.values() if v.max_tokens is None or (last is not None and last <= v.max_tokens)
        ]
        fastest = min(fitting, key=lambda planner: planner.predict(tokens).time_us)
        return PlanStep(last, fastest.backend.name, fastest.configure(tokens))

    steps: list[PlanStep] = []
    # Beyond the largest point only unlimited readers remain; the last step is theirs.
    for new in [step(p, p) for p in points] + ([step(points[-1], None)] if unlimited else []):
        if steps and (steps[-1].backend, steps[-1].config) == (new.backend, new.config):
            steps.pop()
        steps.append(new)
    return Plan(layout, tuple(steps))
