from __future__ import annotations

import pytest

from polymoe.common.shapes import ceil_div, round_up


@pytest.mark.parametrize(
    ("a", "b", "quotient", "rounded"),
    [(2880, 128, 23, 2944), (2944, 128, 23, 2944), (2945, 128, 24, 3072), (0, 32, 0, 0), (1, 32, 1, 32), (7, 1, 7, 7)],
)
def test_up_to_the_next(a: int, b: int, quotient: int, rounded: int) -> None:
    assert ceil_div(a, b) == quotient
    assert round_up(a, b) == rounded


def test_large_integers_stay_exact() -> None:
    assert ceil_div(2**60 + 1, 2) == 2**59 + 1  # a float would lose the remainder
