"""A check before vLLM runs its model, from when new weights arrive in 16 bits."""

from __future__ import annotations

import functools
from typing import Any

from polymoe.engines.hooks import missing_hooks
from polymoe.engines.serving.refit import Updates
from polymoe.engines.vllm.hooks import RUN_HOOK
from polymoe.errors import UnsupportedProblem

_MARK = "polymoe"


def guard_model_runs(updates: Updates) -> None:
    """Make this process refuse to run a model, or its drafter, while an update of its experts has not ended.

    Args:
        updates: of all layers of the process.

    Raises:
        UnsupportedProblem: if this vLLM has no such place; nothing is changed then.
    """
    lacking = missing_hooks((RUN_HOOK,))
    if lacking:
        raise UnsupportedProblem("new weights in 16 bits", expected=f"vLLM with {RUN_HOOK}", got=f"no {lacking[0]}")
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # pyright: ignore

    theirs = WorkerWrapperBase.execute_model
    if hasattr(theirs, _MARK):
        return

    @functools.wraps(theirs)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(scheduler_output, "total_num_scheduled_tokens", 1):
            runner = self.worker.model_runner
            models: tuple[Any, ...] = (runner.get_model(), getattr(getattr(runner, "drafter", None), "model", None))
            for model in models:
                if hasattr(model, "modules"):  # other drafters than models have none
                    updates.require_whole(model.modules())
        return theirs(self, scheduler_output, *args, **kwargs)

    setattr(execute_model, _MARK, True)
    WorkerWrapperBase.execute_model = execute_model
