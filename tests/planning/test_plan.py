from __future__ import annotations

import pytest

from polymoe.errors import ArgumentError, PlanError
from polymoe.planning.plan import Config, Plan, PlanStep, role_tokens

PLAN = Plan("natural", (PlanStep(1, "a", Config()), PlanStep(63, "b", Config()), PlanStep(None, "c", Config())))


@pytest.mark.parametrize(("tokens", "backend"), [(1, "a"), (2, "b"), (63, "b"), (64, "c"), (100_000, "c")])
def test_step_by_token_count(tokens: int, backend: str) -> None:
    assert PLAN.step(tokens).backend == backend


def test_ranges_read_as_text() -> None:
    assert [tokens for tokens, _ in PLAN.ranges()] == ["1", "2-63", "64+"]


def test_beyond_the_last_step() -> None:
    with pytest.raises(PlanError, match="at most 63"):
        Plan("natural", (PlanStep(63, "b", Config()),)).step(64)


@pytest.mark.parametrize("bounds", [(), (63, 1), (None, 4), (5, 5)])
def test_bounds_ascend(bounds: tuple[int | None, ...]) -> None:
    with pytest.raises(PlanError, match="ascending"):
        Plan("natural", tuple(PlanStep(b, "a", Config()) for b in bounds))


def test_roles() -> None:
    assert role_tokens("mixed") == (*role_tokens("decode"), *role_tokens("prefill"))
    with pytest.raises(ArgumentError, match="did you mean 'decode'"):
        role_tokens("decoding")
