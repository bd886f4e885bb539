"""Compile kernels in other processes before they are timed; results reach this process through caches on disk.

A process that fails or cannot be started only costs time, because timing compiles whatever is missing.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context

import torch

from polymoe.backends.base import Backend
from polymoe.backends.config import Config
from polymoe.formats import QuantTensor
from polymoe.layouts import LAYOUTS, Packed
from polymoe.problem import Problem
from polymoe.problem.call import CallArguments
from polymoe.problem.routing import Routing
from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights

_META = torch.device("meta")


class CompileAhead:
    """Up to ``jobs`` processes (0: none) that compile for the GPU with index ``device``, in order of submission."""

    def __init__(self, jobs: int, device: int = 0) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._found: dict[tuple[str, str, int, Config], Future[None]] = {}
        if jobs > 0:
            self._pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_begin, initargs=(device,))

    def submit(self, backend: Backend, layout: str, problem: Problem, tokens: int, configs: Iterable[Config]) -> None:
        """Compile what calls with ``tokens`` tokens need with each of ``configs``, unless submitted before."""
        for config in configs:
            key = (backend.name, str(problem), tokens, config)
            if self._pool is None or key in self._found:
                continue
            try:
                self._found[key] = self._pool.submit(compile_one, backend, layout, problem, tokens, config)
            except (BrokenProcessPool, OSError):
                self._pool = None

    def first_ready(
        self, backend: Backend, problem: Problem, tokens: int, configs: Sequence[Config], seconds: float
    ) -> Config:
        """Return the first of ``configs`` that is compiled, failed to compile, or was not submitted. If there is none
        within ``seconds``, return the first one."""
        futures = {c: self._found.get((backend.name, str(problem), tokens, c)) for c in configs}
        waiting = [future for future in futures.values() if future is not None and not future.done()]
        if len(waiting) == len(configs):
            wait(waiting, max(0.0, seconds), FIRST_COMPLETED)
        return next((c for c, future in futures.items() if future is None or future.done()), configs[0])

    def wait_for_all(self, seconds: float) -> None:
        """Wait until everything is compiled, for at most ``seconds``."""
        end = time.monotonic() + seconds
        for future in list(self._found.values()):
            wait([future], max(0.0, end - time.monotonic()))

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _begin(device: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent process
    torch.set_num_threads(1)
    if sys.platform != "win32":
        os.nice(5)  # timed launches have priority
    if device:
        torch.cuda.set_device(device)


def compile_one(backend: Backend, layout: str, problem: Problem, tokens: int, config: Config) -> None:
    """Compile what one call needs, with tensors on the meta device."""
    x_TH = torch.empty(tokens, problem.spec.hidden, dtype=torch.bfloat16, device=_META)
    routing = Routing(
        torch.empty(tokens, problem.top_k, dtype=torch.int64, device=_META),
        torch.empty(tokens, problem.top_k, dtype=torch.float32, device=_META),
    )
    packed = _packed(problem.spec, problem.activations.static, layout)
    backend.compile(problem, packed, CallArguments(x_TH, *routing, torch.empty_like(x_TH)), config)


@cache
def _packed(spec: ExpertsSpec, input_scales: bool, layout: str) -> Packed:
    parts: dict[str, object] = {
        p: QuantTensor.empty(encoding, *spec.matrix_shape(p), _META) for p, encoding in spec.encodings.items()
    }
    for p in spec.encodings if spec.bias else ():
        parts[f"{p}_bias"] = torch.empty(spec.matrix_shape(p)[0], dtype=torch.bfloat16, device=_META)
    if input_scales:
        parts |= {n: torch.empty((), device=_META) for n in ("gate_up_input_scale", "down_input_scale")}
    expert = Expert(**{"gate": None, **parts})  # type: ignore[arg-type]
    return LAYOUTS[layout].pack(ExpertWeights(spec, lambda e: expert), _META)
