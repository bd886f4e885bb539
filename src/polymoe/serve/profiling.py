"""Profiler of a running server: ``POST /start_profile`` and ``/stop_profile``, as vLLM and SGLang have them.

They are there only where the server was started with a directory for traces, which no request can change.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from polymoe.errors import ArgumentError

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["add_profiler", "check_directory"]


def check_directory(directory: Path) -> None:
    """Make the directory for traces if need be.

    Raises:
        ArgumentError: if it cannot be made or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError("--profile", expected="a directory for traces", got=str(error)) from error
    if not os.access(directory, os.W_OK):
        raise ArgumentError("--profile", expected="a directory for traces", got=f"{directory}: may not be written to")


def add_profiler(app: FastAPI, directory: Path) -> None:
    """Give ``app`` the two endpoints.

    ``/start_profile`` answers 200, or 409 while a profile runs. ``/stop_profile`` answers ``{"trace": path}`` once the
    trace of everything since, on every thread and GPU, is written; 409 if none runs. Traces are Chrome's JSON, gzipped,
    for https://ui.perfetto.dev.
    """
    from fastapi import HTTPException

    from polymoe.serve.requests import error_body

    running: list[Any] = []

    def conflict(message: str) -> HTTPException:
        return HTTPException(409, detail=error_body(message))

    async def start_profile() -> dict[str, str]:
        if running:
            raise conflict("a profile runs already")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        # Generation has a thread of its own; without the option only this one would be in the trace.
        profiler = profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))
        profiler.start()
        running.append(profiler)
        return {"status": "started"}

    async def stop_profile() -> dict[str, str]:
        if not running:
            raise conflict("no profile runs")
        profiler = running.pop()
        profiler.stop()  # by the thread that started it
        name = f"polymoe-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}.json.gz"
        await asyncio.to_thread(_write, profiler, directory, name)
        return {"trace": str(directory / name)}

    app.add_api_route("/start_profile", start_profile, methods=["POST"])
    app.add_api_route("/stop_profile", stop_profile, methods=["POST"])


def _write(profiler: Any, directory: Path, name: str) -> None:
    draft = directory / f".{name}"  # its ending says that it is to be gzipped
    try:
        profiler.export_chrome_trace(str(draft))
        draft.replace(directory / name)
    finally:
        draft.unlink(missing_ok=True)
