"""The backend protocol, and what backends share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from polymoe.backends.config import Config
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.routing import Routing
from polymoe.verdict import Accepted, Verdict

__all__ = ["Backend", "Prediction", "layouts_for"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected time of one call in microseconds, and where the number comes from: "cost model", or "measured" and with
    what, where that differs from here."""

    time_us: float
    source: str = "cost model"


class Backend(Protocol):
    """Runs experts packed in one of its ``layouts``.

    A check reads properties of the problem and the machine, never a model's or a format's name, and reports every
    reason. An exception inside a check is a bug and is not caught.
    """

    @property
    def name(self) -> str:
        """Name in ``BACKENDS``, in ``--backend`` and in records."""
        ...

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts it reads."""
        ...

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        """Whether it runs the problem on the machine."""
        ...

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> Config:
        """Its own choice for calls of ``tokens`` tokens, without any table; only for problems it accepts."""
        ...

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        """Time of a call of ``tokens`` tokens by its cost model; only for problems it accepts."""
        ...

    def candidates(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
    ) -> Sequence[Config]:
        """What tuning tries for calls of ``tokens`` tokens, the likeliest first, all of which fit the device.

        With ``timed``, every configuration that was right and its time in microseconds: what to try next. What was
        tried is not tried again, and tuning ends when nothing new comes.
        """
        ...

    def compile(
        self, problem: Problem, packed: Packed, x_TH: Tensor, routing: Routing, config: Config, out_TH: Tensor
    ) -> None:
        """Compile what :meth:`run` with such arguments launches, into a cache on disk where there is one. The tensors
        may be on the meta device; nothing is launched."""
        ...

    def run(
        self, problem: Problem, packed: Packed, x_TH: Tensor, routing: Routing, config: Config, out_TH: Tensor
    ) -> None:
        """Write this rank's weighted sum of the experts to ``out_TH`` [T, H], in x's dtype.

        ``routing`` holds ids [T, A] int32 or int64 and weights [T, A] float32; ids that are not of this rank's experts
        contribute exactly 0. T is at least 1 and at most what the verdict allows. Where the verdict says capturable:
        no synchronization, no allocation outside the graph's pool, no branch on tensor values.
        """
        ...


def layouts_for(backend: Backend, verdict: Verdict) -> tuple[str, ...]:
    """Layouts that serve what the verdict is about: all of the backend's, if it does not say which."""
    chosen = verdict.layouts if isinstance(verdict, Accepted) else None
    return backend.layouts if chosen is None else chosen
