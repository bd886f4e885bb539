"""Formulas: what the arrival times of answers say about a server.

Where tables of the field agree, so do these. Sources, with what differs said at each:

- one batch: https://github.com/sgl-project/sglang ``bench_one_batch_server``
- many requests: https://github.com/vllm-project/vllm ``vllm bench serve``, and NVIDIA's definitions of TTFT and ITL,
  https://docs.nvidia.com/nim/benchmarking/llm/latest/metrics.html

All of them take answers that are whole; a request that failed or was refused is counted elsewhere and measured nowhere.
Times are in seconds unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from polymoe.bench.serving.answers import Answer

__all__ = [
    "Counted",
    "Percentiles",
    "at_once",
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
    """How times are distributed: mean, percentiles (linear between neighbours) and largest, in microseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, times_us: Sequence[float], mean: float | None = None) -> Percentiles | None:
        """Of these times, None of none; ``mean`` where theirs is not the one meant."""
        if not times_us:
            return None
        p50, p90, p99 = (float(p) for p in np.percentile(times_us, (50, 90, 99)))
        return cls(float(np.mean(times_us)) if mean is None else mean, p50, p90, p99, float(max(times_us)))


@dataclass(frozen=True, slots=True)
class Counted:
    """One whole answer with its tokens counted.

    Attributes:
        answer: when its pieces came.
        input_tokens, output_tokens: of its prompt and of itself.
        by: who counted its output: "usage" (the server), "tokenizer", or "chunks" (one a piece, a lower bound).
    """

    answer: Answer
    input_tokens: int
    output_tokens: int
    by: str

    @property
    def first(self) -> float:
        """When the first piece came."""
        return self.answer.chunks[0]

    @property
    def last(self) -> float:
        """When the last token was there: at the end, since the last ones may have no text, as an end token has none."""
        return self.answer.ended


def count_tokens(answer: Answer, expected_input: int, count_text: Callable[[str], int] | None) -> Counted:
    """Tokens of an answer: by its usage; where a server sends none, the prompt's wanted length, and the text's tokens
    by a tokenizer or else by its pieces."""
    sent = answer.prompt_tokens
    prompt = expected_input if sent is None else sent
    if answer.completion_tokens is not None:
        return Counted(answer, prompt, answer.completion_tokens, "usage")
    if count_text is not None:
        return Counted(answer, prompt, count_text(answer.text), "tokenizer")
    return Counted(answer, prompt, len(answer.chunks), "chunks")


def latencies_us(answers: Sequence[Counted]) -> list[float]:
    """Of each request: from sending it to the end of its answer (E2EL)."""
    return [1e6 * (a.answer.ended - a.answer.sent) for a in answers]


def first_tokens_us(answers: Sequence[Counted]) -> list[float]:
    """Of each request that was streamed: from sending it to its first piece (TTFT)."""
    return [1e6 * (a.first - a.answer.sent) for a in answers if a.answer.streamed]


def gaps_us(answers: Sequence[Counted]) -> list[float]:
    """Between each piece and the next of the same answer: what a reader waits. vLLM's ITL.

    A server may send several tokens in a piece (speculative decoding, or bundling); a gap then holds several.
    """
    return [1e6 * gap for a in answers for gap in np.diff(a.answer.chunks).tolist()]


def time_per_token_us(answers: Sequence[Counted]) -> float | None:
    """Inter-token latency as a mean over tokens: all answers' time from first piece to end, over their tokens but the
    first. ``sum(end - first) / sum(n - 1)``: vLLM's TPOT, each answer weighted by its tokens. None if none has two.

    Of a batch that decodes in step it is ``B / output tok/s``, as SGLang's table has it.
    """
    several = [a for a in answers if a.output_tokens > 1 and a.answer.streamed]
    tokens = sum(a.output_tokens - 1 for a in several)
    return 1e6 * sum(a.last - a.first for a in several) / tokens if tokens else None


def decode_rate(answers: Sequence[Counted]) -> float | None:
    """Output tokens a second of one batch once it decodes: those that came after the last request's first token, over
    the time from there to the end. None if nothing came after it.

    SGLang divides all tokens, ``B * output_len / (latency - last_ttft)``. In step that is more by one token in
    ``output_len``; where some decode while others still wait for their first token it is more by what they had got
    until then, and may exceed what the server ever did. Pieces of one answer count as equally long.
    """
    start = max(a.first for a in answers)
    end = max(a.last for a in answers)
    tokens = 0.0
    for a in answers:
        after = sum(chunk > start for chunk in a.answer.chunks)
        tokens += a.output_tokens * after / len(a.answer.chunks)
    return tokens / (end - start) if tokens else None


def at_once(answers: Sequence[Counted]) -> int | None:
    """The most answers under way at one time, from first piece to end; None where some came in one go.

    Fewer than the batch: the server did not run them together, whatever the batch size says.
    """
    if any(a.last - a.first < _AT_A_GO for a in answers):
        return None
    # At one instant those that end go before those that begin.
    events = sorted([(a.first, 1) for a in answers] + [(a.last, -1) for a in answers])
    return int(np.cumsum([step for _, step in events]).max())


def cost_per_million(tokens_per_second: float | None, dollars_per_hour: float | None) -> float | None:
    """Price of a million tokens: ``dollars_per_hour / 3600 / tokens_per_second * 1e6``; None without a rate or price.

    ``dollars_per_hour`` is for all GPUs of the server. SGLang's table takes 70 % of the input rate as what can be had
    in practice; here it is the rate that was measured.
    """
    if not tokens_per_second or dollars_per_hour is None:
        return None
    return dollars_per_hour / 3600 / tokens_per_second * 1e6
