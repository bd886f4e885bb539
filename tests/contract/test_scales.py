"""Scales outside what a layout's kernels decode: found when they are read, and another layout is taken, or none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from polymoe.backends import Backend
from polymoe.backends.base import Runner
from polymoe.backends.reference import Reference, run_experts
from polymoe.errors import PlanError, UnsupportedProblem
from polymoe.experts import FusedExperts
from polymoe.formats import QuantTensor
from polymoe.layouts import LAYOUTS, Packed
from polymoe.machine import Machine
from polymoe.numerics import relative_error
from polymoe.problem import Problem
from polymoe.runtime import PlanRequest
from polymoe.tensors import ExpertWeights
from polymoe.verdict import Reasons, Verdict
from support.problems import problem_of, random_call, random_experts
from support.toys import Toy


@dataclass(frozen=True)
class Fast(Toy):
    """Reads a layout of the CUDA kernels, on a CPU."""

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        reasons = Reasons()
        reasons.need(not problem.wide_scales, "scales", "usual ones", "scales outside this range")
        return reasons.verdict(super().check(problem, machine))  # type: ignore[arg-type]

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        return Reference().bind(problem, packed)


def choice(layout: str, backend: str = "auto") -> PlanRequest:
    table: dict[str, Backend] = {"fast": Fast("fast", layouts=(layout,), times_floor=1.1), "reference": Reference()}
    return PlanRequest(Machine.of("cpu"), "mixed", backend, table, LAYOUTS)


def with_one_scale(weights: ExpertWeights, byte: int) -> ExpertWeights:
    """The same experts; one scale of the last one is another byte."""
    last = weights.spec.local_experts - 1

    def changed(q: QuantTensor) -> QuantTensor:
        assert q.scales is not None
        scales = q.scales.clone()
        scales.view(torch.uint8)[3, 1] = byte
        return replace(q, scales=scales)

    return ExpertWeights.of([replace(x, down=changed(x.down)) if e == last else x for e, x in enumerate(weights)])


WIDE = pytest.mark.parametrize(
    ("format", "byte", "layout"),
    [
        ("mxfp4", 153, "w4a16_fragments"),
        ("nvfp4", 0x88, "w4a16_fragments"),
        ("mxfp4", 147, "w4a8_fragments"),  # too far above the others of its row
    ],
)


@WIDE
def test_auto_takes_a_layout_that_holds_them(format: str, byte: int, layout: str) -> None:
    usual = random_experts(format, intermediate=128)
    assert FusedExperts.pack(problem_of(usual), usual, choice(layout)).packed.layout == layout
    weights = with_one_scale(usual, byte)
    experts = FusedExperts.pack(problem_of(weights), weights, choice(layout))
    assert (experts.packed.layout, experts.problem.wide_scales) == ("natural", True)
    assert "fast: scales: expects usual ones, got scales outside this range" in str(experts.explain())
    x, routing = random_call(6, 64, 5)
    assert relative_error(experts(x, *routing), run_experts(experts.problem, weights, x, routing)) < 1e-6


@WIDE
def test_a_named_backend_is_refused_with_its_reason(format: str, byte: int, layout: str) -> None:
    weights = with_one_scale(random_experts(format, intermediate=128), byte)
    with pytest.raises(UnsupportedProblem, match=r'fast: scales: expects usual ones(.|\n)*hint: backend="reference"'):
        FusedExperts.pack(problem_of(weights), weights, choice(layout, "fast"))


@WIDE
def test_an_update_with_them_is_refused(format: str, byte: int, layout: str) -> None:
    usual = random_experts(format, intermediate=128)
    experts = FusedExperts.pack(problem_of(usual), usual, choice(layout))
    with pytest.raises(PlanError, match="load these experts anew"):
        experts.update(with_one_scale(usual, byte))
    before = {n: b.data_ptr() for n, b in experts.named_buffers()}
    experts.update(usual)
    assert {n: b.data_ptr() for n, b in experts.named_buffers()} == before
    experts.check(usual)
