"""Runners that tests alter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polymoe.backends.base import Runner, RunnerBase
from polymoe.backends.config import Config
from polymoe.problem.routing import Routing


@dataclass
class Followed(RunnerBase):
    """Runs ``runner``, then gives ``then`` the call's x, configuration and result."""

    runner: Runner
    then: Callable[[Tensor, Any, Tensor], object]

    def run(self, x_TH: Tensor, routing: Routing, config: Config, out_TH: Tensor, **_: object) -> None:
        self.runner.run(x_TH, routing, config, out_TH)
        self.then(x_TH, config, out_TH)
