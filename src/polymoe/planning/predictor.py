"""Predicts one backend's configuration and time at any token count, from measured times where a table has them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from math import exp, log

from polymoe.backends.base import Backend, Prediction
from polymoe.backends.config import Config
from polymoe.errors import PlanError
from polymoe.machine import Machine
from polymoe.planning.measured import Measured, Table, minor_version
from polymoe.problem import Problem

_REACH = 4
"""A configuration measured at T tokens is used for calls of T / _REACH tokens or more; fewer need other tile sizes."""


@dataclass(frozen=True, slots=True)
class Point:
    """The measurement at one token count: the configuration, its time in microseconds, and the source to report."""

    tokens: int
    config: Config
    median_us: float
    source: str


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts configurations and times of a backend for a problem and a machine that it accepts, from measurements in
    ascending order of tokens."""

    backend: Backend
    problem: Problem
    machine: Machine
    points: tuple[Point, ...] = ()

    @classmethod
    def of(cls, backend: Backend, problem: Problem, machine: Machine, table: Table) -> Predictor:
        """Return a predictor with the table's measurements for this device and problem.

        Rows whose configuration the backend no longer has are skipped with a warning.
        """
        compiler = getattr(backend, "compiler", None)  # backends of other packages may derive from nothing
        here = machine.packages.get("triton") if compiler == "triton" else None
        points = []
        for row in table.points(machine.device.name, backend.name, problem, here):
            kind = type(backend.configure(problem, machine, row.tokens))
            try:
                config = kind.from_dict(row.config, f"measured configuration of {backend.name}")
            except PlanError as error:
                hint = f"it was tuned with polymoe {row.polymoe}; run again: {row.command}"
                _warn_once(str(PlanError(error.where, expected=error.expected, got=error.got, hint=hint)))
                continue
            points.append(Point(row.tokens, config, row.median_us, _source(row, here) if compiler else "measured"))
        return cls(backend, problem, machine, tuple(points))

    @property
    def tunable(self) -> bool:
        """Whether nothing was measured although the backend has more than one configuration."""
        return not self.points and len(self.backend.tuning_configs(self.problem, self.machine, 16)) > 1

    def measured(self, tokens: int) -> bool:
        """Whether the time of ``tokens`` follows from a measurement at this or a larger token count within reach."""
        return bool(self.points) and tokens <= self.points[-1].tokens and self._serving(tokens) is not None

    def configure(self, tokens: int) -> Config:
        """The measured configuration that serves ``tokens``, else the backend's heuristic."""
        point = self._serving(tokens)
        return self.backend.configure(self.problem, self.machine, tokens) if point is None else point.config

    def predict(self, tokens: int) -> Prediction:
        """Return the time of one call of ``tokens`` tokens, in microseconds.

        Between two measured token counts, the time is interpolated linearly in logarithms. Beyond them, the nearest
        measured time is scaled by the ratio that the backend's cost model predicts.
        """
        point = self._serving(tokens)
        model = self.backend.predict(self.problem, self.machine, tokens)
        if point is None:
            return model
        below = max((p for p in self.points if p.tokens <= tokens), key=lambda p: p.tokens, default=None)
        if point.tokens == tokens:
            return Prediction(point.median_us, point.source)
        if point.tokens < tokens or below is None:
            there = self.backend.predict(self.problem, self.machine, point.tokens)
            source = f"{model.source} scaled to {point.tokens} tokens {point.source}"
            return Prediction(point.median_us * model.time_us / there.time_us, source)
        along = log(tokens / below.tokens) / log(point.tokens / below.tokens)
        return Prediction(exp((1 - along) * log(below.median_us) + along * log(point.median_us)), point.source)

    def _serving(self, tokens: int) -> Point | None:
        """The nearest point at or above ``tokens``, if within reach. Above all points, the last one, if the backend
        itself would choose the same configuration there."""
        above = next((p for p in self.points if p.tokens >= tokens), None)
        if above is not None:
            return above if above.tokens <= _REACH * tokens else None
        if not self.points:
            return None
        last = self.points[-1]
        return last if self._own(last.tokens) == self._own(tokens) else None

    def _own(self, tokens: int) -> Config:
        return self.backend.configure(self.problem, self.machine, tokens)


def _source(row: Measured, triton: str | None) -> str:
    then, now = minor_version(row.triton), minor_version(triton)
    return "measured" if then == now or then is None else f"measured with triton {then}, not {now or 'none'}"


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text)
