"""Runners that tests alter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polymoe.backends.base import Runner, RunnerBase
from polymoe.backends.config import Config
from polymoe.problem.call import CallArguments


@dataclass
class Followed(RunnerBase):
    """Runs ``runner``, then gives ``then`` the call's x, configuration and result."""

    runner: Runner
    then: Callable[[Tensor, Any, Tensor], object]

    def run(self, call: CallArguments, config: Config) -> None:
        self.runner.run(call, config)
        self.then(call.x_TH, config, call.out_TH)
