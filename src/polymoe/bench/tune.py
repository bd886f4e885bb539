"""Tune: the fastest right configuration of each backend at each token count, into a table of measured times.

Every candidate is compared with the reference, and its repeats with each other to the bit, before it may win. Timing
has two stages: a few turns of each candidate, then the best ones at length. Each token count is written when it is
done, so that an interruption keeps what is finished and the next run goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from polymoe import __version__
from polymoe.backends.base import Backend, layouts_for
from polymoe.backends.config import Config
from polymoe.bench.cases import Workload
from polymoe.bench.compile_ahead import CompileAhead
from polymoe.bench.measure import Call, draw_calls, reference_results
from polymoe.bench.records import Stamp
from polymoe.bench.routings import Spread
from polymoe.bench.timing import Turn, calls_per_turn
from polymoe.errors import ArgumentError, FormatError, UnsupportedProblem, VerificationError
from polymoe.layouts import LAYOUTS, Packed
from polymoe.machine import Machine
from polymoe.numerics import TOLERANCE, relative_error
from polymoe.planning.measured import Measured, problem_key
from polymoe.planning.table_files import add, read
from polymoe.verdict import Accepted

__all__ = ["Outcome", "Tune"]

_SCREENING = 3
"""Turns of a graph that a candidate gets before it is known to be among the best."""
_FINALISTS, _CLOSE = 3, 1.05
_SAME = 1.02
"""The configuration of the token count before is kept if it is within this of the best: each distinct one is compiled
by everyone who loads the layer."""
_SCREENED = 0.7
"""Share of a token count's time after which no new candidate is begun, so that the best ones can be timed at length."""
_COMPILING = 1 / 3
"""Share of the time that may pass before timing begins, while configurations compile."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One backend at one token count.

    Attributes:
        row: what was written, or None.
        own_us: time of the backend's own choice, where that was right.
        tried: how many candidates were timed.
        failed: how many failed or were wrong.
        note: why there is no row, or what else to know.
    """

    backend: str
    tokens: int
    row: Measured | None = None
    own_us: float | None = None
    tried: int = 0
    failed: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Work:
    """A backend that accepts, and one of its layouts."""

    backend: Backend
    verdict: Accepted
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tune:
    """What is tuned, where, and for how long.

    Attributes:
        workload: what runs, uniformly routed.
        machine, device: where, as checks and as torch see it; a GPU is torch's current one.
        backends: those to tune, by name; each must accept the problem.
        file: the table that rows are merged into.
        stamp: versions and command.
        seconds: when to end, from ``began`` on the ``clock``; each token count gets its share of what is left.
        again: tune what is in the table already, too.
        memory_bytes: refuse what needs more on the device; None for no bound.
        compiler: compiles ahead.
        say: told of candidates that fail.
        turn, clock: how calls are timed, and what the time is.
    """

    workload: Workload
    machine: Machine
    device: torch.device
    backends: Sequence[Backend]
    file: Path
    stamp: Stamp
    seconds: float = 300.0
    began: float = field(default_factory=time.monotonic)
    again: bool = False
    memory_bytes: int | None = None
    compiler: CompileAhead = field(default_factory=lambda: CompileAhead(0))
    say: Callable[[str], None] = lambda text: None
    turn: Callable[..., Turn] = Turn
    clock: Callable[[], float] = time.monotonic

    def outcomes(self, tokens: Sequence[int], progress: Callable[[str], None] = lambda text: None) -> Iterator[Outcome]:
        """Outcomes as they are finished and written.

        Raises:
            UnsupportedProblem: if a backend rejects the problem.
            ArgumentError: if it needs more memory than it may take.
        """
        problem = self.workload.problem
        work = [self._work(backend) for backend in self.backends]
        done = self._done()
        todo: list[tuple[_Work, int]] = []
        # Backends that share a layout follow each other, and only one packed layer is held.
        for w in sorted(work, key=lambda w: w.layout):
            for t in sorted(set(tokens)):
                if w.verdict.max_tokens is not None and t > w.verdict.max_tokens:
                    yield Outcome(w.backend.name, t, note=f"takes at most {w.verdict.max_tokens} tokens")
                elif (w.backend.name, t) in done:
                    yield Outcome(w.backend.name, t, done[w.backend.name, t], note="in the table already")
                else:
                    todo.append((w, t))
        if not todo:
            return
        self._require_memory(work, [t for _, t in todo])
        for w, t in todo:
            self.compile_ahead(w, t, w.backend.tuning_configs(problem, self.machine, t))
        progress("reference")
        spread = Spread("uniform")
        counts = sorted({t for _, t in todo})
        first = [draw_calls(problem, spread, self.device, t)[0] for t in counts]
        expected = dict(zip(counts, reference_results(self.workload, problem.activations, first), strict=True))
        packed: Packed | None = None
        before: dict[str, Config] = {}
        for i, (w, t) in enumerate(todo):
            if self._left() <= 0:
                yield Outcome(w.backend.name, t, note="out of time: run again to go on")
                continue
            try:
                if packed is None or packed.layout != w.layout:
                    packed = None
                    progress(f"{w.backend.name}: packing")
                    packed = LAYOUTS[w.layout].pack(self.workload.weights, self.device)
                    progress("compiling")
                    self.compiler.wait_for_all(self._left() - (1 - _COMPILING) * self.seconds)
                progress(f"{w.backend.name}: {t} tokens")
                calls = draw_calls(problem, spread, self.device, t)
                search = _Search(self, w, packed, calls, expected[t], self._left() / (len(todo) - i))
                outcome, config = search.run(before.get(w.backend.name))
            except torch.OutOfMemoryError:
                outcome, config = Outcome(w.backend.name, t, note="out of memory"), None
            if config is not None and outcome.row is not None:
                before[w.backend.name] = config
                if aside := add(self.file, [outcome.row]):
                    self.say(f"{self.file} was no table of measured times: kept as {aside}")
            yield outcome

    def _work(self, backend: Backend) -> _Work:
        problem, machine = self.workload.problem, self.machine
        verdict = backend.check(problem, machine)
        names = layouts_for(backend, verdict)
        layout = next((n for n in names if not LAYOUTS[n].check(problem.spec)), None)
        if not isinstance(verdict, Accepted) or layout is None:
            reasons = () if isinstance(verdict, Accepted) else verdict.reasons
            got = "; ".join(map(str, reasons)) or f"none of its layouts holds it: {', '.join(names)}"
            raise UnsupportedProblem(f"tune ({problem})", expected=f"{backend.name} to run it", got=got)
        return _Work(backend, verdict, layout)

    def _require_memory(self, work: Sequence[_Work], tokens: Sequence[int]) -> None:
        """Refuse early what could not end well: the packed layer, the reference's results, and the largest call."""
        problem = self.workload.problem
        s, most = problem.spec, max(tokens)
        packed = max(LAYOUTS[w.layout].nbytes(s) for w in work)
        results = 4 * s.hidden * sum(set(tokens))
        rows = most * problem.top_k
        call = 4 * calls_per_turn(most) * most * s.hidden + 2 * rows * s.intermediate + 4 * rows * s.hidden
        needed = packed + results + call
        if self.memory_bytes is not None and needed > self.memory_bytes:
            raise ArgumentError(
                "--memory",
                expected=f"at least {needed / 2**30:.2f} GiB",
                got=f"{self.memory_bytes / 2**30:.2f} GiB",
                hint="tune fewer --tokens, or what one rank holds of the layer",
            )

    def _done(self) -> dict[tuple[str, int], Measured]:
        """Rows of the file that these versions measured."""
        try:
            rows = [] if self.again else read(self.file)
        except FormatError as error:
            self.say(f"ignored: {error}")
            return {}
        here = (self.machine.device.name, problem_key(self.workload.problem), *self._versions())
        return {
            (r.backend, r.tokens): r
            for r in rows
            if (r.device, r.problem, r.torch, r.triton, r.driver, r.polymoe) == here
        }

    def _versions(self) -> tuple[str, str | None, str | None, str]:
        driver = self.machine.driver
        return self.stamp.torch, self.stamp.triton, ".".join(map(str, driver)) if driver else None, __version__

    def _left(self) -> float:
        return self.began + self.seconds - self.clock()

    def compile_ahead(self, w: _Work, tokens: int, configs: Sequence[Config]) -> None:
        """Have ``configs`` compiled by other processes, where there is a choice."""
        if len(configs) > 1:
            self.compiler.submit(w.backend, w.layout, self.workload.problem, tokens, configs)

    def row(self, w: _Work, tokens: int, config: Config, median_us: float) -> Measured:
        """The row of a result."""
        torch_version, triton, driver, polymoe = self._versions()
        return Measured(
            device=self.machine.device.name,
            backend=w.backend.name,
            problem=problem_key(self.workload.problem),
            tokens=tokens,
            config=config.to_dict(),
            median_us=round(median_us, 2),
            torch=torch_version,
            triton=triton,
            driver=driver,
            polymoe=polymoe,
            date=self.stamp.date(),
            command=self.stamp.command,
        )


class _Search:
    """One backend at one token count, in ``seconds``; the first candidate is tried in any case."""

    def __init__(
        self, tune: Tune, w: _Work, packed: Packed, calls: Sequence[Call], expected: Tensor, seconds: float
    ) -> None:
        self.tune, self.w, self.packed, self.calls, self.expected = tune, w, packed, calls, expected
        self.end = tune.clock() + seconds
        self.deadline = self.end - (1 - _SCREENED) * seconds
        self.tokens = len(calls[0][0])
        self.times: dict[Config, float] = {}
        self.failed: set[Config] = set()

    def run(self, before: Config | None) -> tuple[Outcome, Config | None]:
        """The outcome and its configuration; ``before`` is that of the token count below."""
        tune, backend, problem = self.tune, self.w.backend, self.tune.workload.problem
        own = backend.configure(problem, tune.machine, self.tokens)
        queue: list[Config] = [own]
        self._add(queue, [] if before is None else [before])
        self._add(queue, backend.tuning_configs(problem, tune.machine, self.tokens))
        lone = len(queue) == 1
        while queue and not self._late():
            tune.compile_ahead(self.w, self.tokens, queue)
            seconds = self.deadline - tune.clock()
            config = tune.compiler.first_ready(backend, problem, self.tokens, queue, seconds)
            queue.remove(config)
            self._try(config, self.times, at_length=lone)
            if not queue and self.times:
                timed = list(self.times.items())
                self._add(queue, backend.tuning_configs(problem, tune.machine, self.tokens, timed))
        note = "ended by the time limit" if queue else ""
        own_us, tried = self.times.get(own), len(self.times)
        final = self._final(before, lone)
        if final is None:
            return Outcome(backend.name, self.tokens, failed=len(self.failed), note="no candidate was right"), None
        row = tune.row(self.w, self.tokens, *final)
        return Outcome(backend.name, self.tokens, row, own_us, tried, len(self.failed), note), final[0]

    def _add(self, queue: list[Config], configs: Sequence[Config]) -> None:
        for config in configs:
            if config not in queue and config not in self.times and config not in self.failed:
                queue.append(config)

    def _late(self) -> bool:
        return bool(self.times) and self.tune.clock() >= self.deadline

    def _final(self, before: Config | None, lone: bool) -> tuple[Config, float] | None:
        """The best of the best and its time, at length; None if nothing is right."""
        times: dict[Config, float] = dict(self.times) if lone else {}
        while self.times and not times:  # again only if what was right once is wrong now
            ranked = sorted(self.times, key=self.times.__getitem__)
            final = ranked[:_FINALISTS]
            if before in self.times and before not in final and self.times[before] <= _CLOSE * self.times[ranked[0]]:
                final.append(before)
            for config in final:
                if not times or self.tune.clock() < self.end:
                    self._try(config, times, at_length=True)
        if not times:
            return None
        best = min(times, key=times.__getitem__)
        if before in times and times[before] <= _SAME * times[best]:
            best = before
        return best, times[best]

    def _try(self, config: Config, times: dict[Config, float], *, at_length: bool = False) -> None:
        """Time a candidate that is right; say what is wrong with one that is not."""
        try:
            times[config] = self._time(config, at_length)
        except _Wrong as wrong:
            self._fail(config, f"WRONG: {wrong}")
        except torch.OutOfMemoryError:
            self._fail(config, "out of memory")
        except Exception as error:  # whatever a compiler or a driver may raise
            self._fail(config, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
            self._require_gpu(config, error)

    def _fail(self, config: Config, what: str) -> None:
        self.failed.add(config)
        self.times.pop(config, None)
        self.tune.say(f"{self.w.backend.name}, {self.tokens} tokens, {config}: {what}")

    def _require_gpu(self, config: Config, error: Exception) -> None:
        """Some errors leave a process without its GPU: nothing after them would run."""
        try:
            if self.tune.device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as broken:
            raise VerificationError(
                f"{self.w.backend.name}, {self.tokens} tokens, {config}",
                expected="a GPU that goes on after it",
                got=str(broken).strip().splitlines()[0],
                hint="this is a bug: report it with this message. What was finished is in the table.",
            ) from error

    def _time(self, config: Config, at_length: bool) -> float:
        problem = self.tune.workload.problem
        run = self.w.backend.bind(problem, self.packed).run
        outs = [torch.full_like(x, float("nan")) for x, _ in self.calls]  # what is not written shows
        timed = [partial(run, *call, config, out) for call, out in zip(self.calls, outs, strict=True)]
        timed[0]()
        error, once = relative_error(outs[0], self.expected), outs[0].clone()
        if not error <= TOLERANCE:  # NaN fails too
            raise _Wrong(f"relative error {error:.2g}, at most {TOLERANCE:g}")
        outs[0].fill_(float("nan"))
        timed[0]()
        if not torch.equal(outs[0], once):
            raise _Wrong("repeats differ")
        outs[0].fill_(float("nan"))
        turn = self.tune.turn(timed, self.tune.device, graph=self.w.verdict.capturable)
        timing = turn.time() if at_length else turn.time(_SCREENING)
        if not torch.equal(outs[0], once):
            raise _Wrong("repeats differ")
        return timing.median_us


class _Wrong(Exception):
    """A result that may not win."""
