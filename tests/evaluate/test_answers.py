r"""Where answers are found: ``#### 42``, ``\boxed{}``; and what is no answer."""

from __future__ import annotations

import doctest

import pytest

from polymoe.evaluate import answers
from polymoe.evaluate.answers import final_number, number, visible, whole_text


def test_examples() -> None:
    assert doctest.testmod(answers).attempted >= 3
    assert doctest.testmod(answers).failed == 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Janet makes 9 * 2 = $18.\n#### 18", "18"),
        ("#### 3\nwait, that is wrong\n#### $1,234.50 a day", "1234.5"),
        ("#### -7", "-7"),
        ("#### −7", "-7"),
        ("####\n\n 12", "12"),
        (r"so \boxed{042}. I am sure.", "42"),
        (r"\boxed{1} then $\boxed{\text{ 204 }}$", "204"),
        (r"$\boxed{336^\circ}$", "336"),
        (r"\boxed{n = 5}", "5"),
        (r"\boxed{42 \text{ dollars}}", "42"),
        (r"\boxed{1{,}024}", "1024"),
        (r"\boxed{\frac{1}{2}}", r"\frac12"),
        (r"\boxed{2\sqrt{3}}", r"2\sqrt3"),
        (r"\boxed{7} and \boxed{8", "7"),
        ("It takes 5*4 = **20** days.", "20"),
        ("between 3 and 10-4", "4"),
        ("the answer is .50", "0.5"),
        ("it costs 3.0", "3"),
        ("no idea", None),
        ("", None),
        ("<think>it is 5, or 6</think>It is 7.", "7"),
        ("<think>it is 5", None),
        ("9" * 50, "9" * 50),
    ],
)
def test_final_number(text: str, answer: str | None) -> None:
    assert final_number(text) == answer


def test_a_text_that_was_cut_off_counts_only_with_a_mark() -> None:
    assert final_number("first I add 3 and 4", finished=False) is None
    assert final_number("#### 7\n\nTo check, 3 +", finished=False) == "7"


@pytest.mark.parametrize(
    ("text", "same"), [("0", "0"), ("-0", "0"), ("007.50", "7.5"), ("1,000,000", "1000000"), ("+5", "5"), ("-0.0", "0")]
)
def test_numbers_have_one_spelling(text: str, same: str) -> None:
    assert number(text) == same


def test_whole_text() -> None:
    assert whole_text(" -473\n") == "-473"
    assert whole_text(" \n") is None
    assert visible("<think>a</think>b</think>c") == "c"


MANY = 1_000_000
LONG = {
    "boxes that stay open": r"\boxed{" * (MANY // 7),
    "boxes in boxes": r"\boxed{" * (MANY // 8) + "}" * (MANY // 8),
    "spaces in a box": r"\boxed{1" + " " * MANY + "!}",
    "a long name in a box": r"\boxed{" + "a" * MANY + "= 1}",
    "digits": "1" * MANY,
    "points": "1." * (MANY // 2),
    "signs": "-" * MANY,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_any_megabyte_is_read_in_linear_time(text: str) -> None:
    """With time that grows as the square or the cube of the length, each of these would take hours."""
    final_number(text)
    number(text)
    whole_text(text)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} \boxed {2}", "2"),
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"\boxed{a {b} c", None),
        (r"} \boxed{a}}", "a"),
        (r"\boxed{a} \boxed{b {", "a"),
        (r"{\boxed{a}", "a"),
        (r"\boxed{}", ""),
        (r"\boxed a}", None),
    ],
)
def test_the_last_box_that_is_closed(text: str, inside: str | None) -> None:
    assert answers._boxed(text) == inside
