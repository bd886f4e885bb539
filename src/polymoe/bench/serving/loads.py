"""Loads: the order and rate in which requests are sent. Each returns every answer, failed ones included, in order."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from polymoe.bench.serving.client import Request, TimedAnswer
from polymoe.common.openai_client import all_results

__all__ = ["Ask", "at_rate", "one_batch", "with_concurrency"]

Ask = Callable[[Request], Coroutine[Any, Any, TimedAnswer]]
"""Sends a request and reads its answer."""


async def one_batch(ask: Ask, requests: Sequence[Request]) -> list[TimedAnswer]:
    """Send all requests at once."""
    return await all_results(map(ask, requests))


async def with_concurrency(ask: Ask, requests: Sequence[Request], concurrency: int) -> list[TimedAnswer]:
    """Keep ``concurrency`` requests running: each finished one starts the next (a closed loop)."""
    answers: dict[int, TimedAnswer] = {}
    waiting = iter(enumerate(requests))

    async def client() -> None:
        for i, request in waiting:
            answers[i] = await ask(request)

    await all_results(client() for _ in range(concurrency))
    return [answers[i] for i in range(len(requests))]


async def at_rate(ask: Ask, requests: Sequence[Request], rate: float, seed: int) -> list[TimedAnswer]:
    """Send ``rate`` requests per second on average, independent of answers (an open loop): a Poisson process, whose
    gaps are exponentially distributed with mean ``1 / rate`` seconds. The first request is sent at once."""
    gaps, start = random.Random(seed), time.perf_counter()
    due_s = itertools.accumulate((gaps.expovariate(rate) for _ in requests[1:]), initial=0.0)

    async def at(due_s: float, request: Request) -> TimedAnswer:
        await asyncio.sleep(max(0.0, start + due_s - time.perf_counter()))
        return await ask(request)

    return await all_results(map(at, due_s, requests))
