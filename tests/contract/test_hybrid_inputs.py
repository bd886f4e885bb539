"""Backends that keep 16-bit inputs, or exact sums, for few tokens, and round to NVFP4, or accumulate fast, for many:
their plans, and what results are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
from polymoe.problem.activation_quantization import FP8_TOKEN, FP8_TOKEN_FAST, NVFP4, UNQUANTIZED
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


@dataclass(frozen=True, slots=True)
class SumsConfig(Config):
    exact: bool = False

    @property
    def kernel_family(self) -> str:
        return "exact" if self.exact else "fast"

    @property
    def fast_accumulation(self) -> bool:
        return not self.exact


@dataclass(frozen=True)
class TwoSteps(Toy):
    """Another configuration for few tokens. ``always``: a backend that is wrong, as it runs the other one for them."""

    config: ClassVar[type[InputConfig | SumsConfig]]
    runner: ClassVar[type[ToyRunner]]
    always: bool = False

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> Config:
        return self.config(tokens <= MOST_PLAIN)

    def token_bounds(self, problem: Problem, machine: Machine) -> Sequence[int]:
        return (MOST_PLAIN,)

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        return self.runner(self, problem, packed)


@dataclass(frozen=True)
class HybridRunner(ToyRunner):
    def run(self, call: CallArguments, config: Config) -> None:
        assert isinstance(config, InputConfig)
        assert isinstance(self.toy, Hybrid)
        mode = UNQUANTIZED if config.plain and not self.toy.always else NVFP4
        weights = LAYOUTS[self.packed.layout].unpack(self.packed)
        call.out_TH.copy_(run_experts(replace(self.problem, activations=mode), weights, call.x_TH, call.routing))


class Hybrid(TwoSteps):
    config, runner = InputConfig, HybridRunner


@dataclass(frozen=True)
class CoarseRunner(ToyRunner):
    def run(self, call: CallArguments, config: Config) -> None:
        assert isinstance(config, SumsConfig)
        assert isinstance(self.toy, Coarse)
        weights = LAYOUTS[self.packed.layout].unpack(self.packed)
        y_TH = run_experts(self.problem, weights, call.x_TH, call.routing)
        call.out_TH.copy_(y_TH if config.exact and not self.toy.always else y_TH * 1.01)


class Coarse(TwoSteps):
    """Results are 1 % too large with fast accumulation."""

    config, runner = SumsConfig, CoarseRunner


def coarse(**kwargs: Any) -> Coarse:
    return Coarse("coarse", layouts=("natural",), handles={**HANDLES, "activations": (FP8_TOKEN_FAST,)}, **kwargs)


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
        FusedExperts.pack(problem, weights, choice({"hybrid": hybrid(always=True)}))


def test_a_larger_error_is_allowed_only_where_sums_are_fast() -> None:
    weights = random_experts("mxfp4", hidden=64, intermediate=64)
    problem = problem_of(weights, activations="fp8_token_fast_accumulation")
    experts = FusedExperts.pack(problem, weights, choice({"coarse": coarse()}))
    ranges = [(tokens, step.config.kernel_family) for tokens, step in experts.explain().require().ranges()]
    assert ranges == [("1-19", "exact"), ("20+", "fast")]
    with pytest.raises(VerificationError, match=r"backend 'coarse' \(exact=True\).*at most 0.006 against"):
        FusedExperts.pack(problem, weights, choice({"coarse": coarse(always=True)}))


@pytest.mark.parametrize(
    ("backend", "format", "mode", "found"),
    [
        (hybrid(), "nvfp4", NVFP4, (UNQUANTIZED, NVFP4)),
        (hybrid(always=True), "nvfp4", NVFP4, (None, NVFP4)),
        (coarse(), "mxfp4", FP8_TOKEN_FAST, (FP8_TOKEN, FP8_TOKEN_FAST)),
        (coarse(always=True), "mxfp4", FP8_TOKEN_FAST, (None, FP8_TOKEN_FAST)),
    ],
    ids=("hybrid", "hybrid, wrong", "coarse", "coarse, wrong"),
)
def test_records_say_how_inputs_were_rounded(
    monkeypatch: pytest.MonkeyPatch, backend: Toy, format: str, mode: Any, found: tuple[Any, ...]
) -> None:
    """And sums added; a result that is wrong for that has none."""
    table = {backend.name: backend}
    monkeypatch.setattr("polymoe.bench.contenders.BACKENDS", table)
    monkeypatch.setattr("polymoe.backends.BACKENDS", table)
    workload = Workload.of_case(TINY, CPU, format, mode)
    bench = Bench(
        workload=workload,
        distribution=RoutingDistribution("uniform"),
        machine=Machine.of("cpu"),
        device=CPU,
        stamp=STAMP,
    )
    rows: list[BenchRow] = list(bench.rows([4, 32], [backend.name]))
    assert [row.record.activations if row.record else None for row in rows] == [mode and str(mode) for mode in found]
    assert [row.wrong for row in rows] == [mode is None for mode in found]
