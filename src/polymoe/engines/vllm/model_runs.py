"""A check before vLLM runs its model, from when new weights arrive in 16 bits."""

from __future__ import annotations

from typing import Any

from polymoe.engines.hooks import missing_hooks, wrap
from polymoe.engines.serving.refit import Updates
from polymoe.engines.vllm.hooks import RUN_HOOK
from polymoe.errors import UnsupportedProblem


def guard_model_runs(updates: Updates) -> None:
    """Make this process refuse to run a model, or its drafter, while one of ``updates`` has not ended.

    Raises:
        UnsupportedProblem: if this vLLM has no such place; nothing is changed then.
    """
    lacking = missing_hooks((RUN_HOOK,))
    if lacking:
        raise UnsupportedProblem("new weights in 16 bits", expected=f"vLLM with {RUN_HOOK}", got=f"no {lacking[0]}")
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # pyright: ignore

    def execute_model(theirs: Any, worker: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(scheduler_output, "total_num_scheduled_tokens", 1):
            runner = worker.worker.model_runner
            models: tuple[Any, ...] = (runner.get_model(), getattr(getattr(runner, "drafter", None), "model", None))
            for model in models:
                if hasattr(model, "modules"):  # other drafters than models have none
                    updates.require_whole(model.modules())
        return theirs(worker, scheduler_output, *args, **kwargs)

    wrap(WorkerWrapperBase, "execute_model", execute_model)
