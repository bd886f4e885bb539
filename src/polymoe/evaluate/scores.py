"""Statistics of the answers of one run, and of two runs compared.

The statistics are those of E. Miller, "Adding Error Bars to Evals: A Statistical Approach to Language Model
Evaluations", 2024 (https://arxiv.org/abs/2411.00640): questions are a sample of all possible questions, answers to one
question depend on each other, and two runs over the same questions are compared question by question.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polymoe.errors import ArgumentError
from polymoe.evaluate.records import AnswerRecord

__all__ = ["Difference", "Score", "compare", "score", "unseen_share", "wilson"]


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a run. Shares are from 0 to 1; None means undefined, such as the deviation of a single repeat.

    Attributes:
        questions, answers: their numbers; every question may have been asked several times.
        repeats: how often all questions were asked.
        correct, invalid, cut_off: responses that are right, contain no answer, or ended at their token limit.
        pass_at_1: mean over questions of the share of right answers to each.
        low, high: the 95 % interval of ``pass_at_1``: Wilson's, which stays between 0 and 1 and has a width at both
            ends, with the number of independent answers that the standard error stands for, or of questions.
        standard_error: of ``pass_at_1``, with the Q questions as a sample: sqrt(sum (p_q - pass_at_1)^2 / (Q (Q - 1))),
            where p_q is the share of right answers to question q.
        repeat_std: standard deviation (n - 1) of the repeats' shares of right answers.
        repeat_standard_error: ``repeat_std`` / sqrt(repeats): of ``pass_at_1`` on just these questions.
        latency_p50_us, latency_p90_us, latency_p99_us: percentiles over answers.
        output_tokens: in all.
        output_tokens_per_s: over the time in which at least one request was running.
    """

    questions: int
    answers: int
    repeats: int
    correct: int
    invalid: int
    cut_off: int
    pass_at_1: float
    low: float
    high: float
    standard_error: float | None
    repeat_std: float | None
    repeat_standard_error: float | None
    latency_p50_us: int
    latency_p90_us: int
    latency_p99_us: int
    output_tokens: int | None
    output_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Run A minus run B, over the questions that both answered.

    Attributes:
        questions: how many.
        a, b: ``pass_at_1`` of each on them.
        difference: a - b.
        standard_error: of the difference; None for a single question.
        low, high: the 95 % interval.
        better, worse: questions on which A's share of right answers is higher, and lower.
    """

    questions: int
    a: float
    b: float
    difference: float
    standard_error: float | None
    low: float | None
    high: float | None
    better: int
    worse: int


def score(records: Sequence[AnswerRecord]) -> Score:
    """Compute the result of a run.

    Raises:
        ArgumentError: if there are none.
    """
    if not records:
        raise ArgumentError("score", expected="answers", got="none")
    shares = _shares(records)
    by_repeat: dict[int, list[bool]] = defaultdict(list)
    for record in records:
        by_repeat[record.repeat].append(record.correct)
    whole = [statistics.fmean(right) for right in by_repeat.values() if len(right) == len(shares)]
    deviation = statistics.stdev(whole) if len(whole) > 1 else None
    p50, p90, p99 = np.percentile([record.latency_us for record in records], (50, 90, 99))
    tokens = [record.completion_tokens for record in records]
    output = None if None in tokens else sum(n for n in tokens if n is not None)
    seconds = _busy_us(records) / 1e6
    mean, error = statistics.fmean(shares.values()), _standard_error(list(shares.values()))
    low, high = wilson(mean, mean * (1 - mean) / error**2 if error and 0 < mean < 1 else len(shares))
    return Score(
        questions=len(shares),
        answers=len(records),
        repeats=len(whole),
        correct=sum(record.correct for record in records),
        invalid=sum(record.answer is None for record in records),
        cut_off=sum(record.finish_reason == "length" for record in records),
        pass_at_1=mean,
        low=low,
        high=high,
        standard_error=error,
        repeat_std=deviation,
        repeat_standard_error=None if deviation is None else deviation / math.sqrt(len(whole)),
        latency_p50_us=round(p50),
        latency_p90_us=round(p90),
        latency_p99_us=round(p99),
        output_tokens=output,
        output_tokens_per_s=output / seconds if output is not None and seconds > 0 else None,
    )


def compare(a: Iterable[AnswerRecord], b: Iterable[AnswerRecord]) -> Difference:
    """Compute the difference of two runs with its 95 % interval, paired by question.

    With d_q the difference of the two shares of right answers to question q, of Q::

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
    shares_a, shares_b = _shares(a), _shares(b)
    common = [question for question in shares_a if question in shares_b]
    if not common:
        raise ArgumentError("compare", expected="two runs over the same questions", got="no question in common")
    differences = [shares_a[question] - shares_b[question] for question in common]
    difference = statistics.fmean(differences)
    error = _standard_error(differences)
    low = high = None
    if error is not None and error > 0:
        reach = _t_975(len(common) - 1) * error
        low, high = difference - reach, difference + reach
    elif error is not None:
        share = unseen_share(len(common))
        low, high = difference - share * (difference + 1), difference + share * (1 - difference)
    return Difference(
        questions=len(common),
        a=statistics.fmean(shares_a[question] for question in common),
        b=statistics.fmean(shares_b[question] for question in common),
        difference=difference,
        standard_error=error,
        low=low,
        high=high,
        better=sum(d > 0 for d in differences),
        worse=sum(d < 0 for d in differences),
    )


def _shares(records: Iterable[AnswerRecord]) -> Mapping[str, float]:
    """Return the share of right answers to each question."""
    right: dict[str, list[bool]] = defaultdict(list)
    for record in records:
        right[record.id].append(record.correct)
    return {question: statistics.fmean(answers) for question, answers in right.items()}


def _standard_error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def wilson(share: float, answers: float) -> tuple[float, float]:
    """The 95 % interval of a share of independent answers, from 0 to 1.

    Formula: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927.

    Args:
        share: that was seen.
        answers: their number.
    """
    z = 1.959964
    center = share + z * z / (2 * answers)
    reach = z * math.sqrt(share * (1 - share) / answers + (z / (2 * answers)) ** 2)
    whole = 1 + z * z / answers
    # At 0 and 1 one bound is the share itself, but for rounding.
    return min(share, max(0.0, (center - reach) / whole)), max(share, min(1.0, (center + reach) / whole))


def unseen_share(questions: int) -> float:
    """Return the largest share of all possible questions that may differ from ``questions`` that are all alike, at
    95 %: a larger share would have shown itself with a probability of 0.95. About 3 / Q (the rule of three)."""
    return 1 - 0.05 ** (1 / questions)


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


def _busy_us(records: Iterable[AnswerRecord]) -> int:
    """Return the time in which at least one request was running, also for a run that was interrupted and continued."""
    busy, until = 0, 0
    for start, end in sorted((record.ended_us - record.latency_us, record.ended_us) for record in records):
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return busy
