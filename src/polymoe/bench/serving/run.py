"""Run a server benchmark: warm up, send, observe and record one row after the other."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from polymoe.bench.energy import EnergyMeter
from polymoe.bench.serving.client import Client, TimedAnswer
from polymoe.bench.serving.prompts import Prompts
from polymoe.bench.serving.record import Load, Origin, ServingRecord, record
from polymoe.errors import ArgumentError, ServerError

_WARM_INPUT, _WARM_OUTPUT = 1024, 8


def rows(batch_sizes: Sequence[int], input_lens: Sequence[int], output_lens: Sequence[int]) -> list[Load]:
    """Return every combination, ordered by input and output length."""
    return [
        Load(batch_size=batch_size, input_len=input_len, output_len=output_len)
        for input_len, output_len, batch_size in itertools.product(input_lens, output_lens, batch_sizes)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBench:
    """Runs rows against one server.

    Attributes:
        client: after :meth:`Client.settle`.
        prompts: after :meth:`Prompts.calibrate`.
        origin: the fields that all records share.
        meter: measures the energy of the server's GPUs.
        warm: send a small batch before each new batch size, without measuring it.
        say: called with a line of progress.
    """

    client: Client
    prompts: Prompts
    origin: Origin
    meter: EnergyMeter | None = None
    warm: bool = True
    say: Callable[[str], None] = lambda text: None

    async def run(self, loads: Sequence[Load], on_record: Callable[[ServingRecord], None]) -> None:
        """Run the rows in order; ``on_record`` gets each record when it is finished.

        Raises:
            ArgumentError: for a row that is longer than the server's model takes, before anything is measured.
            ServerError: if the server could not be reached during a whole row, or answers 400.
        """
        most = self.client.max_tokens
        for load in loads:
            if most is not None and load.input_len + load.output_len > most:
                got = f"{load.input_len} and --output-len {load.output_len}"
                raise ArgumentError(
                    "input_len", expected=f"prompt and answer of at most {most} tokens, the server's limit", got=got
                )
        warmed: set[int] = set()
        for load in loads:
            if self.warm and load.batch_size not in warmed:
                warmed.add(load.batch_size)
                await self._warm(load)
            answers, found = await self._row(load)
            on_record(found)
            if answers and not any(a.status for a in answers):
                raise ServerError(self.client.server.base_url, expected="answers", got=answers[0].error)

    async def _warm(self, load: Load) -> None:
        self.say(f"{load}: warming up")
        prompts = await self.prompts.make(min(load.input_len, _WARM_INPUT), load.batch_size)
        output_len = min(load.output_len, _WARM_OUTPUT)
        await _all_results(self.client.ask(self.client.prepare(prompt, output_len)) for prompt in prompts)

    async def _row(self, load: Load) -> tuple[list[TimedAnswer], ServingRecord]:
        self.say(f"{load}: making prompts")
        prompts = await self.prompts.make(load.input_len, load.batch_size)
        requests = [self.client.prepare(prompt, load.output_len) for prompt in prompts]
        with _no_collection():
            joules = self.meter.joules() if self.meter else 0.0
            wall, cpu = time.perf_counter(), time.process_time()
            answers = await self._send(load, requests)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            joules = self.meter.joules() - joules if self.meter else None
        return answers, record(load, self.origin, answers, joules=joules, client_load=cpu / wall)

    async def _send(self, load: Load, requests: Sequence[bytes]) -> list[TimedAnswer]:
        done = itertools.count(1)

        async def ask(request: bytes) -> TimedAnswer:
            answer = await self.client.ask(request)
            if answer.status == 400:  # so will all others of this row be
                raise ServerError(self.client.server.base_url, expected="answers", got=answer.error)
            self.say(f"{load}: {next(done)} of {len(requests)}")
            return answer

        self.say(f"{load}: 0 of {len(requests)}")
        return await _all_results(map(ask, requests))


async def _all_results(work: Iterable[Coroutine[Any, Any, TimedAnswer]]) -> list[TimedAnswer]:
    """Run all at once and return their results, in order; where one of them raises, the others end."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection, which would distort arrival times."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
