"""Loads: the order and rate in which requests are sent. Each returns every answer, failed ones included, in order."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from polymoe.bench.serving.client import Request, TimedAnswer

__all__ = ["Ask", "at_rate", "one_batch", "with_concurrency"]

_T = TypeVar("_T")

Ask = Callable[[Request], Coroutine[Any, Any, TimedAnswer]]
"""Sends a request and reads its answer."""


async def one_batch(ask: Ask, requests: Sequence[Request]) -> list[TimedAnswer]:
    """Send all requests at once."""
    return await _all([ask(request) for request in requests])


async def with_concurrency(ask: Ask, requests: Sequence[Request], concurrency: int) -> list[TimedAnswer]:
    """Keep ``concurrency`` requests running: each finished one starts the next (a closed loop)."""
    answers: dict[int, TimedAnswer] = {}
    waiting = iter(enumerate(requests))

    async def client() -> None:
        for i, request in waiting:
            answers[i] = await ask(request)

    await _all([client() for _ in range(concurrency)])
    return [answers[i] for i in range(len(requests))]


async def at_rate(ask: Ask, requests: Sequence[Request], rate: float, seed: int) -> list[TimedAnswer]:
    """Send ``rate`` requests per second on average, independent of answers (an open loop): a Poisson process, whose
    gaps are exponentially distributed with mean ``1 / rate`` seconds. The first request is sent at once."""
    gaps = random.Random(seed)
    due = time.perf_counter()
    async with _group() as start:
        tasks = []
        for request in requests:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(start(ask(request)))
            due += gaps.expovariate(rate)
        return await asyncio.gather(*tasks)


async def _all(work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    async with _group() as start:
        return await asyncio.gather(*map(start, work))


@asynccontextmanager
async def _group() -> AsyncIterator[Callable[[Coroutine[Any, Any, _T]], asyncio.Task[_T]]]:
    """Start tasks; where one of them raises, the others end."""
    tasks: list[asyncio.Task[_T]] = []

    def start(work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        tasks.append(asyncio.create_task(work))
        return tasks[-1]

    try:
        yield start
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
