"""Measuring: the baseline's results, what is timed, what is refused, what a wrong backend gets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from side_by_side import medians_in_turn  # type: ignore
from torch import Tensor

from polymoe.backends import BACKENDS
from polymoe.backends.base import Runner
from polymoe.backends.reference import Reference, run_experts
from polymoe.bench import baseline
from polymoe.bench.cases import random_weights
from polymoe.bench.timing import TimedCalls, Timing, distinct_calls
from polymoe.errors import ArgumentError, UnsupportedProblem
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activations import Activation, ReLU2, SwiGLU
from polymoe.problem.numerics import relative_error
from polymoe.problem.routing import Routing
from polymoe.problem.verdict import Accepted, Rejected, Verdict
from support.runners import Followed
from support.tiny import CPU, TINY, bench

GPT_OSS = SwiGLU(alpha=1.702, beta=1.0, limit=7.0)


def test_every_expert_that_is_read_is_progress() -> None:
    said: list[str] = []
    assert len(list(bench().rows([1], ["torch"], said.append))) == 1
    assert any(re.fullmatch(r"reference: expert \d of 5", text) for text in said)
    assert "torch: packing: expert 5 of 5" in said
    assert said[-1] == "torch: 1 tokens"


@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize(
    ("activation", "bias", "format"), [(GPT_OSS, True, "mxfp4"), (ReLU2(), False, "nvfp4"), (ReLU2(), True, "bf16")]
)
def test_the_baseline_computes_the_experts(
    activation: Activation, bias: bool, format: str, weight_on: Literal["output", "input"]
) -> None:
    case = replace(TINY, activation=activation, bias=bias)
    problem = replace(case.problem(format), weight_on=weight_on)
    weights = random_weights(problem, CPU)
    x_TH = torch.randn(7, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.tensor([[0, 1], [4, 4], [1, 0], [0, 3], [3, 0], [1, 4], [0, 1]])  # none to 2, one token twice to 4
    routing = Routing(ids, torch.linspace(0.2, 1.5, 14).reshape(7, 2))
    x_before, out_TH = x_TH.clone(), torch.full_like(x_TH, float("nan"))
    baseline.run(problem, baseline.dequantize(weights), x_TH, routing, out_TH)
    assert relative_error(out_TH, run_experts(problem, weights, x_TH, routing)) < baseline.BASELINE_TOLERANCE
    assert torch.equal(x_TH, x_before)


def test_the_baseline_says_what_it_cannot_run() -> None:
    problem = TINY.changed(hidden=36, intermediate=20).problem("bf16")
    verdict = baseline.check(problem, Machine.of("cpu"), 1000)
    assert isinstance(verdict, Rejected)
    assert [r.what for r in verdict.reasons] == ["H", "F", "memory"]
    assert baseline.check(TINY.problem(), Machine.of("h200"), None) == Accepted(capturable=True)
    assert baseline.check(TINY.problem(), Machine.of("rtx4090"), None) == Accepted(capturable=False)


def test_rows_of_every_backend_and_token_count() -> None:
    ours = ("reference", "torch", "torch-dequantized", "triton", "cuda", "flashinfer")
    rows = [row for row in bench().rows((1, 9)) if row.backend in ours]
    rejected = [row for row in rows if row.tokens is None]
    assert [(row.backend, row.note.split(":")[0]) for row in rejected] == [
        ("triton", "GPU"), ("cuda", "GPU"), ("flashinfer", "GPU"),
    ]  # fmt: skip
    rows = [row for row in rows if row not in rejected]
    assert {(row.backend, row.tokens) for row in rows} == {
        (name, t) for name in ("reference", "torch", "torch-dequantized") for t in (1, 9)
    }
    for row in rows:
        r = row.record
        assert r is not None
        assert row.note == "calls"
        assert 0 < r.p25_us <= r.median_us <= r.p75_us
        assert r.share == pytest.approx(r.floor_us / r.median_us, rel=0.05, abs=1e-4)
        assert 1e-4 < r.error == r.error_exact < 6e-3
        assert (r.case, r.format, r.activations, r.routing, r.commit) == ("tiny", "mxfp4", "16bit", "uniform", "abc")


def test_activations_are_emulated_and_the_baseline_has_none() -> None:
    rows = {row.backend: row.record for row in bench(format="fp8_block128").rows((9,))}
    ours, torchs = rows["reference"], rows["torch-dequantized"]
    assert ours is not None
    assert torchs is not None
    assert (ours.activations, torchs.activations) == ("fp8_group128", "16bit")
    assert ours.error < 6e-3 < 1e-2 < ours.error_exact < 5.5e-2
    assert torchs.error == torchs.error_exact < baseline.BASELINE_TOLERANCE


RUNS = Accepted()


@dataclass(frozen=True)
class Altered(Reference):
    """The reference under another name, with another verdict, spoiling its result."""

    name: str = "altered"
    verdict: Verdict = RUNS
    spoil: Callable[[Tensor], object] = lambda out: None

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        return self.verdict

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        return Followed(super().bind(problem, packed), lambda x, config, out: self.spoil(out))


def altered(monkeypatch: pytest.MonkeyPatch, **kwargs: object) -> None:
    monkeypatch.setitem(BACKENDS, "altered", Altered(**kwargs))  # type: ignore[arg-type]


@pytest.mark.parametrize("spoil", [lambda out: out.mul_(1.02), lambda out: out[-1, -1].fill_(float("nan"))])
def test_a_wrong_backend_is_not_timed(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], object]) -> None:
    altered(monkeypatch, spoil=spoil)
    (row,) = bench().rows((5,), ["altered"])
    assert row.record is None
    assert row.wrong
    assert "not timed" in row.note


def test_several_calls_of_few_tokens_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls of three tokens, of which the last is wrong; of five tokens the first two are compared."""
    for tokens, wrong in ((3, True), (5, False)):
        runs: list[int] = []

        def third(out: Tensor, runs: list[int] = runs) -> None:
            runs.append(0)
            if len(runs) == 3:
                out.mul_(1.02)

        altered(monkeypatch, spoil=third)
        (row,) = bench().rows((tokens,), ["altered"])
        assert row.wrong is wrong


def test_a_backend_that_goes_wrong_while_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def later(out: Tensor) -> None:
        runs.append(0)
        if len(runs) > 2:
            out.mul_(1.02)

    altered(monkeypatch, spoil=later)
    (row,) = bench().rows((5,), ["altered"])
    assert (row.record, row.wrong) == (None, True)
    assert "after" in row.note


def test_who_does_not_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    altered(monkeypatch, verdict=Accepted(max_tokens=4, capturable=True))
    rows = {row.tokens: row for row in bench().rows((4, 5), ["altered"])}
    assert rows[4].record is not None
    assert (rows[5].record, rows[5].note) == (None, "takes at most 4 tokens")

    altered(monkeypatch, verdict=Accepted(opt_in_reason="slow"))
    rows = {row.backend: row for row in bench().rows((1,))}
    assert (rows["altered"].tokens, rows["altered"].note) == (None, "slow")
    assert [row.record is None for row in bench().rows((1,), ["altered"])] == [False]

    odd = TINY.changed(hidden=36)
    rows = {row.backend: row for row in bench(odd, "bf16").rows((1,))}
    assert "multiple of 8" in rows["torch-dequantized"].note
    with pytest.raises(UnsupportedProblem, match="multiple of 8"):
        list(bench(odd, "bf16").rows((1,), ["torch-dequantized"]))
    with pytest.raises(ArgumentError, match="did you mean 'reference'"):
        list(bench().rows((1,), ["referense"]))


def test_different_calls_are_timed_together() -> None:
    assert (distinct_calls(512), distinct_calls(513)) == (8, 2)
    seen: list[int] = []
    together = TimedCalls([lambda i=i: seen.append(i) for i in range(4)], CPU, graph=True)
    seen.clear()
    timing = together.time()
    assert timing.by == "calls"
    assert len(seen) >= 3
    assert seen == [i % 4 for i in range(len(seen))]
    assert together.sustain(0.01) % 4 == 0


def test_rounds_in_turn() -> None:
    """Clocks that fall from round to round change all that are timed, and the medians are of the same round."""

    class Falling:
        def __init__(self, us: float) -> None:
            self.us = us

        def time(self, repeats: int, *, rest_seconds: float) -> Timing:
            asked.append((repeats, rest_seconds))
            order.append(self.us)
            self.us *= 1.5
            return Timing.of([self.us], "calls")

    asked: list[tuple[int, float]] = []
    order: list[float] = []
    timed = [Falling(10.0), Falling(20.0)]
    found = medians_in_turn(timed, 3, 5, rest_seconds=0.1)  # type: ignore[arg-type]
    assert found == [22.5, 45.0]
    assert order == [10.0, 20.0, 15.0, 30.0, 22.5, 45.0]
    assert set(asked) == {(5, 0.1)}


def test_quartiles() -> None:
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0], "calls") == Timing(3.0, 2.0, 4.0, "calls")


def test_a_trace(tmp_path: Path) -> None:
    list(bench(trace=tmp_path / "t.json").rows((2,), ["reference"]))
    events = json.loads((tmp_path / "t.reference-2.json").read_text())["traceEvents"]
    assert any("mm" in event.get("name", "") for event in events)
