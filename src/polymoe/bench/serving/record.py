"""Records of server benchmarks: one JSON line for each row of a table, computed from the answers to its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from polymoe.bench.records import utc_now
from polymoe.bench.serving.client import TimedAnswer
from polymoe.bench.serving.measures import (
    Percentiles,
    at_once,
    cache_hit_rate,
    cost_per_million,
    decode_rate,
    first_tokens_us,
    gaps_us,
    latencies_us,
    time_per_token_us,
)

_BUSY = 0.8  # of one core: above it, this client may be the bottleneck


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests of one row.

    Attributes:
        batch_size: number of requests, which are sent at once.
        input_len, output_len: tokens of each prompt, and the limit for each answer.
    """

    batch_size: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"batch size {self.batch_size}, input {self.input_len}, output {self.output_len}"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The fields that all records of one run share.

    Attributes:
        label: the server's name in tables.
        server, model, engine: its URL, its model's name and its own.
        device: its GPUs, if this machine knows them.
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


@dataclass(frozen=True, kw_only=True)
class ServingRecord(Origin, Load):
    """One row. Unknown values are None; all numbers are of completely answered requests.

    Attributes:
        answered, refused, failed: requests with a complete answer, with HTTP 429, and all others.
        errors: messages of refused and failed requests, each with its count.
        input_tokens, output_tokens: of all answers together, as the server counts them.
        tokens_per_chunk: output tokens per piece of the stream.
        duration_us: from the first request to the end of the last answer.
        latency_us, ttft_us, itl_us: over requests: their latency and time to first token; over tokens: mean
            inter-token latency, with the percentiles of gaps between pieces.
        input_tps, output_tps: tokens per second: input until the last first token, output from there on.
        at_once: largest number of answers running at one time.
        input_cost, output_cost: US dollars for a million tokens, at this batch's rates of each.
        cache_hit_rate: share of input tokens that the server found in its prefix cache.
        joules: energy of the GPUs over the whole duration.
        tokens_per_joule: output tokens for each joule, which is output tokens per second and watt.
        client_load: CPU seconds of this client per second; near 1, it may be the bottleneck.
        notes: remarks that matter when the row is compared with another.
        date: when it was computed.
    """

    answered: int
    refused: int
    failed: int
    errors: Mapping[str, int]
    input_tokens: int
    output_tokens: int
    tokens_per_chunk: float | None
    duration_us: float | None
    latency_us: Percentiles | None
    ttft_us: Percentiles | None
    itl_us: Percentiles | None
    input_tps: float | None
    output_tps: float | None
    at_once: int | None
    input_cost: float | None
    output_cost: float | None
    cache_hit_rate: float | None
    joules: float | None
    tokens_per_joule: float | None
    client_load: float
    notes: tuple[str, ...]
    date: str


def record(
    load: Load, origin: Origin, answers: Sequence[TimedAnswer], *, joules: float | None = None, client_load: float = 0.0
) -> ServingRecord:
    """Compute the record of one row from the answers to all its requests, including failures."""
    whole = [a for a in answers if a.error is None]
    refused = sum(a.refused for a in answers)
    errors = dict(Counter(a.error for a in answers if a.error is not None).most_common())
    duration = max(a.ended for a in whole) - min(a.sent for a in whole) if whole else None
    inputs, outputs = sum(a.prompt_tokens for a in whole), sum(a.completion_tokens for a in whole)
    chunks = sum(len(a.chunks) for a in whole)
    input_tps, output_tps = _rates(whole)
    hourly = None if origin.gpu_price is None else origin.gpu_price * origin.gpus
    gaps, mean_gap = gaps_us(whole), time_per_token_us(whole)
    together = at_once(whole) if whole else None
    return ServingRecord(
        **asdict(load),
        **asdict(origin),
        answered=len(whole),
        refused=refused,
        failed=len(answers) - len(whole) - refused,
        errors=errors,
        input_tokens=inputs,
        output_tokens=outputs,
        tokens_per_chunk=outputs / chunks if chunks else None,
        duration_us=None if duration is None else 1e6 * duration,
        latency_us=Percentiles.of(latencies_us(whole)),
        ttft_us=Percentiles.of(first_tokens_us(whole)),
        itl_us=None if mean_gap is None else Percentiles.of(gaps or [mean_gap], mean=mean_gap),
        input_tps=input_tps,
        output_tps=output_tps,
        at_once=together,
        input_cost=cost_per_million(input_tps, hourly),
        output_cost=cost_per_million(output_tps, hourly),
        cache_hit_rate=cache_hit_rate(whole),
        joules=joules,
        tokens_per_joule=outputs / joules if joules else None,
        client_load=client_load,
        notes=tuple(_notes(load, whole, together, client_load)),
        date=utc_now(),
    )


def _rates(whole: Sequence[TimedAnswer]) -> tuple[float | None, float | None]:
    if not whole:
        return None, None
    # SGLang's input rate: all prompts of the batch over the time until each has its first token.
    first_tokens = max(a.chunks[0] for a in whole) - min(a.sent for a in whole)
    return sum(a.prompt_tokens for a in whole) / first_tokens, decode_rate(whole)


def _notes(load: Load, whole: Sequence[TimedAnswer], together: int | None, client_load: float) -> Iterable[str]:
    if not whole:
        return
    inputs = sorted({a.prompt_tokens for a in whole})
    if inputs != [load.input_len]:
        yield f"prompts had {_range(inputs)} tokens, not {load.input_len}"
    outputs = sorted({a.completion_tokens for a in whole})
    if outputs != [load.output_len]:
        yield f"answers had {_range(outputs)} tokens, not {load.output_len}"
    if together is not None and together < len(whole):
        size = load.batch_size
        yield f"at most {together} of {len(whole)} answers ran at once: the server did not run a batch of {size}"
    tokens, chunks = sum(a.completion_tokens for a in whole), sum(len(a.chunks) for a in whole)
    if tokens > 1.1 * chunks:
        yield f"{tokens / chunks:.1f} tokens per piece: percentiles of ITL are of pieces, the mean is of tokens"
    if client_load > _BUSY:
        yield f"this client was busy {client_load:.0%} of the time: it may be the bottleneck"


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if values[0] == values[-1] else f"{values[0]} to {values[-1]}"
