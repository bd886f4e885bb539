from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import pytest

from polymoe.backends.config import Config
from polymoe.errors import ArgumentError, PlanError
from polymoe.planning.plan import Plan, PlanStep, role_tokens

PLAN = Plan("natural", (PlanStep(1, "a", Config()), PlanStep(63, "b", Config()), PlanStep(None, "c", Config())))


@pytest.mark.parametrize(("tokens", "backend"), [(1, "a"), (2, "b"), (63, "b"), (64, "c"), (100_000, "c")])
def test_step_by_token_count(tokens: int, backend: str) -> None:
    assert PLAN.step(tokens).backend == backend


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


@dataclass(frozen=True)
class Inner:
    rows: int = 64
    cap: int | None = None


@dataclass(frozen=True)
class Outer(Config):
    name: str
    scale: float = 1.0
    kind: Literal["a", "b"] = "a"
    chained: bool = False
    inner: Inner = Inner()


class TestConfigAsData:
    def test_there_and_back_through_json(self) -> None:
        config = Outer("x", 2.0, "b", True, Inner(32, 128))
        assert Outer.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        assert Outer.from_dict({"name": "x", "scale": 2}) == Outer("x", 2.0)  # the rest by default

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ([], "config: expected an object with the fields name, scale, kind, chained, inner, got []"),
            ({"name": "x", "innr": {}}, r"config.innr: expected a field of Outer\n  hint: did you mean 'inner'"),
            ({}, "config.name: expected a value, got none"),
            ({"name": "x", "inner": {"rows": "64"}}, "config.inner.rows: expected int, got '64'"),
            ({"name": "x", "inner": {"rows": True}}, "config.inner.rows: expected int, got True"),
            ({"name": "x", "inner": {"cap": 1.5}}, "config.inner.cap: expected int or NoneType, got 1.5"),
            ({"name": "x", "inner": 3}, "config.inner: expected an object with the fields rows, cap, got 3"),
            ({"name": "x", "kind": "c"}, "config.kind: expected .*, got 'c'"),
            ({"name": 1}, "config.name: expected str, got 1"),
        ],
    )
    def test_what_does_not_fit_is_refused_by_its_place(self, data: object, message: str) -> None:
        with pytest.raises(PlanError, match=message.replace("[]", r"\[\]")):
            Outer.from_dict(data)
