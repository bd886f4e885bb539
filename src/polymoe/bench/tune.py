"""Tuning: find the fastest correct configuration of each backend at each token count, for a table of measured times.

Every configuration is compared with the reference, and must repeat bitwise unless the backend says that it does not,
before it can win. Timing has two stages: a few replays of each configuration, then several rounds in which the best
are timed in turn. Each token count is written when it is finished, so that an interrupted run keeps its rows and the
next one continues there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from polymoe import __version__
from polymoe.activation_quantization import ActivationQuantization
from polymoe.backends.base import Backend, inputs_of
from polymoe.backends.config import Config
from polymoe.bench.cases import Workload
from polymoe.bench.compile_ahead import CompileAhead
from polymoe.bench.measure import Call, compared_call, draw_calls, reference_results
from polymoe.bench.records import Stamp
from polymoe.bench.routings import RoutingDistribution
from polymoe.bench.timing import TimedCalls, distinct_calls
from polymoe.bench.tune_search import Outcome, Search, Work
from polymoe.errors import ArgumentError, UnsupportedProblem
from polymoe.layouts import LAYOUTS, Packed
from polymoe.machine import Machine
from polymoe.planning.measured import Measured, problem_key
from polymoe.planning.select import select
from polymoe.planning.table_files import Lines, add, read_lines
from polymoe.problem import Problem
from polymoe.verdict import Rejected

__all__ = ["Outcome", "Tune"]

_ROUTINGS = (RoutingDistribution("uniform"), RoutingDistribution("zipf:1.1", 1.1))
"""Routings of timed calls, in turn: real routing is between the two."""
_COMPILING = 1 / 3
"""Share of the time that may pass before timing begins, while configurations compile."""


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
        expected = {
            mode: dict(zip(counts, reference_results(self.workload, mode, first, progress), strict=True))
            for mode in dict.fromkeys((problem.activations, *self._kept(todo)))
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

    def _kept(self, todo: Sequence[tuple[Work, int]]) -> list[ActivationQuantization]:
        """How inputs are rounded by configurations that may be tried, where that is not as the problem says."""
        problem, machine = self.workload.problem, self.machine
        configs = [c for w, t in todo for c in w.backend.tuning_configs(problem, machine, t)]
        return [mode for mode in (inputs_of(problem, c) for c in configs) if mode != problem.activations]

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
            date=self.stamp.date(),
            command=self.stamp.command,
        )


def _draw(problem: Problem, device: torch.device, tokens: int) -> list[Call]:
    """Draw the calls that are timed together."""
    drawn = [draw_calls(problem, distribution, device, tokens) for distribution in _ROUTINGS]
    return [drawn[index % len(drawn)][index] for index in range(len(drawn[0]))]
