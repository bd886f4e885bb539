"""Planning from measured times: which configuration serves a token count, and how long it is said to take."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from polymoe.backends.base import Backend
from polymoe.machine import DEVICES, Machine
from polymoe.planning.measured import Measured, Table, problem_key
from polymoe.planning.predictor import Predictor, _warn_once
from polymoe.planning.proof import Proofs
from polymoe.planning.select import select
from support.problems import problem_of, random_experts
from support.table_rows import proof, row
from support.toys import LAYOUTS, TileConfig, Toy, choice, toys

PROBLEM = problem_of(random_experts())
H200 = Machine(DEVICES["h200"], {"triton": "3.6.0"})


class Tunable(Toy):
    """A toy with something to choose."""

    def tuning_configs(self, problem, machine, tokens, timed=()):  # type: ignore[no-untyped-def]
        return () if timed else (TileConfig(16), TileConfig(32))


TOY: Backend = Tunable("toy")


def measured(tokens: int, time: float, tile: int = 32, **changes: Any) -> Measured:
    return row(tokens, time, **{"problem": problem_key(PROBLEM), "config": {"tile": tile}, **changes})


def planner(*rows: Measured, machine: Machine = H200) -> Predictor:
    return Predictor.of(TOY, PROBLEM, machine, Table((rows,)))


def test_without_a_table_the_backends_own() -> None:
    mine = planner()
    assert mine.configure(5) == TileConfig(16)
    assert mine.predict(5) == TOY.predict(PROBLEM, H200, 5)
    assert mine.tunable
    assert not planner(measured(1, 1.0)).tunable
    assert not Predictor(toys()["large"], PROBLEM, H200).tunable  # nothing to choose


def test_a_measured_token_count_serves_those_below_it() -> None:
    mine = planner(measured(4, 40.0, 1), measured(16, 90.0, 2), measured(64, 100.0, 3))
    tiles = {t: mine.configure(t).tile for t in (1, 4, 5, 16, 17, 64)}  # type: ignore[attr-defined]
    assert tiles == {1: 1, 4: 1, 5: 2, 16: 2, 17: 3, 64: 3}


def test_times_between_measured_ones_lie_on_a_line_in_logarithms() -> None:
    mine = planner(measured(4, 40.0), measured(16, 90.0))
    assert [mine.predict(t).time_us for t in (4, 16)] == [40.0, 90.0]
    assert mine.predict(8).time_us == pytest.approx(60.0)
    assert mine.predict(8).source == "measured"


def test_beyond_the_measured_ones_the_cost_model_scales() -> None:
    mine = planner(measured(64, 100.0))
    model = {t: TOY.predict(PROBLEM, H200, t).time_us for t in (16, 64, 512)}
    assert mine.predict(16).time_us == pytest.approx(100 * model[16] / model[64])
    assert mine.predict(512).time_us == pytest.approx(100 * model[512] / model[64])
    assert mine.predict(512).source == "cost model scaled to 64 tokens measured"


def test_a_configuration_serves_no_token_count_it_was_not_made_for() -> None:
    mine = planner(measured(256, 100.0))
    assert mine.configure(64) == TileConfig(32)
    assert mine.configure(63) == TileConfig(16)  # four times fewer: the heuristic
    assert mine.predict(63).source == "cost model"
    assert mine.configure(1023) == TileConfig(32)  # the backend itself would not change
    assert mine.configure(1024) == TileConfig(64)  # it would: its own choice


def test_another_triton_is_used_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planner(measured(1, 5.0, triton="3.5.1")).predict(1).source == "measured"  # a backend without Triton
    monkeypatch.setattr(type(TOY), "compiler", "triton")
    old = planner(measured(1, 5.0, triton="3.5.1"))
    assert old.configure(1) == TileConfig(32)
    assert old.predict(1).source == "measured with triton 3.5, not 3.6"
    assert planner(measured(1, 5.0, triton="3.6.2")).predict(1).source == "measured"
    assert planner(measured(1, 5.0), machine=Machine(DEVICES["h200"])).predict(1).source.endswith("not none")


def test_a_configuration_that_the_backend_has_no_more_is_left_out_with_one_warning() -> None:
    _warn_once.cache_clear()
    rows = (measured(1, 5.0, config={"tail": 8}), measured(2, 6.0))
    with pytest.warns(UserWarning, match=r"tail: expected a field of TileConfig\n.*run again: polymoe tune"):
        mine = planner(*rows)
    assert [p.tokens for p in mine.points] == [2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planner(*rows)


class TestSelect:
    def of(self, *rows: Measured, **kwargs: Any):  # type: ignore[no-untyped-def]
        backends = {"slow": Toy("slow", times_floor=2.0), "toy": Tunable("toy", times_floor=5.0)}
        proofs = Proofs(proof(name, "run") for name in backends)  # so that times decide
        return select(PROBLEM, H200, backends=backends, layouts=LAYOUTS, table=Table((rows,)), proofs=proofs, **kwargs)

    def test_measured_times_split_the_range_and_bring_their_configurations(self) -> None:
        model = {t: Toy("slow").predict(PROBLEM, H200, t).time_us for t in (48, 100)}
        found = self.of(measured(48, 0.5 * model[48], 8), measured(100, 0.5 * model[100], 4))
        plan = found.require()
        assert [(tokens, s.backend, str(s.config)) for tokens, s in plan.ranges()] == [
            ("1-8", "slow", "tile=16"),
            ("9-48", "toy", "tile=8"),
            ("49-512", "toy", "tile=4"),
            ("513+", "slow", "tile=64"),
        ]
        assert found.untuned == ()

    def test_where_times_come_from_is_said(self) -> None:
        text = str(self.of(*(measured(t, 1e-3) for t in (1, 4, 16, 64, 256, 1024, 4096, 16384))))
        assert "toy (tile=32), 0.0 us at 1 to 0.0 us at 16384 (measured)" in text
        assert "(predicted)" in str(self.of())

    def test_an_untuned_gpu_is_told_what_to_do(self) -> None:
        untuned = self.of(backend="toy")
        assert untuned.untuned == ("toy",)
        assert untuned.to_dict()["untuned"] == ["toy"]
        assert "`polymoe tune --case x`" in untuned.summary("polymoe tune --case x")
        assert "not tuned" in str(untuned)
        tuned = self.of(measured(1, 1.0), backend="toy")
        assert "tune" not in tuned.summary()
        assert choice({"toy": Tunable("toy")}, device="cpu").select(PROBLEM).untuned == ()  # not a GPU
