"""One backend's configuration and time at every token count: measured where a table says, else its own."""

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

__all__ = ["Point", "Predictor"]

_REACH = 4
"""A measured configuration serves token counts down to this part of its own: beyond, tiles are of another width."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measured token count: the configuration to use, its time, and what to say of it."""

    tokens: int
    config: Config
    median_us: float
    source: str


@dataclass(frozen=True, slots=True)
class Predictor:
    """A backend on a problem and a machine that it accepts, with what was measured of it, in ascending order."""

    backend: Backend
    problem: Problem
    machine: Machine
    points: tuple[Point, ...] = ()

    @classmethod
    def of(cls, backend: Backend, problem: Problem, machine: Machine, table: Table) -> Predictor:
        """With the table's points for this device and problem whose configurations the backend still has."""
        here = machine.packages.get("triton")
        points = []
        for row in table.points(machine.device.name, backend.name, problem, here):
            kind = type(backend.configure(problem, machine, row.tokens))
            try:
                config = kind.from_dict(row.config, f"measured configuration of {backend.name}")
            except PlanError as error:
                hint = f"it was tuned with polymoe {row.polymoe}; run again: {row.command}"
                _warn_once(str(PlanError(error.where, expected=error.expected, got=error.got, hint=hint)))
                continue
            points.append(Point(row.tokens, config, row.median_us, _source(row, here)))
        return cls(backend, problem, machine, tuple(points))

    @property
    def tunable(self) -> bool:
        """Whether there is something to choose that was not measured."""
        return not self.points and len(self.backend.tuning_configs(self.problem, self.machine, 16)) > 1

    def measured(self, tokens: int) -> bool:
        """Whether the time of ``tokens`` follows from a measurement at as many tokens or, within reach, more."""
        return bool(self.points) and tokens <= self.points[-1].tokens and self._serving(tokens) is not None

    def configure(self, tokens: int) -> Config:
        """The measured configuration that serves ``tokens``, else the backend's heuristic."""
        point = self._serving(tokens)
        return self.backend.configure(self.problem, self.machine, tokens) if point is None else point.config

    def predict(self, tokens: int) -> Prediction:
        """Time of one call: between two measured token counts on the line through both, in logarithms; beyond them the
        nearest one's, times what the cost model says that the difference in tokens makes."""
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
        """The nearest point at or above, within reach; above all, the last, if the backend would not change."""
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
