"""How time is taken: several different calls a turn, so that weights come from memory and not from a cache.

On a GPU the calls of a turn are one CUDA graph where the backend can be captured, replayed back to back; anything else
is timed call by call with the launches in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

__all__ = ["Timing", "Turn", "calls_per_turn"]

_WARM_UP, _REPEATS, _AT_LEAST = 3, 15, 3
_SECONDS = 2.0  # for calls timed one by one


def calls_per_turn(tokens: int) -> int:
    """Different routings that one turn runs through: 8 up to 512 tokens, 2 above, where one call reads it all."""
    return 8 if tokens <= 512 else 2


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: median and quartiles, over turns of a graph or over single calls."""

    median_us: float
    p25_us: float
    p75_us: float
    by: Literal["graph", "calls"]

    @classmethod
    def of(cls, samples_us: Sequence[float], by: Literal["graph", "calls"]) -> Timing:
        """Quartiles of the samples, interpolated."""
        quartiles = torch.tensor(samples_us, dtype=torch.float64).quantile(
            torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)
        )
        return cls(*map(float, quartiles), by=by)


class Turn:
    """All calls once, in order; captured where ``graph``. Warm when made: compiled and allocated. A GPU is torch's
    current one."""

    def __init__(self, calls: Sequence[Callable[[], None]], device: torch.device, *, graph: bool) -> None:
        self.calls, self.device = calls, device
        self._graph: torch.cuda.CUDAGraph | None = None
        for _ in range(_WARM_UP if device.type == "cuda" else 1):
            calls[0]()
        if graph and device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for call in calls:
                    call()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                for call in calls:
                    call()

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            for call in self.calls:
                call()

    def time(self, repeats: int = _REPEATS, *, rest_seconds: float = 0.0) -> Timing:
        """Time of one call, from ``repeats`` turns of a graph, or at most as many single calls.

        A GPU rests for ``rest_seconds`` first: at its power limit it lowers its clocks, also for what comes after.
        """
        if self.device.type == "cuda" and rest_seconds:
            self._wait()
            time.sleep(rest_seconds)
        if self._graph is None:
            return self._time_calls(repeats)
        for _ in range(min(_WARM_UP, repeats)):
            self()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        # Queued without waiting: behind a running turn the next one's launch takes no time of its own.
        for start, end in events:
            start.record()
            self()
            end.record()
        torch.cuda.synchronize()
        return Timing.of([1e3 * start.elapsed_time(end) / len(self.calls) for start, end in events], "graph")

    def _time_calls(self, repeats: int) -> Timing:
        samples: list[float] = []
        self._wait()
        began = time.perf_counter()
        while len(samples) < _AT_LEAST or (len(samples) < repeats and time.perf_counter() - began < _SECONDS):
            start = time.perf_counter()
            self.calls[len(samples) % len(self.calls)]()
            self._wait()
            samples.append(1e6 * (time.perf_counter() - start))
        return Timing.of(samples, "calls")

    def sustain(self, seconds: float) -> int:
        """Run turns for that long; returns how many calls that were."""
        began, turns = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            self()
            self._wait()
            turns += 1
        return turns * len(self.calls)

    def trace(self, path: Path) -> None:
        """Write a profiler trace of one turn, for chrome://tracing or Perfetto."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])
        with profile(activities=activities, acc_events=True) as profiler:
            self()
            self._wait()
        profiler.export_chrome_trace(str(path))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
