"""Means, error bars and intervals, against values worked out by hand."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from polymoe.errors import ArgumentError
from polymoe.evaluate import scores
from polymoe.evaluate.records import AnswerRecord
from polymoe.evaluate.scores import compare, score, wilson
from support.evaluation import record


def run(*answers: str) -> list[AnswerRecord]:
    """One string a question, one character a repeat: 1 is right."""
    return [record(f"q{i}", r, right=c == "1") for i, question in enumerate(answers) for r, c in enumerate(question)]


def test_one_repeat() -> None:
    found = score(run("1", "1", "1", "0"))
    assert (found.questions, found.answers, found.repeats, found.correct) == (4, 4, 1, 3)
    assert found.pass_at_1 == 0.75
    assert found.standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 3))  # sqrt(p (1 - p) / (Q - 1))
    assert (found.repeat_std, found.repeat_standard_error) == (None, None)


def test_repeats() -> None:
    found = score(run("110", "100", "111", "000"))
    assert found.pass_at_1 == pytest.approx(6 / 12)
    by_question = [2 / 3, 1 / 3, 1, 0]
    assert found.standard_error == pytest.approx(statistics.stdev(by_question) / 2)
    assert found.repeat_std == pytest.approx(statistics.stdev([3 / 4, 2 / 4, 1 / 4]))
    assert found.repeat_standard_error == pytest.approx(0.25 / math.sqrt(3))


def test_a_repeat_that_is_not_complete_has_no_part_in_their_deviation() -> None:
    found = score([*run("10", "01"), record("q0", 2)])
    assert (found.answers, found.repeats, found.repeat_std) == (5, 2, 0)
    assert found.pass_at_1 == pytest.approx((2 / 3 + 1 / 2) / 2)


@pytest.mark.parametrize(("right", "low", "high"), [(10, 0.7225, 1.0), (9, 0.5958, 0.9821), (0, 0.0, 0.2775)])
def test_the_interval_is_wilsons(right: int, low: float, high: float) -> None:
    assert wilson(right / 10, 10) == pytest.approx((low, high), abs=1e-4)
    found = score(run(*("1" * right + "0" * (10 - right))))
    assert 0 <= found.low <= found.pass_at_1 <= found.high <= 1
    assert (found.low, found.high) == wilson(right / 10, 9 if right == 9 else 10)  # n - 1, as of the standard error


def test_a_single_question_has_no_error_bar() -> None:
    assert score(run("1")).standard_error is None
    with pytest.raises(ArgumentError):
        score([])


def test_invalid_and_cut_off() -> None:
    found = score([record("a", answer=None, right=False), record("b", finish_reason="length"), record("c")])
    assert (found.invalid, found.cut_off, found.correct) == (1, 1, 2)


def test_latency_and_rate_leave_out_the_time_between_two_sessions() -> None:
    second = 1_000_000
    spans = [(0, 4), (1, 3), (2, 6), (100, 101), (200, 203)]  # 6 + 1 + 3 seconds with a request under way
    records = [record(f"q{i}", latency_us=(b - a) * second, ended_us=b * second) for i, (a, b) in enumerate(spans)]
    found = score(records)
    assert found.output_tokens == 50
    assert found.output_tokens_per_s == pytest.approx(50 / 10)
    assert (found.latency_p50_us, found.latency_p90_us, found.latency_p99_us) == (3e6, 4e6, 4e6)


def test_a_server_that_counts_no_tokens() -> None:
    found = score([record("a", completion_tokens=None), record("b")])
    assert (found.output_tokens, found.output_tokens_per_s) == (None, None)


def test_compare_pairs_by_question() -> None:
    found = compare(run("1", "1", "1", "0", "0"), run("1", "0", "1", "0", "1"))
    differences = [0, 1, 0, 0, -1]
    assert (found.questions, found.a, found.b, found.better, found.worse) == (5, 0.6, 0.6, 1, 1)
    error = statistics.stdev(differences) / math.sqrt(5)
    assert found.standard_error == pytest.approx(error)
    assert found.high == pytest.approx(2.776445 * error, rel=1e-3)  # Student's t, 4 degrees of freedom
    assert found.low == pytest.approx(-2.776445 * error, rel=1e-3)


@pytest.mark.parametrize(
    ("freedom", "t"),
    [
        (1, 12.7062047),
        (2, 4.3026527),
        (3, 3.1824463),
        (4, 2.7764451),
        (5, 2.5705818),
        (30, 2.0422725),
        (1319, 1.9617641),
    ],
)
def test_quantiles_of_student(freedom: int, t: float) -> None:
    """From tables; the first two have closed forms."""
    assert scores._t_975(freedom) == pytest.approx(t, rel=1e-6)


@pytest.mark.parametrize("questions", [2, 3, 30])
@pytest.mark.parametrize(
    ("a", "b", "c"), [("1", "1", 0), ("0", "0", 0), ("1", "0", 1), ("0", "1", -1), ("10", "00", 0.5)]
)
def test_differences_that_are_all_equal_have_an_interval_with_a_width(questions: int, a: str, b: str, c: float) -> None:
    found = compare(run(*[a] * questions), run(*[b] * questions))
    share = 1 - 0.05 ** (1 / questions)
    assert (found.difference, found.standard_error) == (c, 0)
    assert found.low == pytest.approx(c - share * (c + 1))
    assert found.high == pytest.approx(c + share * (1 - c))
    assert found.low is not None
    assert found.high is not None
    assert -1 <= found.low <= c <= found.high <= 1
    assert found.low < found.high


def test_the_interval_covers_the_truth_nineteen_times_of_twenty() -> None:
    """By simulation: 40 questions of differing difficulty, one model 10 points better than the other on each."""
    import random

    source, covered, runs = random.Random(0), 0, 1000
    for _ in range(runs):
        chances = [source.uniform(0, 0.9) for _ in range(40)]
        a = [record(f"q{i}", right=source.random() < p + 0.1) for i, p in enumerate(chances)]
        b = [record(f"q{i}", right=source.random() < p) for i, p in enumerate(chances)]
        found = compare(a, b)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.1 <= found.high
    assert 0.93 < covered / runs < 0.97


def test_compare_takes_the_questions_in_common() -> None:
    found = compare(run("1", "0", "1"), run("1", "1"))
    assert (found.questions, found.a, found.b) == (2, 0.5, 1)
    alone = compare(run("1"), run("0"))
    assert (alone.difference, alone.standard_error, alone.low, alone.high) == (1, None, None, None)
    with pytest.raises(ArgumentError, match="no question in common"):
        compare(run("1"), [record("another")])


def test_the_order_of_answers_does_not_matter() -> None:
    records = run("10", "11", "00")
    assert len({score(list(some)) for some in itertools.islice(itertools.permutations(records), 0, 720, 90)}) == 1
