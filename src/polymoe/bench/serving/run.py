"""Run a server benchmark: warm up, send, observe and record one row after the other."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from polymoe.bench.energy import EnergyMeter
from polymoe.bench.serving.client import Client, Request, TimedAnswer
from polymoe.bench.serving.loads import at_rate, one_batch, with_concurrency
from polymoe.bench.serving.measures import count_tokens
from polymoe.bench.serving.observe import acceptance_length, cache_hit_rate, metrics, profiled
from polymoe.bench.serving.prompts import Prompts, Tokenizer
from polymoe.bench.serving.record import Load, Origin, ServingRecord, Surroundings, record
from polymoe.errors import ArgumentError, ServerError

__all__ = ["ServingBench", "rows"]

_WARM_INPUT, _WARM_OUTPUT = 1024, 8
_PROFILED_OUTPUT = 8  # tokens: a trace of a whole answer is too large to open


def rows(
    mode: str, loads: Sequence[float], input_lens: Sequence[int], output_lens: Sequence[int], requests: int | None
) -> list[Load]:
    """Return every combination, ordered by input and output length. ``requests`` of None means five times the
    concurrency, or one minute of the rate, at least 20; for a batch it is the batch size."""
    found = []
    for input_len, output_len, load in itertools.product(input_lens, output_lens, loads):
        if mode == "batch":
            number = int(load)
        else:
            number = requests or max(20, round(5 * load if mode == "concurrency" else 60 * load))
        found.append(Load(mode=mode, load=load, requests=number, input_len=input_len, output_len=output_len))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBench:
    """Runs rows against one server.

    Attributes:
        client: after :meth:`Client.settle`.
        prompts: after :meth:`Prompts.calibrate`.
        origin: the fields that all records share.
        tokenizer: counts answers if the server does not.
        meter: measures the energy of the server's GPUs.
        warm: send a small row of the same kind before each new load, without measuring it.
        profile: repeat a short copy of each row under the server's profiler.
        say: called with a line of progress.
    """

    client: Client
    prompts: Prompts
    origin: Origin
    tokenizer: Tokenizer | None = None
    meter: EnergyMeter | None = None
    warm: bool = True
    profile: bool = False
    say: Callable[[str], None] = lambda text: None

    async def run(
        self,
        loads: Sequence[Load],
        on_record: Callable[[ServingRecord], None],
        on_trace: Callable[[Load, str], None] = lambda load, said: None,
    ) -> None:
        """Run the rows in order; ``on_record`` gets each record when it is finished.

        Raises:
            ArgumentError: for a row that is longer than the server's model takes, before anything is measured.
            ServerError: if the server could not be reached during a whole row, answers 400, or cannot profile.
        """
        most = self.client.model.max_tokens
        for load in loads:
            if most is not None and load.input_len + load.output_len > most:
                got = f"{load.input_len} and --output-len {load.output_len}"
                raise ArgumentError(
                    "input_len", expected=f"prompt and answer of at most {most} tokens, the server's limit", got=got
                )
        warmed: set[float] = set()
        for load in loads:
            if self.warm and load.load not in warmed:
                warmed.add(load.load)
                await self._warm(load)
            answers, found = await self._row(load)
            on_record(found)
            if answers and not any(a.status for a in answers):
                raise ServerError(self.client.server.base_url, expected="answers", got=answers[0].error)
            if self.profile and found.answered:
                on_trace(load, await self._profile(load))

    async def _warm(self, load: Load) -> None:
        self.say(f"{load}: warming up")
        number = 1 if load.mode == "rate" else min(int(load.load), load.requests)
        await self._short(load, number, min(load.output_len, _WARM_OUTPUT), min(load.input_len, _WARM_INPUT))

    async def _profile(self, load: Load) -> str:
        self.say(f"{load}: under the profiler")
        number = int(load.load) if load.mode == "batch" else min(load.requests, 8)
        output_len = min(load.output_len, _PROFILED_OUTPUT)
        return await profiled(self.client, lambda: self._short(load, number, output_len, load.input_len))

    async def _short(self, load: Load, number: int, output_len: int, input_len: int) -> None:
        prompts, _ = await self.prompts.make(input_len, number)
        await one_batch(self.client.ask, [self.client.prepare(p, output_len) for p in prompts])

    async def _row(self, load: Load) -> tuple[list[TimedAnswer], ServingRecord]:
        self.say(f"{load}: making prompts")
        prompts, prompt_tokens = await self.prompts.make(load.input_len, load.requests)
        requests = [self.client.prepare(prompt, load.output_len) for prompt in prompts]
        before = await metrics(self.client)
        with _no_collection():
            joules = self.meter.joules() if self.meter else 0.0
            wall, cpu = time.perf_counter(), time.process_time()
            answers = await self._send(load, requests)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            joules = self.meter.joules() - joules if self.meter else None
        after = await metrics(self.client)
        count_text = self.tokenizer.count_text if self.tokenizer else None
        whole = [count_tokens(a, prompt_tokens, count_text) for a in answers if a.error is None]
        seen = Surroundings(
            acceptance_length=await acceptance_length(self.client, before, after),
            cache_hit_rate=cache_hit_rate(whole, before, after),
            joules=joules,
            client_load=cpu / wall,
        )
        return answers, record(
            load, self.origin, answers, prompt_tokens=prompt_tokens, count_text=count_text, seen=seen
        )

    async def _send(self, load: Load, requests: Sequence[Request]) -> list[TimedAnswer]:
        done = itertools.count(1)

        async def ask(request: Request) -> TimedAnswer:
            answer = await self.client.ask(request)
            if answer.status == 400:  # so will all others of this row be
                raise ServerError(self.client.server.base_url, expected="answers", got=answer.error)
            self.say(f"{load}: {next(done)} of {len(requests)}")
            return answer

        self.say(f"{load}: 0 of {len(requests)}")
        sent: Awaitable[list[TimedAnswer]]
        if load.mode == "batch":
            sent = one_batch(ask, requests)
        elif load.mode == "concurrency":
            sent = with_concurrency(ask, requests, int(load.load))
        else:
            sent = at_rate(ask, requests, load.load, self.origin.seed)
        return await sent


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
