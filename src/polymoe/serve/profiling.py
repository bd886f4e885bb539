"""Profiling of a running server: ``POST /start_profile`` and ``/stop_profile``, as in vLLM and SGLang.

The endpoints exist only if the server was started with a directory for traces; a request cannot change it.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, HTTPException
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from polymoe.errors import ArgumentError
from polymoe.serve.errors import error_body

__all__ = ["add_profiler", "check_directory"]


def check_directory(directory: Path) -> None:
    """Create the directory for traces if it does not exist.

    Raises:
        ArgumentError: if it cannot be created or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError("profile", expected="a directory for traces", got=str(error)) from error
    if not os.access(directory, os.W_OK):
        raise ArgumentError("profile", expected="a directory for traces", got=f"{directory}, which is not writable")


def add_profiler(app: FastAPI, directory: Path) -> None:
    """Add the two endpoints to ``app``.

    ``/start_profile`` answers 200, or 409 if a profile is running already. ``/stop_profile`` writes a trace of
    everything that happened since on every thread and GPU, then answers ``{"trace": path}``; 409 if no profile is
    running. A trace is gzipped JSON in Chrome's format, for https://ui.perfetto.dev.
    """
    running: list[Any] = []

    def conflict(message: str) -> HTTPException:
        return HTTPException(409, detail=error_body(message))

    async def start_profile() -> dict[str, str]:
        if running:
            raise conflict("a profile is already running")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        # Generation runs in a thread of its own; without the option the trace would hold this thread only.
        profiler = profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))
        profiler.start()
        running.append(profiler)
        return {"status": "started"}

    async def stop_profile() -> dict[str, str]:
        if not running:
            raise conflict("no profile is running")
        profiler = running.pop()
        profiler.stop()  # in the thread that started it
        name = f"polymoe-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}.json.gz"
        await asyncio.to_thread(_write, profiler, directory, name)
        return {"trace": str(directory / name)}

    app.add_api_route("/start_profile", start_profile, methods=["POST"])
    app.add_api_route("/stop_profile", stop_profile, methods=["POST"])


def _write(profiler: Any, directory: Path, name: str) -> None:
    draft = directory / f".{name}"  # the suffix makes torch compress it
    try:
        profiler.export_chrome_trace(str(draft))
        draft.replace(directory / name)
    finally:
        draft.unlink(missing_ok=True)
