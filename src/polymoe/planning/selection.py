"""Selection: what was considered for a problem, what was chosen and why, as text, as a log line and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from polymoe.backends.base import Prediction
from polymoe.backends.cost import cost
from polymoe.common.units import format_tokens, format_us
from polymoe.errors import UnsupportedProblem
from polymoe.machine import Device, Machine
from polymoe.planning.plan import Plan, PlanStep
from polymoe.planning.proof import ProofStatus, said, weakest
from polymoe.problem import Problem
from polymoe.problem.verdict import Accepted, Reason, Rejected


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend's verdict and, where it accepts, what is known of it.

    Attributes:
        backend, layouts: its name, and the layouts that serve the problem.
        verdict: accepted, or rejected with every reason.
        predictions: time at each of the role's token counts.
        proofs: how far each kernel family that it would run is proven on this GPU model, by the family's name.
        tunable: whether tuning has something to choose and no table has this problem on this GPU.
    """

    backend: str
    layouts: tuple[str, ...]
    verdict: Accepted | Rejected
    predictions: tuple[tuple[int, Prediction], ...] = ()
    proofs: tuple[tuple[str, ProofStatus], ...] = ()
    tunable: bool = False

    def proven(self, device: Device) -> str:
        """How far it is proven on the GPU: ``"timed on h200"``, or ``"timed on h200 (w4a16_mma), tested on h200
        (w4a16_wgmma)"``; "" for a CPU or a rejection."""
        families: dict[ProofStatus, list[str]] = {}
        for family, status in self.proofs if device.kind == "cuda" else ():
            families.setdefault(status, []).append(family)
        if len(families) == 1:
            return said(next(iter(families)), device)
        return ", ".join(f"{said(status, device)} ({' and '.join(of)})" for status, of in families.items())


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """A step of a plan and what is known of it, as text.

    Attributes:
        tokens: ``"1-4"``, ``"16"`` or ``"65+"``.
        step: backend and configuration.
        time: of one layer, ``"75.2 us at 1 to 180 us at 4"``.
        floor: the least time of the GPU at the same token counts, ``"70.1 us to 150 us"``.
        source: of the time: ``"measured"`` or ``"predicted"``, or both.
        proven: the kernels: ``"tested on h200"``; "" for a CPU.
    """

    tokens: str
    step: PlanStep
    time: str
    floor: str
    source: str
    proven: str

    @property
    def known(self) -> str:
        """Time, source and proof."""
        return f"{self.time} ({self.source})" + (f", kernels {self.proven}" if self.proven else "")

    def __str__(self) -> str:
        return f"{format_tokens(self.tokens)}: {self.step.backend} ({self.step.config}), {self.known}"


@dataclass(frozen=True, slots=True)
class Selection:
    """What was considered and what was chosen; ``print()`` it.

    Attributes:
        problem, machine, role, requested: the question; ``requested`` is "auto" or a backend's name.
        candidates: every backend with its verdict, in table order.
        scores: mean of predicted time over floor for each layout that covers every token count.
        plan: the choice, or None if nothing fits.
        proofs: how far the backend of each step of the plan is proven on this GPU model, with that step's kernels.
        times: predicted time of the plan at each of the role's token counts, and at the ends of its steps.
        packed_as: the layout that the weights are in already, which the plan keeps; None before they are packed.
        layout_bytes: size of the layer in the plan's layout; None without a plan, or where its layout is not known.
    """

    problem: Problem
    machine: Machine
    role: str
    requested: str
    candidates: tuple[Candidate, ...]
    scores: Mapping[str, float] = field(hash=False)
    plan: Plan | None
    proofs: tuple[ProofStatus, ...] = ()
    times: tuple[tuple[int, Prediction], ...] = ()
    packed_as: str | None = None
    layout_bytes: int | None = None

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
            or (f"load them again on {self.machine.device}" if self.packed_as else None),
        )

    def _runs_when_named(self) -> list[str]:
        """Backends that accept, read the layout and were not requested."""
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
                lines.append(f"{c.backend}: {describe(c.verdict, c.proven(self.machine.device))}")
        return lines

    @property
    def next_best(self) -> tuple[str, float, float, bool] | None:
        """The fastest accepted backend that the plan does not use, the least and greatest factor by which the plan is
        faster at the role's token counts, and whether all of these times were measured; None if no other backend serves
        them but the reference."""
        mine, others = dict(self.times), []
        for c in self.candidates:
            shared = [(p.time_us / mine[t].time_us) for t, p in c.predictions if t in mine]
            named = isinstance(c.verdict, Accepted) and c.verdict.opt_in_reason  # auto would not take it
            if shared and not named and c.backend not in (*self._chosen(), "reference"):
                measured = all(p.source == mine[t].source == "measured" for t, p in c.predictions if t in mine)
                others.append((fmean(shared), c.backend, min(shared), max(shared), measured))
        return min(others)[1:] if others else None

    def floor_us(self, tokens: int) -> float:
        """The least time that this device could take, in microseconds, with the routings of measured times.

        A time that was measured bounds it: the floor counts the experts that such routings read on average, of which
        some may still be in a cache.
        """
        floor = cost(self.problem, self.machine.device, tokens).floor_us
        times = (p for c in self.candidates for t, p in c.predictions if t == tokens and p.source == "measured")
        return min([floor, *(p.time_us for p in times)])

    @property
    def steps(self) -> list[tuple[PlanStep, ProofStatus]]:
        """The plan's steps, each with how far its kernels are proven on this GPU model."""
        return list(zip(self.plan.steps if self.plan else (), self.proofs, strict=True))

    @property
    def untuned(self) -> tuple[str, ...]:
        """Backends of the plan that run as their heuristic says, because no table has this problem on this GPU."""
        return tuple(c.backend for c in self.candidates if c.tunable and c.backend in self._chosen() and self._on_gpu)

    @property
    def unrun(self) -> tuple[str, ...]:
        """Backends of the plan, each with the kernel family, that never ran on this GPU model."""
        found = (f"{s.backend} {s.config.kernel_family}".strip() for s, status in self.steps if status == "unrun")
        return tuple(dict.fromkeys(found))

    @property
    def foreign(self) -> tuple[str, ...]:
        """Backends of the plan that run another library's kernels."""
        accepted = [c for c in self.candidates if isinstance(c.verdict, Accepted) and c.verdict.foreign]
        return tuple(c.backend for c in accepted if c.backend in self._chosen())

    @property
    def _on_gpu(self) -> bool:
        return self.machine.device.kind == "cuda"

    def _chosen(self) -> set[str]:
        return {step.backend for step in self.plan.steps} if self.plan else set()

    def ranges(self) -> list[PlannedRange]:
        """Each step of the plan with its token range, its times and how far it is proven."""
        result = []
        for (tokens, step), status in zip(self.plan.ranges() if self.plan else (), self.proofs, strict=True):
            within = self._within(step)
            ends = dict.fromkeys((*within[:1], *within[-1:]))
            times = " to ".join(f"{format_us(p.time_us)} at {t}" for t, p in ends)
            sources = "; ".join(dict.fromkeys(_said_source(p.source) for _, p in ends))
            proven = said(status, self.machine.device) if self._on_gpu else ""
            floors = " to ".join(format_us(self.floor_us(t)) for t, _ in ends)
            result.append(PlannedRange(tokens, step, times, floors, sources, proven))
        return result

    def _within(self, step: PlanStep) -> list[tuple[int, Prediction]]:
        """Times at token counts of a step."""
        return [(t, p) for t, p in self.times if self.plan is not None and self.plan.step(t) is step]

    def _steps(self) -> list[str]:
        return [str(found) for found in self.ranges()]

    def _remarks(self, tune: str) -> list[str]:
        """What else the user should know of the choice, as clauses; ``tune`` is the command that tunes for it."""
        device = self.machine.device.name
        remarks = [
            f"{name} was never tested on {device}: `polymoe verify MODEL` does it there, and the check "
            "at load compares a few experts"
            for name in self.unrun
        ]
        if self.requested == "auto":
            remarks += [
                f"{name} runs another library's kernels, chosen because it was measured faster on this machine"
                for name in self.foreign
            ]
        remarks += [
            f"{name} is not tuned for this layer on this GPU and uses a heuristic: `{tune}` tunes it"
            for name in self.untuned
        ]
        return remarks

    def summary(self, tune: str = "polymoe tune") -> str:
        """One line for a log: layout, backends by token range, where times come from, how far the backends are proven
        on this GPU model, and the command ``tune`` where it would help."""
        plan = self.require()
        text = f"{self.problem} on {self.machine.device}: layout {plan.layout}, {'; '.join(self._steps())}"
        return ". ".join([text, *self._remarks(tune)])

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        device = self.machine.device
        return {
            "problem": str(self.problem),
            "device": {"name": device.name, "arch": device.arch, "rates": device.rates},
            "role": self.role,
            "requested": self.requested,
            "candidates": [self._candidate(c) for c in self.candidates],
            "layout_scores": {name: round(score, 3) for name, score in self.scores.items()},
            "plan": None
            if self.plan is None
            else {
                "layout": self.plan.layout,
                "steps": [
                    {
                        "tokens": tokens,
                        "max_tokens": step.max_tokens,
                        "backend": step.backend,
                        "family": step.config.kernel_family,
                        "config": str(step.config),
                        "proof": status,
                        "times": [
                            {"tokens": t, "time_us": round(p.time_us, 2), "source": p.source}
                            for t, p in self._within(step)
                        ],
                    }
                    for (tokens, step), status in zip(self.plan.ranges(), self.proofs, strict=True)
                ],
            },
            "untuned": list(self.untuned),
        }

    def _candidate(self, c: Candidate) -> dict[str, Any]:
        device = self.machine.device
        reasons = c.verdict.reasons if isinstance(c.verdict, Rejected) else ()
        return {
            "backend": c.backend,
            "layouts": list(c.layouts),
            "accepted": isinstance(c.verdict, Accepted),
            "note": describe(c.verdict, c.proven(device)) if isinstance(c.verdict, Accepted) else "",
            "proof": weakest(status for _, status in c.proofs) if c.proofs else None,
            "proofs": dict(c.proofs),
            "reasons": list(map(asdict, reasons)),
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

    def __str__(self) -> str:
        lines = [f"{self.problem}", f"on {self.machine.device}, role {self.role}, backend {self.requested}"]
        lines += [f"  {line}" for line in self._verdict_lines()]
        if self.plan is None:
            named = self._runs_when_named()
            return "\n".join([*lines, "no plan" + (f": name {' or '.join(named)} to run it here" if named else "")])
        lines.append(f"layout {self.plan.layout}")
        lines += [f"  {line}" for line in [*self._steps(), *self._remarks("polymoe tune")]]
        return "\n".join(lines)


def _said_source(source: str) -> str:
    """The source of a time in words for people; ``Prediction.source`` and JSON keep theirs."""
    return source.replace("cost model scaled to", "predicted from").replace("cost model", "predicted")


def describe(verdict: Accepted, proven: str = "") -> str:
    """One line about an acceptance: token limit, CUDA graphs, how far it is ``proven``, whether it has to be named, and
    its notes."""
    facts = [f"up to {verdict.max_tokens} tokens"] if verdict.max_tokens is not None else []
    facts += ["CUDA graphs"] if verdict.capturable else []
    facts += [] if verdict.repeatable else ["repeated calls differ in rounding"]
    facts += [text for text in (proven, verdict.opt_in_reason, *verdict.notes) if text]
    return "accepted" + (f" ({', '.join(facts)})" if facts else "")
