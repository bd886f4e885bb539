"""Formulas on answers whose times are known to the digit."""

from __future__ import annotations

import pytest

from polymoe.bench.serving.client import TimedAnswer
from polymoe.bench.serving.measures import (
    Percentiles,
    at_once,
    cost_per_million,
    decode_rate,
    first_tokens_us,
    gaps_us,
    latencies_us,
    time_per_token_us,
)


def steady(sent: float, first: float, gap: float, tokens: int, *, bundle: int = 1) -> TimedAnswer:
    """``tokens`` tokens, ``bundle`` in each piece, ``gap`` seconds a token."""
    chunks = [first + gap * i for i in range(0, tokens, bundle)]
    ended = first + gap * (tokens - 1)
    return TimedAnswer(sent=sent, ended=ended, chunks=chunks, prompt_tokens=100, completion_tokens=tokens)


def test_a_batch_in_step() -> None:
    """Four answers of 11 tokens, a second to the first, 50 ms a token."""
    batch = [steady(0.0, 1.0, 0.05, 11) for _ in range(4)]
    assert latencies_us(batch) == pytest.approx([1.5e6] * 4)
    assert first_tokens_us(batch) == pytest.approx([1e6] * 4)
    assert gaps_us(batch) == pytest.approx([5e4] * 40)
    assert time_per_token_us(batch) == pytest.approx(5e4)
    # 10 steps of 4 tokens in half a second, and as in SGLang's table ITL = B / rate.
    assert decode_rate(batch) == pytest.approx(80.0)
    assert time_per_token_us(batch) == pytest.approx(1e6 * 4 / 80.0)
    assert at_once(batch) == 4


def test_tokens_before_the_last_first_token_are_not_of_the_decode_phase() -> None:
    """One decodes from 1 s, the other from 2 s; both at 10 tokens a second, to 3 s."""
    batch = [steady(0.0, 1.0, 0.1, 21), steady(0.0, 2.0, 0.1, 11)]
    assert decode_rate(batch) == pytest.approx(20.0)
    # All tokens over that second, as SGLang's table has it, would be 32.


def test_a_server_that_answers_one_by_one() -> None:
    batch = [steady(0.0, 1.0 + i, 0.09, 11) for i in range(3)]
    assert at_once(batch) == 1
    assert decode_rate(batch) == pytest.approx(10 / 0.9)  # what one answer gets, not three


def test_several_tokens_a_piece() -> None:
    bundled = [steady(0.0, 1.0, 0.01, 100, bundle=4)]
    assert gaps_us(bundled) == pytest.approx([4e4] * 24)
    assert time_per_token_us(bundled) == pytest.approx(1e4)
    assert decode_rate(bundled) == pytest.approx(96 / 0.99)


def test_the_mean_is_over_tokens_not_over_answers() -> None:
    long, short = steady(0.0, 1.0, 0.01, 101), steady(0.0, 1.0, 0.1, 2)
    assert time_per_token_us([long, short]) == pytest.approx(1e6 * (1.0 + 0.1) / 101)


def test_answers_of_one_token_have_no_rate_of_decoding() -> None:
    single = [steady(0.0, 1.0, 0.1, 1), steady(0.0, 1.2, 0.1, 1)]
    assert (time_per_token_us(single), decode_rate(single), at_once(single), gaps_us(single)) == (None, None, None, [])


def test_percentiles_are_linear_between_neighbours() -> None:
    assert Percentiles.of([]) is None
    percentiles = Percentiles.of([float(i) for i in range(101)])
    assert percentiles == Percentiles(50.0, 50.0, 90.0, 99.0, 100.0)
    assert Percentiles.of([1.0, 2.0], mean=7.0) == Percentiles(7.0, 1.5, 1.9, pytest.approx(1.99), 2.0)


def test_cost() -> None:
    """A GPU at $3.60 an hour is $0.001 a second: at 1,000 tokens a second a million takes 1,000 s, a dollar."""
    assert cost_per_million(1000.0, 3.6) == pytest.approx(1.0)
    assert cost_per_million(1000.0, 0.0) == 0.0
    assert cost_per_million(None, 3.6) is cost_per_million(1000.0, None) is cost_per_million(0.0, 3.6) is None
