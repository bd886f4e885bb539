"""The search for a backend's fastest correct configuration at one token count, for :mod:`polymoe.bench.tune`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polymoe.activation_quantization import ActivationQuantization
from polymoe.backends.base import Backend, inputs_of
from polymoe.backends.config import Config
from polymoe.bench.measure import Call
from polymoe.errors import VerificationError
from polymoe.layouts import Packed
from polymoe.numerics import relative_error
from polymoe.planning.measured import Measured
from polymoe.verdict import Accepted

if TYPE_CHECKING:
    from polymoe.bench.tune import Tune

__all__ = ["Outcome", "Search", "Work"]

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
            if self.tune.device.type == "cuda":
                torch.cuda.synchronize()
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
        timed = [partial(run, *call, config, out) for call, out in zip(self.calls, outs, strict=True)]
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
