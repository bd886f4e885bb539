"""Formulas: metrics of a server from the arrival times of answers.

They agree with the usual tables where those agree. Each formula names its differences from these sources:

- the table: https://github.com/sgl-project/sglang ``bench_one_batch_server``
- times of requests: https://github.com/vllm-project/vllm ``vllm bench serve``, and NVIDIA's definitions of TTFT and
  ITL, https://docs.nvidia.com/nim/benchmarking/llm/latest/metrics.html

All of them take complete answers; failed and refused requests are only counted, elsewhere.
Times are in seconds unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from polymoe.bench.serving.client import TimedAnswer

__all__ = [
    "Counted",
    "Percentiles",
    "at_once",
    "cache_hit_rate",
    "cost_per_million",
    "count_tokens",
    "decode_rate",
    "first_tokens_us",
    "gaps_us",
    "latencies_us",
    "time_per_token_us",
]


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


@dataclass(frozen=True, slots=True)
class Counted:
    """One complete answer and its token counts.

    Attributes:
        answer: the answer with its arrival times.
        input_tokens, output_tokens: tokens of the prompt and of the answer.
        by: source of the output count: "usage" (the server), "tokenizer", or "chunks" (one per piece, a lower bound).
    """

    answer: TimedAnswer
    input_tokens: int
    output_tokens: int
    by: str

    @property
    def first(self) -> float:
        """Arrival time of the first piece."""
        return self.answer.chunks[0]

    @property
    def last(self) -> float:
        """Arrival time of the last token: the end of the answer, since end tokens have no text."""
        return self.answer.ended


def count_tokens(answer: TimedAnswer, expected_input: int, count_text: Callable[[str], int] | None) -> Counted:
    """Count the tokens of an answer by its usage. Without usage, take the intended length of the prompt, and count the
    text with a tokenizer or else by its pieces."""
    sent = answer.prompt_tokens
    prompt = expected_input if sent is None else sent
    if answer.completion_tokens is not None:
        return Counted(answer, prompt, answer.completion_tokens, "usage")
    if count_text is not None:
        return Counted(answer, prompt, count_text(answer.text), "tokenizer")
    return Counted(answer, prompt, len(answer.chunks), "chunks")


def latencies_us(answers: Sequence[Counted]) -> list[float]:
    """Latency of each request: from sending it to the end of its answer (E2EL)."""
    return [1e6 * (a.answer.ended - a.answer.sent) for a in answers]


def first_tokens_us(answers: Sequence[Counted]) -> list[float]:
    """Time to first token of each streamed request: from sending it to its first piece (TTFT)."""
    return [1e6 * (a.first - a.answer.sent) for a in answers if a.answer.streamed]


def gaps_us(answers: Sequence[Counted]) -> list[float]:
    """Gaps between successive pieces of the same answer, as a reader sees them. vLLM's ITL.

    With speculative decoding or bundling, a piece may contain several tokens; a gap then covers all of them.
    """
    return [1e6 * gap for a in answers for gap in np.diff(a.answer.chunks).tolist()]


def time_per_token_us(answers: Sequence[Counted]) -> float | None:
    """Inter-token latency as a mean over tokens, ``sum(end - first) / sum(n - 1)`` over answers of n tokens: vLLM's
    TPOT with each answer weighted by its tokens. None if no answer has two tokens.

    For a batch that decodes in step it is ``B / output tok/s``, as in SGLang's table.
    """
    several = [a for a in answers if a.output_tokens > 1 and a.answer.streamed]
    tokens = sum(a.output_tokens - 1 for a in several)
    return 1e6 * sum(a.last - a.first for a in several) / tokens if tokens else None


def decode_rate(answers: Sequence[Counted]) -> float | None:
    """Output tokens per second of one batch while it decodes: tokens after the last request's first token, over the
    time from there to the end. None if no token arrived after it.

    SGLang divides all tokens, ``B * output_len / (latency - last_ttft)``. For a batch in step that is larger by one
    token in ``output_len``. If some requests decode while others still wait for their first token, it also counts the
    tokens they got until then, and can exceed the rate that the server ever had. Pieces of one answer count as equally
    long.
    """
    start = max(a.first for a in answers)
    end = max(a.last for a in answers)
    tokens = 0.0
    for a in answers:
        after = sum(chunk > start for chunk in a.answer.chunks)
        tokens += a.output_tokens * after / len(a.answer.chunks)
    return tokens / (end - start) if tokens else None


def at_once(answers: Sequence[Counted]) -> int | None:
    """Largest number of answers running at one time, from first piece to end; None if some were not streamed.

    If it is less than the batch size, the server did not run them together.
    """
    if any(a.last - a.first < _AT_A_GO for a in answers):
        return None
    # At the same instant, ends come before beginnings.
    events = sorted([(a.first, 1) for a in answers] + [(a.last, -1) for a in answers])
    return int(np.cumsum([step for _, step in events]).max())


def cache_hit_rate(answers: Sequence[Counted]) -> float | None:
    """Share of input tokens found in the server's prefix cache: ``cached_tokens`` in the usage of the answers; None if
    no answer has it."""
    cached = [a.answer.cached_tokens for a in answers if a.answer.cached_tokens is not None]
    total = sum(a.input_tokens for a in answers)
    return sum(cached) / total if cached and total else None


def cost_per_million(tokens_per_second: float | None, dollars_per_hour: float | None) -> float | None:
    """Price of a million tokens, ``dollars_per_hour / 3600 / tokens_per_second * 1e6``; None without a rate or price.

    ``dollars_per_hour`` is for all GPUs of the server. SGLang's table assumes 70 % of the input rate in practice; here
    it is the measured rate.
    """
    if not tokens_per_second or dollars_per_hour is None:
        return None
    return dollars_per_hour / 3600 / tokens_per_second * 1e6
