"""Timing: several different calls are timed together, so that weights come from memory and not from a cache.

On a GPU the calls are captured in one CUDA graph, where the backend allows it, and the graph is replayed back to back.
Everything else is timed call by call, including its launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

_WARM_UP, _REPEATS, _AT_LEAST = 3, 15, 3
_SECONDS = 2.0  # for calls timed one by one


def distinct_calls(tokens: int) -> int:
    """How many routings are timed together: 8 up to 512 tokens, 2 above, where one call reads every expert."""
    return 8 if tokens <= 512 else 2


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: median and quartiles over graph replays or over single calls."""

    median_us: float
    p25_us: float
    p75_us: float
    by: Literal["graph", "calls"]

    @classmethod
    def of(cls, samples_us: Sequence[float], by: Literal["graph", "calls"]) -> Timing:
        """Compute interpolated quartiles of the samples."""
        quartiles = torch.tensor(samples_us, dtype=torch.float64).quantile(
            torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)
        )
        return cls(*map(float, quartiles), by=by)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class TimedCalls:
    """Different calls that are run in order and timed together, as one CUDA graph if ``graph``. The constructor warms
    up: it compiles and allocates. A GPU is torch's current device."""

    def __init__(self, calls: Sequence[Callable[[], None]], device: torch.device, *, graph: bool) -> None:
        self.calls, self.device = calls, device
        self._graph: torch.cuda.CUDAGraph | None = None
        for _ in range(_WARM_UP if device.type == "cuda" else 1):
            calls[0]()
        if graph and device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self()
            torch.cuda.current_stream().wait_stream(stream)
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                self()
            self._graph = captured

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            for call in self.calls:
                call()

    def time(self, repeats: int = _REPEATS, *, rest_seconds: float = 0.0) -> Timing:
        """Time of one call, from ``repeats`` replays of the graph or at most as many single calls.

        A GPU first rests for ``rest_seconds``: after work at its power limit its clocks stay low for a while.
        """
        if self.device.type == "cuda" and rest_seconds:
            synchronize(self.device)
            time.sleep(rest_seconds)
        if self._graph is None:
            return self._time_calls(repeats)
        for _ in range(min(_WARM_UP, repeats)):
            self()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        # Queued without waiting: the launch of a replay is hidden behind the one before it.
        for start, end in events:
            start.record()
            self()
            end.record()
        torch.cuda.synchronize()
        return Timing.of([1e3 * start.elapsed_time(end) / len(self.calls) for start, end in events], "graph")

    def _time_calls(self, repeats: int) -> Timing:
        samples: list[float] = []
        synchronize(self.device)
        began = time.perf_counter()
        while len(samples) < _AT_LEAST or (len(samples) < repeats and time.perf_counter() - began < _SECONDS):
            start = time.perf_counter()
            self.calls[len(samples) % len(self.calls)]()
            synchronize(self.device)
            samples.append(1e6 * (time.perf_counter() - start))
        return Timing.of(samples, "calls")

    def sustain(self, seconds: float) -> int:
        """Run for that long and return the number of calls."""
        began, rounds = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            self()
            synchronize(self.device)
            rounds += 1
        return rounds * len(self.calls)

    def trace(self, path: Path) -> None:
        """Write a profiler trace of all calls once, for chrome://tracing or Perfetto."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])
        with profile(activities=activities, acc_events=True) as profiler:
            self()
            synchronize(self.device)
        profiler.export_chrome_trace(str(path))
