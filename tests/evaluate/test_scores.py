"""Means, error bars and intervals, against values worked out by hand."""

from __future__ import annotations

import math
import statistics

import pytest

from polymoe.errors import ArgumentError
from polymoe.evaluate import scores
from polymoe.evaluate.scores import compare


def run(*answers: str) -> dict[str, list[float]]:
    """One string a question, one character a repeat: 1 is right."""
    return {f"q{i}": [float(c) for c in question] for i, question in enumerate(answers)}


def test_error_bars_treat_the_questions_as_a_sample() -> None:
    found = compare(run("1", "1", "1", "0"), run("110", "100", "111", "000"))
    assert (found.a, found.b) == (0.75, pytest.approx(6 / 12))
    assert found.a_error == pytest.approx(math.sqrt(0.75 * 0.25 / 3))  # sqrt(p (1 - p) / (Q - 1))
    assert found.b_error == pytest.approx(statistics.stdev([2 / 3, 1 / 3, 1, 0]) / 2)


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
        a, b = ({f"q{i}": [float(source.random() < p + more)] for i, p in enumerate(chances)} for more in (0.1, 0))
        found = compare(a, b)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.1 <= found.high
    assert 0.93 < covered / runs < 0.97


def test_compare_takes_the_questions_in_common() -> None:
    found = compare(run("1", "0", "1"), run("1", "1"))
    assert (found.questions, found.a, found.b) == (2, 0.5, 1)
    alone = compare(run("1"), run("0"))
    assert (alone.difference, alone.standard_error, alone.a_error, alone.low, alone.high) == (1, None, None, None, None)
    with pytest.raises(ArgumentError, match="no question in common"):
        compare(run("1"), {"another": [1.0]})
