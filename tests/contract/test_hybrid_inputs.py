"""A backend that keeps 16-bit inputs for few tokens and rounds them to NVFP4 for many: its plan, and what its results
are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from polymoe.backends.base import Runner
from polymoe.backends.config import Config
from polymoe.backends.reference import run_experts
from polymoe.bench.cases import Workload
from polymoe.bench.measure import Bench, BenchRow
from polymoe.bench.routings import RoutingDistribution
from polymoe.errors import VerificationError
from polymoe.layer.experts import FusedExperts
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import NVFP4, UNQUANTIZED
from polymoe.problem.call import CallArguments
from support.problems import problem_of, random_call, random_experts
from support.tiny import CPU, STAMP, TINY
from support.toys import HANDLES, LAYOUTS, Toy, ToyRunner, choice

MOST_PLAIN = 19


@dataclass(frozen=True, slots=True)
class InputConfig(Config):
    plain: bool = False

    @property
    def kernel_family(self) -> str:
        return "plain" if self.plain else "rounded"

    @property
    def keeps_16_bits(self) -> bool:
        return self.plain


@dataclass(frozen=True)
class Hybrid(Toy):
    rounds_always: bool = False

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> Config:
        return InputConfig(tokens <= MOST_PLAIN)

    def token_bounds(self, problem: Problem, machine: Machine) -> Sequence[int]:
        return (MOST_PLAIN,)

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        return HybridRunner(self, problem, packed)


@dataclass(frozen=True)
class HybridRunner(ToyRunner):
    def run(self, call: CallArguments, config: Config) -> None:
        assert isinstance(config, InputConfig)
        assert isinstance(self.toy, Hybrid)
        mode = UNQUANTIZED if config.plain and not self.toy.rounds_always else NVFP4
        weights = LAYOUTS[self.packed.layout].unpack(self.packed)
        call.out_TH.copy_(run_experts(replace(self.problem, activations=mode), weights, call.x_TH, call.routing))


def hybrid(**kwargs: Any) -> Hybrid:
    return Hybrid("hybrid", layouts=("natural",), handles={**HANDLES, "activations": (NVFP4,)}, **kwargs)


def test_each_step_is_compared_with_what_it_computes() -> None:
    weights = random_experts("nvfp4", hidden=64, intermediate=64)
    problem = problem_of(weights, activations="nvfp4")
    experts = FusedExperts.pack(problem, weights, choice({"hybrid": hybrid()}))
    ranges = [(tokens, step.config.kernel_family) for tokens, step in experts.explain().require().ranges()]
    assert ranges == [("1-19", "plain"), ("20+", "rounded")]
    for tokens, mode in ((19, UNQUANTIZED), (20, NVFP4)):
        x, routing = random_call(tokens, 64, 5)
        assert torch.equal(experts(x, *routing), run_experts(replace(problem, activations=mode), weights, x, routing))
    with pytest.raises(VerificationError, match=r"backend 'hybrid' \(plain=True\).*at most 0.006 against"):
        FusedExperts.pack(problem, weights, choice({"hybrid": hybrid(rounds_always=True)}))


@pytest.mark.parametrize("rounds_always", [False, True])
def test_records_say_how_inputs_were_rounded(monkeypatch: pytest.MonkeyPatch, rounds_always: bool) -> None:
    table = {"hybrid": hybrid(rounds_always=rounds_always)}
    monkeypatch.setattr("polymoe.bench.contenders.BACKENDS", table)
    monkeypatch.setattr("polymoe.backends.BACKENDS", table)
    workload = Workload.of_case(TINY, CPU, "nvfp4", "nvfp4")
    bench = Bench(
        workload=workload,
        distribution=RoutingDistribution("uniform"),
        machine=Machine.of("cpu"),
        device=CPU,
        stamp=STAMP,
    )
    rows: list[BenchRow] = list(bench.rows([4, 32], ["hybrid"]))
    found = [(row.wrong, row.record.activations if row.record else None) for row in rows]
    assert found == [(True, None) if rounds_always else (False, "16bit"), (False, "nvfp4")]
