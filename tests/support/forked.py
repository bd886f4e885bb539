"""Functions in processes of their own, at the same time, without the seconds that a new interpreter takes to import."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable

import pytest

SECONDS = 60


def exit_codes(*functions: Callable[[], object]) -> list[int | None]:
    """Call each function in a fork of this process, once all have started; exit codes, which are 1 after an
    exception."""
    if not hasattr(os, "fork"):
        pytest.skip("no forks here")
    context = multiprocessing.get_context("fork")
    started = context.Barrier(len(functions))

    def run(function: Callable[[], object]) -> None:
        started.wait(SECONDS)
        function()

    running = [context.Process(target=run, args=(function,)) for function in functions]
    for process in running:
        process.start()
    for process in running:
        process.join(SECONDS)
    return [process.exitcode for process in running]
