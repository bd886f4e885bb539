"""Select: every backend's verdict on a problem, and the plan made of those that fit.

``auto`` compares layouts by the mean of predicted time over floor across the role's token counts, and takes the least.
Backends that read the same layout then share the token range: each range goes to the fastest. Kernels that never ran on
the GPU model are taken only where nothing better accepts. A backend that the user names is taken or refused, never
replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from polymoe.backends.base import Backend, BackendBase, Prediction, failed, inputs_of, judge, layouts_for
from polymoe.backends.config import Config
from polymoe.backends.cost import cost
from polymoe.checkpoint import Checkpoint
from polymoe.common.plugins import PluginError, guarded
from polymoe.errors import ArgumentError, nearest
from polymoe.layouts import LAYOUTS, Layout
from polymoe.machine import Machine
from polymoe.planning.measured import Table
from polymoe.planning.plan import ROLE_TOKENS, Plan, PlanStep, role_tokens
from polymoe.planning.predictor import Predictor
from polymoe.planning.proof import Proofs, ProofStatus, shipped
from polymoe.planning.selection import Candidate, Selection
from polymoe.planning.table_files import installed
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import UNQUANTIZED, ActivationQuantization
from polymoe.problem.verdict import Reason, Rejected, Verdict

_FOREIGN = "another library's kernels: auto uses them only if `polymoe tune` measured them as faster on this machine"


@dataclass(frozen=True, slots=True)
class _Reader:
    """A backend that accepts the problem, and the calls that it may be chosen for."""

    predictor: Predictor
    max_tokens: int | None
    only_measured: bool
    proofs: Proofs

    @property
    def bounds(self) -> list[int]:
        """Token counts, besides powers of two, at which its configuration may change: those that were measured, those
        that it names, and its limit."""
        p = self.predictor
        with guarded(p.backend):  # those of other packages may derive from nothing
            own = p.backend.token_bounds(p.problem, p.machine) if isinstance(p.backend, BackendBase) else ()
        limit = () if self.max_tokens is None else (self.max_tokens,)
        return [*(point.tokens for point in p.points), *own, *limit]

    @property
    def any_number(self) -> bool:
        """Whether it may run calls of any number of tokens. If only measured times count, a time at the largest token
        count of the roles stands for all larger ones."""
        return self.max_tokens is None and self.takes(max(ROLE_TOKENS["mixed"]))

    def takes(self, tokens: int) -> bool:
        """Whether it may run calls of ``tokens`` tokens."""
        if self.max_tokens is not None and tokens > self.max_tokens:
            return False
        with guarded(self.predictor.backend):
            return not self.only_measured or self.predictor.measured(tokens)

    def status(self, config: Config) -> ProofStatus:
        """How far the kernel family of a configuration is proven on the machine's GPU model."""
        p, family = self.predictor, config.kernel_family
        if any(point.config.kernel_family == family for point in p.points):
            return "measured"
        problem = replace(p.problem, activations=inputs_of(p.problem, config))
        return self.proofs.status(p.backend.name, family, problem, p.machine.device)

    def rank(self, tokens: int) -> tuple[bool, float]:
        """Return a key whose least value is best: kernels that ran on this GPU model before those that never did, then
        the predicted time."""
        with guarded(self.predictor.backend):
            return self.status(self.predictor.configure(tokens)) == "unrun", self.predictor.predict(tokens).time_us


def require_backend(name: str, backends: Iterable[str]) -> None:
    """Refuse a name that is neither "auto" nor a backend's.

    Raises:
        ArgumentError: with the known names.
    """
    known = ["auto", *backends]
    if name not in known:
        raise ArgumentError("backend", expected="the name of a backend", got=repr(name), hint=nearest(name, known))


def resolve_activations(
    checkpoint: Checkpoint, layer: int, machine: Machine, activations: ActivationQuantization | str
) -> ActivationQuantization:
    """``activations``, or for "auto" the checkpoint's own recipe on a GPU and "16bit" on a CPU.

    Raises:
        ArgumentError: for an unknown name.
    """
    if activations != "auto":
        return ActivationQuantization.of(activations)
    return checkpoint.recipe(layer) if machine.device.kind == "cuda" else UNQUANTIZED


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
    require_backend(backend, backends)
    if proofs is None:
        proofs = shipped()
    question = _Question(problem, machine, role, backend, layout, backends, layouts, table, proofs, points)
    rejected: dict[str, Rejected] = {}
    while True:  # once, and again without each plug-in that raised an exception
        try:
            return question.answer(rejected)
        except PluginError as error:
            rejected[error.name] = Rejected((failed(error),))


@dataclass(frozen=True, slots=True)
class _Question:
    """The arguments of :func:`select`, none of them left out, and the token counts of the role."""

    problem: Problem
    machine: Machine
    role: str
    backend: str
    layout: str | None
    backends: Mapping[str, Backend]
    layouts: Mapping[str, Layout]
    table: Table
    proofs: Proofs
    points: tuple[int, ...]

    def answer(self, rejected: Mapping[str, Rejected]) -> Selection:
        """Ask every backend but those that are ``rejected`` already, and plan.

        Raises:
            PluginError: if a backend of another package raises an exception.
        """
        candidates = []
        usable: dict[str, tuple[_Reader, tuple[str, ...]]] = {}
        for name, backend in self.backends.items():
            if name in rejected:
                candidates.append(Candidate(name, (), rejected[name]))
                continue
            with guarded(backend):
                candidate, reader, held = self._ask(name, backend)
            candidates.append(candidate)
            if reader is not None:
                usable[name] = reader, held

        plans: dict[str, Plan] = {}
        ranks: dict[str, tuple[bool, float]] = {}
        for name in dict.fromkeys(n for _, held in usable.values() for n in held):
            if self.layout not in (None, name):
                continue
            readers = {n: reader for n, (reader, held) in usable.items() if name in held}
            found = _plan(name, readers, any_number=self.backend == "auto")
            if found is not None:
                plans[name] = found
                ranks[name] = _rank(found, readers, self.problem, self.machine, self.points)
        best = min(ranks, key=ranks.__getitem__, default=None)
        plan = plans[best] if best else None
        statuses: tuple[ProofStatus, ...] = (
            tuple(usable[s.backend][0].status(s.config) for s in plan.steps) if plan else ()
        )
        return Selection(
            self.problem,
            self.machine,
            self.role,
            self.backend,
            tuple(candidates),
            scores={name: score for name, (_, score) in ranks.items()},
            plan=plan,
            proofs=statuses,
            times=_times(plan, {n: reader for n, (reader, _) in usable.items()}, self.points) if plan else (),
            packed_as=self.layout,
            layout_bytes=_layout_bytes(self.layouts.get(plan.layout), self.problem) if plan else None,
        )

    def _ask(self, name: str, backend: Backend) -> tuple[Candidate, _Reader | None, tuple[str, ...]]:
        """Return a backend's answer and, if it may be chosen, its reader and the layouts that hold the experts."""
        problem, machine = self.problem, self.machine
        verdict, held = _with_layouts(backend, judge(backend, problem, machine), problem, self.layouts)
        layouts = layouts_for(backend, verdict)
        if isinstance(verdict, Rejected):
            return Candidate(name, layouts, verdict), None, ()
        rows = Table(self.table.sources[:1]) if verdict.foreign else self.table
        predictor = Predictor.of(backend, problem, machine, rows)
        if verdict.foreign and not verdict.opt_in_reason and not predictor.points:
            verdict = replace(verdict, opt_in_reason=_FOREIGN)
        auto = self.backend == "auto"
        reader = _Reader(predictor, verdict.max_tokens, verdict.foreign and auto, self.proofs)
        fitting = [t for t in self.points if verdict.max_tokens is None or t <= verdict.max_tokens]
        families = {config.kernel_family: config for config in map(predictor.configure, fitting)}
        candidate = Candidate(
            name,
            layouts,
            verdict,
            predictions=tuple((t, predictor.predict(t)) for t in fitting),
            proofs=tuple((family, reader.status(config)) for family, config in families.items()),
            tunable=predictor.tunable,
        )
        chosen = self.backend == name or (auto and not verdict.opt_in_reason)
        return candidate, reader if chosen else None, held


def _rank(
    plan: Plan, readers: Mapping[str, _Reader], problem: Problem, machine: Machine, points: Sequence[int]
) -> tuple[bool, float]:
    """Return a key whose least value is best: plans of kernels that all ran on this GPU model before the others, then
    the mean of predicted time over floor."""
    last = plan.steps[-1].max_tokens
    ranks = {t: readers[plan.step(t).backend].rank(t) for t in points if last is None or t <= last}
    ratios = [time_us / cost(problem, machine.device, t).floor_us for t, (_, time_us) in ranks.items()]
    score = sum(ratios) / len(ratios) if ratios else float("inf")
    return any(unrun for unrun, _ in ranks.values()), score


def _times(plan: Plan, readers: Mapping[str, _Reader], points: Sequence[int]) -> tuple[tuple[int, Prediction], ...]:
    """The plan's time at the role's token counts and at the first and last token count of each step."""
    tokens = {t for first, step in plan.starts() for t in (first, step.max_tokens) if t is not None}
    last = plan.steps[-1].max_tokens
    tokens |= {t for t in points if last is None or t <= last}
    times = []
    for t in sorted(tokens):
        predictor = readers[plan.step(t).backend].predictor
        with guarded(predictor.backend):
            times.append((t, predictor.predict(t)))
    return tuple(times)


def _with_layouts(
    backend: Backend, verdict: Verdict, problem: Problem, layouts: Mapping[str, Layout]
) -> tuple[Verdict, tuple[str, ...]]:
    """Return the verdict and those of its layouts that can hold the experts. If none can, return a rejection with the
    backend's own reasons and those of the layout that has the fewest."""
    names = layouts_for(backend, verdict)
    refused = {name: _refusal(layouts[name], problem) if name in layouts else () for name in names}
    held = tuple(name for name, reasons in refused.items() if not reasons)
    if held or not refused:
        return verdict, held
    name = min(refused, key=lambda n: len(refused[n]))
    found = tuple(Reason(f"layout {name}, {r.what}", r.expected, r.got) for r in refused[name])
    return (replace(verdict, reasons=verdict.reasons + found) if isinstance(verdict, Rejected) else Rejected(found)), ()


def _refusal(layout: Layout, problem: Problem) -> tuple[Reason, ...]:
    """Every reason why the layout cannot hold the experts; one of another package that raises has one."""
    try:
        with guarded(layout):
            return tuple(layout.check(problem.spec, problem.scales))
    except PluginError as error:
        return (failed(error),)


def _layout_bytes(layout: Layout | None, problem: Problem) -> int | None:
    try:
        with guarded(layout):
            return None if layout is None else layout.nbytes(problem.spec)
    except PluginError:
        return None


def _plan(layout: str, readers: Mapping[str, _Reader], *, any_number: bool) -> Plan | None:
    """Return a plan with the best reader of ``layout`` for each range of token counts.

    Ranges end at powers of two and at readers' bounds. None if a range has no reader, or if the plan must take
    ``any_number`` of tokens and no reader does.
    """
    unlimited = any(r.any_number for r in readers.values())
    points = sorted({*ROLE_TOKENS["mixed"], 512, *(bound for r in readers.values() for bound in r.bounds)})
    if not unlimited:
        if any_number:
            return None
        limits = [r.max_tokens for r in readers.values() if r.max_tokens is not None]
        points = [p for p in points if p <= max(limits)]
    # The last step is of a reader without any limit: others were measured, or work, up to some number of tokens.
    ranges = [(p, p) for p in points] + ([(points[-1], None)] if unlimited else [])
    steps: list[PlanStep] = []
    for tokens, last in ranges:
        fitting = [r for r in readers.values() if (r.any_number if last is None else r.takes(tokens))]
        if not fitting:
            return None
        best = min(fitting, key=lambda reader: reader.rank(tokens))
        new = PlanStep(last, best.predictor.backend.name, best.predictor.configure(tokens))
        if steps and (steps[-1].backend, steps[-1].config) == (new.backend, new.config):
            steps.pop()
        steps.append(new)
    return Plan(layout, tuple(steps))
