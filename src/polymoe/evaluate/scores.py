"""Statistics of two runs over the same questions.

The statistics are those of E. Miller, "Adding Error Bars to Evals: A Statistical Approach to Language Model
Evaluations", 2024 (https://arxiv.org/abs/2411.00640): questions are a sample of all possible questions, answers to one
question depend on each other, and two runs over the same questions are compared question by question.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polymoe.errors import ArgumentError

__all__ = ["Difference", "compare"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Run A minus run B, over the questions that both answered.

    Attributes:
        questions: how many.
        a, b: mean over them of the mean of each question's answers.
        a_error, b_error: standard error of each, with the questions as a sample; None for a single question.
        difference: a - b.
        standard_error: of the difference; None for a single question.
        low, high: the 95 % interval.
        better, worse: questions on which A's mean is higher, and lower.
    """

    questions: int
    a: float
    b: float
    a_error: float | None
    b_error: float | None
    difference: float
    standard_error: float | None
    low: float | None
    high: float | None
    better: int
    worse: int


def compare(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> Difference:
    """Compute the difference of two runs with its 95 % interval, paired by question.

    Args:
        a, b: values of the answers of each run, from 0 to 1, by question; several where a question was asked several
            times, of which the mean counts.

    With d_q the difference of the two means of question q, of Q::

        difference = mean(d_q)
        standard error = sqrt(sum (d_q - difference)^2 / (Q (Q - 1)))
        95 % interval = difference +- t(0.975, Q - 1) * standard error

    (Miller 2024, the section on paired differences, with Student's t instead of 1.96, which matters for a set as
    small as AIME.) What makes a question hard for both runs cancels: where they agree on what is hard, the interval is
    narrower than one from the two runs' standard errors.

    Where all d_q are equal, they show no variance and Student's t has no width. Then at most a share
    p = 1 - 0.05^(1 / Q) of all possible questions differs from them (at 95 %), each by any amount from -1 to 1::

        95 % interval = difference - p * (difference + 1) to difference + p * (1 - difference)

    Raises:
        ArgumentError: if the runs have no question in common.
    """
    common = [question for question in a if question in b]
    if not common:
        raise ArgumentError("compare", expected="two runs over the same questions", got="no question in common")
    means_a, means_b = ([statistics.fmean(run[question]) for question in common] for run in (a, b))
    differences = [mean_a - mean_b for mean_a, mean_b in zip(means_a, means_b, strict=True)]
    difference = statistics.fmean(differences)
    error = _standard_error(differences)
    low = high = None
    if error is not None and error > 0:
        reach = _t_975(len(common) - 1) * error
        low, high = difference - reach, difference + reach
    elif error is not None:
        share = 1 - 0.05 ** (1 / len(common))  # about 3 / Q, the rule of three
        low, high = difference - share * (difference + 1), difference + share * (1 - difference)
    return Difference(
        questions=len(common),
        a=statistics.fmean(means_a),
        b=statistics.fmean(means_b),
        a_error=_standard_error(means_a),
        b_error=_standard_error(means_b),
        difference=difference,
        standard_error=error,
        low=low,
        high=high,
        better=sum(d > 0 for d in differences),
        worse=sum(d < 0 for d in differences),
    )


def _standard_error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _t_975(freedom: int) -> float:
    """The 0.975 quantile of Student's t with a whole number of degrees of freedom, from the exact finite series of its
    distribution: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    low, high = 1.9, 13.0  # of the normal distribution, and of one degree of freedom
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Return the probability that Student's t lies between -t and t."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, squared = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    if freedom == 1:
        return 2 * angle / math.pi
    for k in range(2 + odd, freedom - 1, 2):
        term *= squared * (k - 1) / k
        total += term
    return 2 * (angle + sine * total) / math.pi if odd else sine * total
