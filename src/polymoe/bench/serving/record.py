"""Records of a server's bench: one JSON line for each row of a table, made of the answers to its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from polymoe.bench.records import read_lines, utc_now
from polymoe.bench.serving.answers import Answer
from polymoe.bench.serving.measures import (
    Counted,
    Percentiles,
    at_once,
    cost_per_million,
    count_tokens,
    decode_rate,
    first_tokens_us,
    gaps_us,
    latencies_us,
    time_per_token_us,
)

__all__ = ["LOADS", "Load", "Mode", "Origin", "ServingRecord", "Surroundings", "newest", "read", "record"]

Mode = Literal["batch", "concurrency", "rate"]
"""How requests are sent: all at once, so many at a time, so many a second."""

LOADS: Mapping[str, str] = {"batch": "batch size", "concurrency": "concurrency", "rate": "requests/s"}
"""What the load of each mode is called."""

_BUSY = 0.8  # of one core: from there on this client may be what is slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one row asks of a server.

    Attributes:
        mode, load: how requests are sent, and the batch size, concurrency or requests a second.
        requests: how many.
        input_len, output_len: tokens of each prompt, and of each answer at most.
    """

    mode: Mode
    load: float
    requests: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{LOADS[self.mode]} {self.load:g}, input {self.input_len}, output {self.output_len}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What all records of one run share.

    Attributes:
        label: the server's name in tables and plots.
        server, model, engine: its URL, and what it calls its model and itself.
        device: its GPUs, where this machine can tell.
        gpu_price, gpus: US dollars an hour for one GPU, or None, and how many GPUs it runs on.
        seed, commit, command: of this client.
    """

    label: str
    server: str
    model: str
    engine: str
    device: str | None
    gpu_price: float | None
    gpus: int
    seed: int
    commit: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What was seen around the requests; see :class:`ServingRecord`."""

    acceptance_length: float | None = None
    cache_hit_rate: float | None = None
    joules: float | None = None
    client_load: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRecord:
    """One row. What could not be measured is None; numbers are of the requests that were answered in full.

    Attributes:
        mode, load, requests, input_len, output_len: what was asked; see :class:`Load`.
        answered, refused, failed: requests with a whole answer, with HTTP 429, and all others.
        errors: messages of those refused and failed, each with its count.
        input_tokens, output_tokens: of all answers together, as ``counted_by`` "usage", "tokenizer" or "chunks".
        tokens_per_chunk: output tokens over pieces of the stream.
        duration_us: from the first request to the end of the last answer.
        latency_us, ttft_us, itl_us: over requests: their latency and time to first token; over tokens: mean
            inter-token latency, with the percentiles of gaps between pieces.
        input_tps, output_tps: tokens a second. Of a batch, input until the last first token, output from there on; of
            other modes, each over the whole duration.
        at_once: the most answers under way at one time.
        acceptance_length: tokens a step of speculative decoding.
        cache_hit_rate: share of input tokens found in the prefix cache.
        input_cost, output_cost: US dollars for a million tokens, at this batch's rates of each.
        total_cost: US dollars for a million tokens of both kinds together, over the whole duration.
        joules, tokens_per_joule: energy of the GPUs over the whole duration; output tokens for each joule, which is
            output tokens a second for each watt.
        client_load: CPU seconds of this client a second; near 1, it may be what is slow.
        notes: what a reader must know before comparing the row with another.
        label, server, model, engine, device, gpu_price, gpus, seed, commit, date, command: see :class:`Origin`.
    """

    mode: str
    load: float
    requests: int
    input_len: int
    output_len: int
    answered: int
    refused: int
    failed: int
    errors: Mapping[str, int]
    input_tokens: int
    output_tokens: int
    counted_by: str | None
    tokens_per_chunk: float | None
    duration_us: float | None
    latency_us: Percentiles | None
    ttft_us: Percentiles | None
    itl_us: Percentiles | None
    input_tps: float | None
    output_tps: float | None
    at_once: int | None
    acceptance_length: float | None
    cache_hit_rate: float | None
    input_cost: float | None
    output_cost: float | None
    total_cost: float | None
    joules: float | None
    tokens_per_joule: float | None
    client_load: float
    notes: tuple[str, ...]
    label: str
    server: str
    model: str
    engine: str
    device: str | None
    gpu_price: float | None
    gpus: int
    seed: int
    commit: str
    date: str
    command: str

    @property
    def asked(self) -> Load:
        """What the row asked of the server."""
        return Load(**{f.name: getattr(self, f.name) for f in fields(Load)})

    @property
    def series(self) -> tuple[str, str, str | None, str, int, int]:
        """Records that differ in nothing but load and time: one line of a plot."""
        return (self.label, self.model, self.device, self.mode, self.input_len, self.output_len)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServingRecord:
        """The inverse of :meth:`to_dict`."""
        percentiles = {name: Percentiles(**values[name]) for name in _PERCENTILES if values[name] is not None}
        return cls(**{**values, **percentiles, "notes": tuple(values["notes"])})


_PERCENTILES = ("latency_us", "ttft_us", "itl_us")


def record(
    load: Load,
    origin: Origin,
    answers: Sequence[Answer],
    *,
    prompt_tokens: int,
    count_text: Callable[[str], int] | None = None,
    seen: Surroundings | None = None,
) -> ServingRecord:
    """The record of one row's answers.

    Args:
        load, origin: what was asked, of whom.
        answers: to all requests, of whatever kind.
        prompt_tokens: of each prompt, where a server's usage does not say.
        count_text: counts an answer's tokens, where a server's usage does not.
        seen: what was seen around the requests.
    """
    seen = seen or Surroundings()
    whole = [count_tokens(a, prompt_tokens, count_text) for a in answers if a.error is None]
    refused = sum(a.refused for a in answers)
    errors = dict(Counter(a.error for a in answers if a.error is not None).most_common())
    duration = max(a.answer.ended for a in whole) - min(a.answer.sent for a in whole) if whole else None
    inputs, outputs = sum(a.input_tokens for a in whole), sum(a.output_tokens for a in whole)
    chunks = sum(len(a.answer.chunks) for a in whole)
    input_tps, output_tps = _rates(load, whole, duration)
    hourly = None if origin.gpu_price is None else origin.gpu_price * origin.gpus
    gaps, mean_gap = gaps_us(whole), time_per_token_us(whole)
    together = at_once(whole) if whole else None
    by = sorted({a.by for a in whole})
    return ServingRecord(
        **asdict(load),
        answered=len(whole),
        refused=refused,
        failed=len(answers) - len(whole) - refused,
        errors=errors,
        input_tokens=inputs,
        output_tokens=outputs,
        counted_by="+".join(by) or None,
        tokens_per_chunk=outputs / chunks if chunks else None,
        duration_us=None if duration is None else 1e6 * duration,
        latency_us=Percentiles.of(latencies_us(whole)),
        ttft_us=Percentiles.of(first_tokens_us(whole)),
        itl_us=None if mean_gap is None else Percentiles.of(gaps or [mean_gap], mean=mean_gap),
        input_tps=input_tps,
        output_tps=output_tps,
        at_once=together,
        acceptance_length=seen.acceptance_length,
        cache_hit_rate=seen.cache_hit_rate,
        input_cost=cost_per_million(input_tps, hourly) if load.mode == "batch" else None,
        output_cost=cost_per_million(output_tps, hourly) if load.mode == "batch" else None,
        total_cost=cost_per_million((inputs + outputs) / duration, hourly) if duration else None,
        joules=seen.joules,
        tokens_per_joule=outputs / seen.joules if seen.joules else None,
        client_load=seen.client_load,
        notes=tuple(_notes(load, whole, together, seen.client_load)),
        date=utc_now(),
        **asdict(origin),
    )


def _rates(load: Load, whole: Sequence[Counted], duration: float | None) -> tuple[float | None, float | None]:
    if not whole or not duration:
        return None, None
    inputs = sum(a.input_tokens for a in whole)
    if load.mode != "batch":
        return inputs / duration, sum(a.output_tokens for a in whole) / duration
    if not all(a.answer.streamed for a in whole):
        return None, None  # what was input and what output is not to be told apart
    # SGLang's input rate: the whole batch's prompts over the time until each has its first token.
    first_tokens = max(a.first for a in whole) - min(a.answer.sent for a in whole)
    return inputs / first_tokens, decode_rate(whole)


def _notes(load: Load, whole: Sequence[Counted], together: int | None, client_load: float) -> Iterable[str]:
    if not whole:
        return
    inputs = sorted({a.input_tokens for a in whole})
    if inputs != [load.input_len]:
        yield f"prompts had {_range(inputs)} tokens, not {load.input_len}"
    outputs = sorted({a.output_tokens for a in whole})
    if outputs != [load.output_len]:
        yield f"answers had {_range(outputs)} tokens, not {load.output_len}"
    if any(a.by == "chunks" for a in whole):
        yield "the server counts no tokens: output tokens are pieces of the stream, at least as many as these"
    if not all(a.answer.streamed for a in whole):
        yield "the server does not stream: when a token came is not known"
    if load.mode == "batch" and together is not None and together < len(whole):
        yield f"at most {together} of {len(whole)} answers were under way at once: this is no batch of {load.load:g}"
    tokens, chunks = sum(a.output_tokens for a in whole), sum(len(a.answer.chunks) for a in whole)
    if all(a.answer.streamed for a in whole) and tokens > 1.1 * chunks:
        yield f"{tokens / chunks:.1f} tokens a piece: percentiles of ITL are of pieces, the mean is of tokens"
    if client_load > _BUSY:
        yield f"this client was busy {client_load:.0%} of the time: it may be what is slow"


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def read(path: Path) -> list[ServingRecord]:
    """Every record of a file, in its order.

    Raises:
        ArgumentError: naming the line that is none.
    """
    names = {f.name for f in fields(ServingRecord)}
    return [ServingRecord.from_dict(values) for values in read_lines(path, names, "a record of bench serve")]


def newest(records: Iterable[ServingRecord]) -> list[ServingRecord]:
    """The newest record of each series and load, the later one where dates are the same."""
    best: dict[tuple[object, ...], ServingRecord] = {}
    for r in records:
        key = (*r.series, r.load)
        if key not in best or r.date >= best[key].date:
            best[key] = r
    return list(best.values())
