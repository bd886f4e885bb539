"""The worker that renders chat templates, as a fork of the process that needs it.

A new interpreter imports Transformers for a second, in most cases of a campaign. The fork runs the same program on what
is imported already.
"""

from __future__ import annotations

import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

__all__ = ["fork_workers"]


class _Worker:
    """What :mod:`polymoe.engines.transformers.chat_template` uses of a ``Popen``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            _work(theirs_in, theirs_out)
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin = open(ours_out, "w", encoding="utf-8")  # noqa: SIM115
        self.stdout = open(ours_in, encoding="utf-8")  # noqa: SIM115

    def kill(self) -> None:
        os.kill(self._process, signal.SIGKILL)  # no more than a zombie if it has ended

    def communicate(self) -> None:
        os.waitpid(self._process, 0)
        self.stdout.close()


def _work(requests: int, answers: int) -> None:
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_WRONLY)
        for number, file in enumerate((requests, answers, nothing)):
            os.dup2(file, number)
        os.closerange(3, 256)
        sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8")  # noqa: SIM115
        from polymoe.engines.chat_worker import main

        main()
    finally:
        os._exit(0)


def fork_workers() -> None:
    """From now on, this process forks where it would start an interpreter to render chat templates."""
    module = sys.modules.get("polymoe.engines.transformers.chat_template")
    if module is not None:
        module.subprocess = SimpleNamespace(Popen=_Worker, PIPE=None, DEVNULL=None)  # type: ignore[attr-defined]
