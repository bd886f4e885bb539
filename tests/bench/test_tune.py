"""Tuning with a backend whose times are made up and a clock that it moves: no GPU, no waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polymoe.backends.base import Runner
from polymoe.backends.config import Config
from polymoe.backends.reference import Reference
from polymoe.bench.cases import CASES, Workload
from polymoe.bench.compile_ahead import CompileAhead
from polymoe.bench.measure import draw_calls
from polymoe.bench.routings import RoutingDistribution
from polymoe.bench.timing import Timing
from polymoe.bench.tune import Outcome, Tune
from polymoe.errors import ArgumentError, UnsupportedProblem
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.planning.table_files import read
from polymoe.problem import Problem
from polymoe.problem.verdict import Accepted, Reason, Rejected, Verdict
from support.runners import Followed
from support.tiny import CPU, STAMP, TINY


@dataclass(slots=True)
class Clock:
    """Moves only when something runs."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Knob(Config):
    knob: int = 4


def milliseconds(tokens: int, knob: int) -> float:
    """Best at 8 below 16 tokens and at 32 from there on."""
    return 1.0 + abs(knob - (8 if tokens < 16 else 32)) / 8


@dataclass(frozen=True)
class Knobs(Reference):
    """The reference under another name, a config that says how long it takes, and what may go wrong with it."""

    name: str = "knobs"
    clock: Clock = field(default_factory=Clock)
    verdict: Verdict = Accepted()  # noqa: RUF009
    time: Callable[[int, int], float] = milliseconds
    wrong: Callable[[int, Tensor], object] = lambda knob, out: None
    ran: list[tuple[int, int]] = field(default_factory=list)

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        return self.verdict

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> Knob:
        return Knob()

    def tuning_configs(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
    ) -> Sequence[Config]:
        best = min(timed, key=lambda pair: pair[1], default=(Knob(), 0.0))[0].knob  # type: ignore[attr-defined]
        return [Knob(k) for k in (best, 2 * best, best // 2, best + 1) if 1 <= k <= 64]

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        return Followed(super().bind(problem, packed), self._count)

    def _count(self, x_TH: Tensor, config: Knob, out_TH: Tensor) -> None:
        self.wrong(config.knob, out_TH)
        self.ran.append((len(x_TH), config.knob))
        self.clock.now += 1e-3 * self.time(len(x_TH), config.knob)


class Turns:
    """Times calls by the clock that they move."""

    def __init__(self, clock: Clock, calls: Sequence[Callable[[], None]], device: torch.device, *, graph: bool) -> None:
        self.clock, self.calls = clock, calls

    def time(self, repeats: int = 15) -> Timing:
        samples = []
        for _ in range(repeats):
            start = self.clock()
            self.calls[0]()
            samples.append(1e6 * (self.clock() - start))
        return Timing.of(samples, "calls")


def tune(backend: Knobs, file: Path, **kwargs: Any) -> Tune:
    def turns(calls: Sequence[Callable[[], None]], device: torch.device, *, graph: bool) -> Any:
        return Turns(backend.clock, calls, device, graph=graph)

    parts: dict[str, Any] = {
        "workload": Workload.of_case(TINY, CPU), "machine": Machine.of("cpu"), "device": CPU, "backends": [backend],
        "file": file, "stamp": STAMP, "began": 0.0, "timed_calls": turns, "clock": backend.clock,
    }  # fmt: skip
    return Tune(**{**parts, **kwargs})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tables" / "cpu.jsonl"


def knobs(outcomes: Sequence[Outcome]) -> dict[int, int]:
    return {o.tokens: o.row.config["knob"] for o in outcomes if o.row is not None}


def test_the_fastest_is_found_and_written(file: Path) -> None:
    found = list(tune(Knobs(), file).outcomes((64, 1)))
    assert knobs(found) == {1: 8, 64: 32}
    rows = read(file)
    assert rows == [o.row for o in found]
    assert [(r.tokens, r.median_us, r.backend, r.device) for r in rows] == [
        (1, 1000.0, "knobs", "cpu"),
        (64, 1000.0, "knobs", "cpu"),
    ]
    assert found[0].own_us == pytest.approx(1500.0)
    assert rows[0].problem.startswith("H=64 F=48 E=5/5 A=2, gate e2m1")
    assert (rows[0].torch, rows[0].command) == (STAMP.torch, STAMP.command)


def test_finished_points_are_skipped_unless_asked_for_or_measured_with_other_versions(file: Path) -> None:
    first = list(tune(Knobs(), file).outcomes((1, 2)))
    backend = Knobs()
    found = list(tune(backend, file).outcomes((1, 2, 4)))
    assert [(o.tokens, o.note) for o in found][:2] == [(1, "in the table already"), (2, "in the table already")]
    assert found[0].row == first[0].row
    assert {tokens for tokens, _ in backend.ran} == {4}
    backend = Knobs()
    list(tune(backend, file, again=True).outcomes((1,)))
    assert backend.ran
    other = replace(STAMP, triton="3.7.0")
    assert [o.note for o in tune(Knobs(), file, stamp=other).outcomes((1,))] == [""]
    assert [r.triton for r in read(file) if r.tokens == 1] == [None, "3.7.0"]


def test_an_interruption_keeps_what_is_finished_and_the_next_run_goes_on(file: Path) -> None:
    def interrupted(tokens: int, knob: int) -> float:
        if tokens == 4:
            raise KeyboardInterrupt
        return milliseconds(tokens, knob)

    with pytest.raises(KeyboardInterrupt):
        list(tune(Knobs(time=interrupted), file).outcomes((1, 2, 4, 8)))
    assert [r.tokens for r in read(file)] == [1, 2]
    backend = Knobs()
    list(tune(backend, file).outcomes((1, 2, 4, 8)))
    assert {tokens for tokens, _ in backend.ran} == {4, 8}
    assert [r.tokens for r in read(file)] == [1, 2, 4, 8]


@pytest.mark.parametrize("spoil", [lambda out: out.mul_(1.02), lambda out: out[-1, -1].fill_(float("nan"))])
def test_a_wrong_candidate_never_wins(file: Path, spoil: Callable[[Tensor], object]) -> None:
    def wrong(knob: int, out: Tensor) -> None:
        if knob == 8:
            spoil(out)

    said: list[str] = []
    (outcome,) = tune(Knobs(wrong=wrong), file, say=said.append).outcomes((1,))
    assert knobs([outcome]) == {1: 10}
    assert outcome.failed == 1
    assert len(said) == 1
    assert said[0].startswith("knobs, 1 tokens, knob=8: WRONG: ")


def test_a_candidate_that_goes_wrong_after_screening_does_not_win_either(file: Path) -> None:
    backend = Knobs()

    def later(knob: int, out: Tensor) -> None:
        if knob == 8 and len([k for _, k in backend.ran if k == 8]) > 30:
            out.mul_(1.02)

    object.__setattr__(backend, "wrong", later)
    (outcome,) = tune(backend, file).outcomes((1,))
    assert knobs([outcome]) == {1: 9}


@pytest.mark.parametrize("error", [RuntimeError("out of resource: shared memory"), torch.OutOfMemoryError("full")])
def test_a_candidate_that_fails_is_skipped_and_said(file: Path, error: Exception) -> None:
    def failing(tokens: int, knob: int) -> float:
        if knob >= 8:
            raise error
        return milliseconds(tokens, knob)

    said: list[str] = []
    (outcome,) = tune(Knobs(time=failing), file, say=said.append).outcomes((1,))
    assert knobs([outcome]) == {1: 7}
    assert outcome.failed == len(said) > 0
    assert "memory" in said[0]


def test_clocks_that_fall_while_it_tunes_do_not_decide(file: Path) -> None:
    """A GPU reaches its power limit within milliseconds: what is timed first looks faster than it is."""

    def falling(tokens: int, knob: int) -> float:
        return (1.0 if backend.clock.now < 0.007 else 1.15) * {4: 1.05, 8: 1.0}.get(knob, 2.0)

    backend = Knobs(time=falling)
    (outcome,) = tune(backend, file).outcomes((8,))
    assert outcome.own_us == pytest.approx(1050.0)  # timed before the clocks fell, 8 after it
    assert outcome.row is not None
    assert (outcome.row.config["knob"], outcome.row.median_us) == (8, 1150.0)


def test_a_rounding_tie_in_one_token_is_no_error(file: Path) -> None:
    """At least eight tokens are compared, even if each call has one."""

    class Tie(Knobs):
        def _count(self, x_TH: Tensor, config: Knob, out_TH: Tensor) -> None:
            super()._count(x_TH, config, out_TH)
            if torch.equal(x_TH, first_1H):
                out_TH.mul_(1.01)

    problem = Workload.of_case(TINY, CPU).problem
    first_1H = draw_calls(problem, RoutingDistribution("uniform"), CPU, 1)[0][0]
    (outcome,) = tune(Tie(), file).outcomes((1,))
    assert (outcome.row is not None, outcome.failed) == (True, 0)


def test_when_nothing_is_right_nothing_is_written(file: Path) -> None:
    (outcome,) = tune(Knobs(wrong=lambda knob, out: out.zero_()), file).outcomes((1,))
    assert (outcome.row, outcome.note) == (None, "none gave correct results")
    assert not file.exists()


def test_the_time_limit_is_shared_and_kept(file: Path) -> None:
    slow = Knobs(time=lambda tokens, knob: 1000.0 * milliseconds(tokens, knob))  # seconds
    found = list(tune(slow, file, seconds=100).outcomes((1, 2, 4)))
    assert [o.tokens for o in found if o.row] == [1, 2, 4]  # each got something
    assert "ended by the time limit" in {o.note for o in found}
    assert slow.clock.now < 100 * 1.4
    none = Knobs(time=lambda tokens, knob: 1e6)
    assert [o.note for o in tune(none, file, seconds=10, again=True).outcomes((1, 2))][1].startswith("out of time")


def test_neighbours_that_are_about_as_fast_keep_one_configuration(file: Path) -> None:
    def flat(tokens: int, knob: int) -> float:
        best = 8 if tokens < 16 else 9
        return 1.0 + 0.01 * abs(knob - best)

    assert knobs(list(tune(Knobs(time=flat), file).outcomes((1, 16)))) == {1: 8, 16: 8}


def test_the_backends_own_choice_stays_where_it_is_about_as_fast(file: Path) -> None:
    backend = Knobs(time=lambda tokens, knob: {4: 1.015, 8: 1.0}.get(knob, 2.0))
    assert knobs(list(tune(backend, file).outcomes((1,)))) == {1: 4}


def test_few_configurations_and_early_rejection(file: Path) -> None:
    backend = Knobs()
    (only,) = tune(backend, file, configs=1).outcomes((64,))
    assert (only.tried, {knob for _, knob in backend.ran}) == (1, {4})
    slow = Knobs(time=lambda tokens, knob: 1.0 if knob == 4 else 9.0)
    list(tune(slow, file, again=True).outcomes((64,)))
    runs = [knob for _, knob in slow.ran]
    assert max(runs.count(knob) for knob in set(runs) - {4}) < runs.count(4)


def test_half_of_the_routings_are_skewed(file: Path) -> None:
    from polymoe.bench.tune import _draw

    problem = Workload.of_case(CASES["gpt-oss-20b"], CPU).problem
    rows = [r.topk_ids_TA.flatten().bincount().max().item() for _, r in _draw(problem, CPU, 256)]
    assert min(rows[1::2]) > 2 * max(rows[::2])


def test_who_does_not_run_it(file: Path) -> None:
    limited = Knobs(verdict=Accepted(max_tokens=4))
    notes = [o.note for o in tune(limited, file).outcomes((4, 8))]
    assert sorted(notes) == ["", "takes at most 4 tokens"]
    with pytest.raises(UnsupportedProblem, match="GPU: expects SM90, got cpu"):
        list(tune(Knobs(verdict=Rejected((Reason("GPU", "SM90", "cpu"),))), file).outcomes((1,)))


def test_memory_is_bounded(file: Path) -> None:
    with pytest.raises(ArgumentError, match=r"memory: expected at least 0\.0. GiB, got 0\.00 GiB"):
        list(tune(Knobs(), file, memory_bytes=1000).outcomes((4096,)))
    (outcome,) = tune(Knobs(), file, memory_bytes=10**9).outcomes((1,))
    assert outcome.row is not None


def test_a_corrupt_table_is_kept_aside_and_made_anew(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("{]")
    said: list[str] = []
    (outcome,) = tune(Knobs(), file, say=said.append).outcomes((1,))
    assert outcome.row in read(file)
    assert file.with_name("cpu.jsonl.corrupt-1").read_text() == "{]"
    assert said == [
        f"ignored: {file}, line 1: expected a row as JSON, got {{]",
        f"{file} was not a table of measured times: kept as {file}.corrupt-1",
    ]


class Recorded(CompileAhead):
    """Remembers what it was given and compiles nothing."""

    def __init__(self) -> None:
        super().__init__(0)
        self.given: list[tuple[int, tuple[Config, ...]]] = []

    def submit(self, backend: Any, layout: str, problem: Problem, tokens: int, configs: Any) -> None:
        self.given.append((tokens, tuple(configs)))


def test_everything_is_given_to_compile_before_anything_runs(file: Path) -> None:
    compiler, backend = Recorded(), Knobs()
    outcomes = tune(backend, file, compiler=compiler).outcomes((1, 2))
    next(outcomes)
    first = (Knob(4), Knob(8), Knob(2), Knob(5))
    assert compiler.given[:2] == [(1, first), (2, first)]


def test_the_backends_own_choice_is_always_tried(file: Path) -> None:
    """Also if it is compiled last and few configurations may be tried."""

    class LastFirst(Recorded):
        def first_ready(self, backend: Any, problem: Problem, tokens: int, configs: Any, seconds: float) -> Config:
            return configs[-1]

    (outcome,) = tune(Knobs(), file, compiler=LastFirst(), configs=2).outcomes((1,))
    assert (outcome.tried, outcome.own_us) == (2, pytest.approx(1500.0))


@pytest.mark.parametrize("repeatable", [True, False])
def test_repeats_that_differ_in_rounding(file: Path, repeatable: bool) -> None:
    """They are wrong, unless the backend says that its sums have no fixed order."""
    noise = cycle((1.0, 1.003))
    backend = Knobs(verdict=Accepted(repeatable=repeatable), wrong=lambda _, out: out.mul_(next(noise)))
    said: list[str] = []
    found = list(tune(backend, file, say=said.append).outcomes((4,)))
    assert [outcome.row is not None for outcome in found] == [not repeatable]
    assert any("repeats differ" in text for text in said) == repeatable
