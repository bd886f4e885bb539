"""Formulas: metrics of a server from the arrival times of answers.

They agree with the usual tables where those agree. Each formula names its differences from these sources:

- the table: https://github.com/sgl-project/sglang ``bench_one_batch_server``
- times of requests: https://github.com/vllm-project/vllm ``vllm bench serve``, and NVIDIA's definitions of TTFT and
  ITL, https://docs.nvidia.com/nim/benchmarking/llm/latest/metrics.html

All of them take complete answers; failed and refused requests are only counted, elsewhere.
Times are in seconds unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polymoe.bench.serving.client import TimedAnswer

_AT_A_GO = 1e-3  # seconds


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Distribution of times: mean, percentiles (interpolated linearly) and maximum, in microseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, times_us: Sequence[float], mean: float | None = None) -> Percentiles | None:
        """Compute from times, None without any; ``mean`` replaces their own mean."""
        if not times_us:
            return None
        p50, p90, p99 = np.percentile(times_us, (50, 90, 99)).tolist()
        return cls(float(np.mean(times_us)) if mean is None else mean, p50, p90, p99, float(max(times_us)))


def latencies_us(answers: Sequence[TimedAnswer]) -> list[float]:
    """Latency of each request: from sending it to the end of its answer (E2EL)."""
    return [1e6 * (a.ended - a.sent) for a in answers]


def first_tokens_us(answers: Sequence[TimedAnswer]) -> list[float]:
    """Time to first token of each request: from sending it to its first piece (TTFT)."""
    return [1e6 * (a.chunks[0] - a.sent) for a in answers]


def gaps_us(answers: Sequence[TimedAnswer]) -> list[float]:
    """Gaps between successive pieces of the same answer, as a reader sees them. vLLM's ITL.

    With speculative decoding or bundling, a piece may contain several tokens; a gap then covers all of them.
    """
    return [1e6 * gap for a in answers for gap in np.diff(a.chunks).tolist()]


def time_per_token_us(answers: Sequence[TimedAnswer]) -> float | None:
    """Inter-token latency as a mean over tokens, ``sum(end - first) / sum(n - 1)`` over answers of n tokens: vLLM's
    TPOT with each answer weighted by its tokens. None if no answer has two tokens.

    For a batch that decodes in step it is ``B / output tok/s``, as in SGLang's table.
    """
    several = [a for a in answers if a.completion_tokens > 1]
    tokens = sum(a.completion_tokens - 1 for a in several)
    return 1e6 * sum(a.ended - a.chunks[0] for a in several) / tokens if tokens else None


def decode_rate(answers: Sequence[TimedAnswer]) -> float | None:
    """Output tokens per second of one batch while it decodes: tokens after the last request's first token, over the
    time from there to the end. None if no token arrived after it.

    SGLang divides all tokens, ``B * output_len / (latency - last_ttft)``. For a batch in step that is larger by one
    token in ``output_len``. If some requests decode while others still wait for their first token, it also counts the
    tokens they got until then, and can exceed the rate that the server ever had. Pieces of one answer count as equally
    long.
    """
    start = max(a.chunks[0] for a in answers)
    end = max(a.ended for a in answers)
    tokens = 0.0
    for a in answers:
        after = sum(chunk > start for chunk in a.chunks)
        tokens += a.completion_tokens * after / len(a.chunks)
    return tokens / (end - start) if tokens else None


def at_once(answers: Sequence[TimedAnswer]) -> int | None:
    """Largest number of answers running at one time, from first piece to end; None if the pieces of some came all at
    once.

    If it is less than the batch size, the server did not run them together.
    """
    if any(a.ended - a.chunks[0] < _AT_A_GO for a in answers):
        return None
    # At the same instant, ends come before beginnings.
    events = sorted([(a.chunks[0], 1) for a in answers] + [(a.ended, -1) for a in answers])
    return int(np.cumsum([step for _, step in events]).max())


def cache_hit_rate(answers: Sequence[TimedAnswer]) -> float | None:
    """Share of input tokens found in the server's prefix cache: ``cached_tokens`` in the usage of the answers; None if
    no answer has it."""
    cached = [a.cached_tokens for a in answers if a.cached_tokens is not None]
    total = sum(a.prompt_tokens for a in answers)
    return sum(cached) / total if cached and total else None


def cost_per_million(tokens_per_second: float | None, dollars_per_hour: float | None) -> float | None:
    """Price of a million tokens, ``dollars_per_hour / 3600 / tokens_per_second * 1e6``; None without a rate or price.

    ``dollars_per_hour`` is for all GPUs of the server. SGLang's table assumes 70 % of the input rate in practice; here
    it is the measured rate.
    """
    if not tokens_per_second or dollars_per_hour is None:
        return None
    return dollars_per_hour / 3600 / tokens_per_second * 1e6
