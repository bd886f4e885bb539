"""Tuning: find the fastest correct configuration of each backend at each token count, for a table of measured times.

Every configuration is compared with the reference, and must repeat bitwise unless the backend says that it does not,
before it can win. Timing has two stages: a few replays of each configuration, then several rounds in which the best
are timed in turn. Each token count is written when it is finished, so that an interrupted run keeps its rows and the
next one continues there.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from polymoe import __version__
from polymoe.backends.base import Backend, inputs_of
from polymoe.backends.config import Config
from polymoe.backends.cost import ZIPF_EXPONENT
from polymoe.bench.cases import Workload
from polymoe.bench.compile_ahead import CompileAhead
from polymoe.bench.measure import Call, compared_call, draw_calls, reference_results
from polymoe.bench.records import Stamp, utc_now
from polymoe.bench.routings import RoutingDistribution
from polymoe.bench.timing import TimedCalls, distinct_calls, synchronize
from polymoe.errors import ArgumentError, UnsupportedProblem, VerificationError
from polymoe.layouts import LAYOUTS, Packed
from polymoe.machine import Machine
from polymoe.planning.measured import Measured, problem_key
from polymoe.planning.select import select
from polymoe.planning.table_files import Lines, add, read_lines
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import ActivationQuantization
from polymoe.problem.call import CallArguments
from polymoe.problem.numerics import relative_error
from polymoe.problem.verdict import Accepted, Rejected

_ROUTINGS = (RoutingDistribution("uniform"), RoutingDistribution(f"zipf:{ZIPF_EXPONENT}", ZIPF_EXPONENT))
"""Routings of timed calls, in turn: real routing is between the two."""
_COMPILING = 1 / 3
"""Share of the time that may pass before timing begins, while configurations compile."""
_SCREENING, _REPEATS = 3, 15
"""Graph replays of each configuration in the first stage and in each round, and of a configuration that is the only
one."""
_HOPELESS = 1.3
"""A configuration whose first replay takes so many times the best time so far gets no more replays."""
_FINALISTS, _CLOSE = 3, 1.15
"""How many configurations are timed again, if their first time is within this factor of the best. The factor is large
because a GPU that reaches its power limit within milliseconds runs what comes later at lower clocks."""
_ROUNDS = 5
"""Rounds in which finalists are timed in turn. Clocks change more slowly than that, so all finalists see the same."""
_SAME = 1.02
"""The configuration of the token count below is kept if its time is within this factor of the best, because everyone
who loads the layer compiles each distinct configuration; else the backend's own choice, if it is."""
_SCREENED = 0.7
"""Share of a token count's time after which no new configuration starts, to leave time for the second stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tune:
    """One tuning run.

    Attributes:
        workload: what runs.
        machine, device: where it runs; a GPU is torch's current device.
        backends: the backends to tune; each must accept the problem.
        file: the table that rows are merged into.
        stamp: versions and command, for the rows.
        seconds: time limit, counted from ``began`` on the ``clock``; each token count gets its share of the rest.
        again: also tune what the table already has.
        configs: the most configurations to try at a token count; None for no limit.
        memory_bytes: largest memory to use on the device; None for no limit.
        compiler: compiles configurations ahead of timing.
        say: called with a message about each configuration that fails.
        timed_calls, clock: how calls are timed, and the source of time.
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
    configs: int | None = None
    memory_bytes: int | None = None
    compiler: CompileAhead = field(default_factory=lambda: CompileAhead(0))
    say: Callable[[str], None] = lambda text: None
    timed_calls: Callable[..., TimedCalls] = TimedCalls
    clock: Callable[[], float] = time.monotonic

    def outcomes(self, tokens: Sequence[int], progress: Callable[[str], None] = lambda text: None) -> Iterator[Outcome]:
        """Yield outcomes as they are finished and written.

        Raises:
            UnsupportedProblem: if a backend rejects the problem.
            ArgumentError: if it needs more than ``memory_bytes``.
        """
        problem = self.workload.problem
        work = [self._work(backend) for backend in self.backends]
        done = self._done()
        todo: list[tuple[Work, int]] = []
        # Backends that share a layout run one after the other, and only one packed layer is in memory.
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
            self.compile_ahead(w, t, w.backend.tuning_configs(problem, self.machine, t)[: self.configs])
        progress("reference")
        counts = sorted({t for _, t in todo})
        first = [compared_call(_draw(problem, self.device, t)) for t in counts]
        configs = [c for w, t in todo for c in w.backend.tuning_configs(problem, self.machine, t)]
        expected = {
            mode: dict(zip(counts, reference_results(self.workload, mode, first, progress), strict=True))
            for mode in dict.fromkeys((problem.activations, *(inputs_of(problem, c) for c in configs)))
        }
        packed: Packed | None = None
        before: dict[str, Config] = {}
        for i, (w, t) in enumerate(todo):
            if self._left() <= 0:
                yield Outcome(w.backend.name, t, note="out of time: run again to continue")
                continue
            try:
                if packed is None or packed.layout != w.layout:
                    packed = None
                    progress(f"{w.backend.name}: packing")
                    packed = LAYOUTS[w.layout].pack(self.workload.weights, self.device)
                    progress("compiling")
                    self.compiler.wait_for_all(self._left() - (1 - _COMPILING) * self.seconds)
                progress(f"{w.backend.name}: {t} tokens")
                calls = _draw(problem, self.device, t)
                search = Search(self, w, packed, calls, expected, self._left() / (len(todo) - i))
                outcome, config = search.run(before.get(w.backend.name))
            except torch.OutOfMemoryError:
                outcome, config = Outcome(w.backend.name, t, note="out of memory"), None
            if config is not None and outcome.row is not None:
                before[w.backend.name] = config
                if aside := add(self.file, [outcome.row]):
                    self.say(f"{self.file} was not a table of measured times: kept as {aside}")
            yield outcome

    def _work(self, backend: Backend) -> Work:
        problem, machine = self.workload.problem, self.machine
        selection = select(problem, machine, backend=backend.name, backends={backend.name: backend})
        verdict = selection.candidates[0].verdict
        if isinstance(verdict, Rejected) or selection.plan is None:
            got = "; ".join(map(str, verdict.reasons)) if isinstance(verdict, Rejected) else "no plan"
            raise UnsupportedProblem(f"tune ({problem})", expected=f"{backend.name} to run it", got=got)
        return Work(backend, verdict, selection.plan.layout)

    def _require_memory(self, work: Sequence[Work], tokens: Sequence[int]) -> None:
        """Raise early if the packed layer, the reference's results and the largest call do not fit."""
        problem = self.workload.problem
        s, most = problem.spec, max(tokens)
        packed = max(LAYOUTS[w.layout].nbytes(s) for w in work)
        results = 4 * s.hidden * sum(set(tokens))
        rows = most * problem.top_k
        call = 4 * distinct_calls(most) * most * s.hidden + 2 * rows * s.intermediate + 4 * rows * s.hidden
        needed = packed + results + call
        if self.memory_bytes is not None and needed > self.memory_bytes:
            raise ArgumentError(
                "memory",
                expected=f"at least {needed / 2**30:.2f} GiB",
                got=f"{self.memory_bytes / 2**30:.2f} GiB",
                hint="tune fewer --tokens, or one rank's part of the layer",
            )

    def _done(self) -> dict[tuple[str, int], Measured]:
        """Rows of the file that were measured with the installed versions."""
        lines = Lines() if self.again else read_lines(self.file)
        for error in lines.errors:
            self.say(f"ignored: {error}")
        here = (self.machine.device.name, problem_key(self.workload.problem), *self._versions())
        return {
            (r.backend, r.tokens): r
            for r in lines.rows
            if (r.device, r.problem, r.torch, r.triton, r.driver, r.polymoe) == here
        }

    def _versions(self) -> tuple[str, str | None, str | None, str]:
        driver = self.machine.driver
        return self.stamp.torch, self.stamp.triton, ".".join(map(str, driver)) if driver else None, __version__

    def _left(self) -> float:
        return self.began + self.seconds - self.clock()

    def compile_ahead(self, w: Work, tokens: int, configs: Sequence[Config]) -> None:
        """Have ``configs`` compiled by other processes if there are several."""
        if len(configs) > 1:
            self.compiler.submit(w.backend, w.layout, self.workload.problem, tokens, configs)

    def row(self, w: Work, tokens: int, config: Config, median_us: float) -> Measured:
        """Return the table row for a result."""
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
            date=utc_now(),
            command=self.stamp.command,
        )


def _draw(problem: Problem, device: torch.device, tokens: int) -> list[Call]:
    """Draw the calls that are timed together."""
    drawn = [draw_calls(problem, distribution, device, tokens) for distribution in _ROUTINGS]
    return [drawn[index % len(drawn)][index] for index in range(len(drawn[0]))]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one backend at one token count.

    Attributes:
        row: the row that was written, or None.
        own_us: time of the backend's default configuration, if its result was correct.
        tried: how many configurations were timed.
        failed: how many failed or gave wrong results.
        note: why there is no row, or a remark.
    """

    backend: str
    tokens: int
    row: Measured | None = None
    own_us: float | None = None
    tried: int = 0
    failed: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """A backend that accepts the problem, and one of its layouts."""

    backend: Backend
    verdict: Accepted
    layout: str


class Search:
    """Search for one backend at one token count within ``seconds``; the first configuration is always tried."""

    def __init__(
        self,
        tune: Tune,
        w: Work,
        packed: Packed,
        calls: Sequence[Call],
        expected: Mapping[ActivationQuantization, Mapping[int, Tensor]],
        seconds: float,
    ) -> None:
        self.tune, self.w, self.packed, self.calls, self.expected = tune, w, packed, calls, expected
        self.end = tune.clock() + seconds
        self.deadline = self.end - (1 - _SCREENED) * seconds
        self.tokens = len(calls[0][0])
        self.times: dict[Config, float] = {}
        self.failed: set[Config] = set()

    def run(self, before: Config | None) -> tuple[Outcome, Config | None]:
        """Return the outcome and its configuration; ``before`` is the configuration of the token count below."""
        tune, backend, problem = self.tune, self.w.backend, self.tune.workload.problem
        own = backend.configure(problem, tune.machine, self.tokens)
        queue: list[Config] = [own]
        self._add(queue, [] if before is None else [before])
        self._add(queue, backend.tuning_configs(problem, tune.machine, self.tokens))
        lone = len(queue) == 1
        while queue and not self._late() and (tune.configs is None or len(self.times) < tune.configs):
            tune.compile_ahead(self.w, self.tokens, queue)
            seconds = self.deadline - tune.clock()
            first = not (self.times or self.failed)
            config = tune.compiler.first_ready(backend, problem, self.tokens, [own] if first else queue, seconds)
            queue.remove(config)
            self._try(config, self.times, repeats=_REPEATS if lone else None)
            if not queue and self.times:
                timed = list(self.times.items())
                self._add(queue, backend.tuning_configs(problem, tune.machine, self.tokens, timed))
        note = "ended by the time limit" if queue and self._late() else ""
        own_us, tried = self.times.get(own), len(self.times)
        final = self._final([own] if before is None else [before, own], lone)
        if final is None:
            return Outcome(backend.name, self.tokens, failed=len(self.failed), note="none gave correct results"), None
        row = tune.row(self.w, self.tokens, *final)
        return Outcome(backend.name, self.tokens, row, own_us, tried, len(self.failed), note), final[0]

    def _add(self, queue: list[Config], configs: Sequence[Config]) -> None:
        for config in configs:
            if config not in queue and config not in self.times and config not in self.failed:
                queue.append(config)

    def _late(self) -> bool:
        return bool(self.times) and self.tune.clock() >= self.deadline

    def _final(self, preferred: Sequence[Config], lone: bool) -> tuple[Config, float] | None:
        """Time the best configurations in turn and return the winner with its time: the first of ``preferred`` that is
        about as fast as the best. None if none is correct."""
        times = dict(self.times) if lone else {}
        while self.times and not times:  # repeated only if a configuration that was correct is wrong now
            ranked = sorted(self.times, key=self.times.__getitem__)
            close = _CLOSE * self.times[ranked[0]]
            final = [c for c in ranked[:_FINALISTS] if self.times[c] <= close]
            final += [c for c in preferred if c not in final and self.times.get(c, close + 1) <= close]
            rounds: list[dict[Config, float]] = []
            while not rounds or (len(rounds) < _ROUNDS and self.tune.clock() < self.end):
                rounds.append({})
                for config in [c for c in final if c not in self.failed]:
                    self._try(config, rounds[-1], repeats=_SCREENING)
            right = [c for c in final if c not in self.failed]
            times = {c: statistics.median(found[c] for found in rounds) for c in right}
        if not times:
            return None
        best = min(times, key=times.__getitem__)
        best = next((c for c in preferred if c in times and times[c] <= _SAME * times[best]), best)
        return best, times[best]

    def _try(self, config: Config, times: dict[Config, float], *, repeats: int | None = None) -> None:
        """Time a configuration if its result is correct; else report why it is not."""
        try:
            times[config] = self._time(config, repeats)
        except _Wrong as wrong:
            self._fail(config, f"WRONG: {wrong}")
        except torch.OutOfMemoryError:
            self._fail(config, "out of memory")
        except Exception as error:  # anything that a compiler or a driver may raise
            self._fail(config, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
            self._require_gpu(config, error)

    def _fail(self, config: Config, what: str) -> None:
        self.failed.add(config)
        self.times.pop(config, None)
        self.tune.say(f"{self.w.backend.name}, {self.tokens} tokens, {config}: {what}")

    def _require_gpu(self, config: Config, error: Exception) -> None:
        """Raise if the GPU no longer works: after some errors a process cannot use it."""
        try:
            synchronize(self.tune.device)
        except RuntimeError as broken:
            raise VerificationError(
                f"{self.w.backend.name}, {self.tokens} tokens, {config}",
                expected="a GPU that still works",
                got=str(broken).strip().splitlines()[0],
                hint="this is a bug: please report it with this message. Finished rows are in the table.",
            ) from error

    def _time(self, config: Config, repeats: int | None) -> float:
        """Return the median time of ``repeats`` replays, or if that is None, of one replay and a few more if the time
        is near the best so far.

        Raises:
            _Wrong: if the result is wrong, or differs between calls where it must not.
        """
        problem, tune = self.tune.workload.problem, self.tune
        run = self.w.backend.bind(problem, self.packed).run
        outs = [torch.full_like(x, float("nan")) for x, _ in self.calls]  # missing writes become visible
        given = [CallArguments(x, *routing, out) for (x, routing), out in zip(self.calls, outs, strict=True)]
        timed = [partial(run, call, config) for call in given]
        compared = range(len(next(iter(self.expected.values()))[self.tokens]) // self.tokens)

        def results() -> Tensor:
            return torch.cat([outs[i] for i in compared])

        for i in compared:
            timed[i]()
        once = results()
        self._require_right(once, once, config)
        outs[0].fill_(float("nan"))
        timed[0]()
        self._require_right(results(), once, config)
        for out in outs:
            out.fill_(float("nan"))
        together = tune.timed_calls(timed, tune.device, graph=self.w.verdict.capturable)
        timing = together.time(repeats or 1)
        if repeats is None and timing.median_us < _HOPELESS * min(self.times.values(), default=math.inf):
            timing = together.time(_SCREENING)
        if timing.by == "calls":  # perhaps not all of them ran
            for i in compared:
                timed[i]()
        self._require_right(results(), once, config)
        return timing.median_us

    def _require_right(self, got: Tensor, once: Tensor, config: Config) -> None:
        mode = inputs_of(self.tune.workload.problem, config)
        if got is not once and self.w.verdict.repeatable and not torch.equal(got, once):
            raise _Wrong("repeats differ")
        error = relative_error(got, self.expected[mode][self.tokens])
        if not error <= mode.tolerance:  # NaN fails too
            raise _Wrong(f"relative error {error:.2g}, at most {mode.tolerance:g}")


class _Wrong(Exception):
    """A wrong result."""
