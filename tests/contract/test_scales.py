"""Scales outside what a layout's kernels decode: measured before planning, which takes another layout or none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from polymoe.backends import Backend
from polymoe.backends.base import Runner
from polymoe.backends.features import ANY
from polymoe.backends.reference import Reference, run_experts
from polymoe.errors import PlanError, UnsupportedProblem
from polymoe.formats import QuantTensor
from polymoe.layer.experts import FusedExperts
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS, Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.numerics import relative_error
from polymoe.problem.scale_range import ScaleRange, measure_scales
from polymoe.problem.tensors import Expert, ExpertWeights
from support import toys
from support.problems import problem_of, random_call, random_experts
from support.toys import Toy


@dataclass(frozen=True)
class Fast(Toy):
    """Reads a layout of the CUDA kernels, on a CPU."""

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        return Reference().bind(problem, packed)


HANDLES = {**toys.HANDLES, "scales": ANY}


def choice(layout: str, backend: str = "auto") -> PlanRequest:
    fast = Fast("fast", layouts=(layout,), times_floor=1.1, handles=HANDLES)
    table: dict[str, Backend] = {"fast": fast, "reference": Reference()}
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
    ("format", "byte", "layout", "scales", "reason"),
    [
        (
            "mxfp4", 153, "w4a16_fragments", ScaleRange(largest_exponent=26, spread=31),
            "E8M0 scales of at most 2**25, got scales up to 2**26, 2**31 apart",
        ),
        (
            "nvfp4", 0x88, "w4a16_fragments", ScaleRange(negative=True),
            "E4M3 scales from 0 to 448, got scales negative",
        ),
        (
            "mxfp4", 147, "w4a8_fragments", ScaleRange(spread=25),
            "scales of a row within 2**14 of each other, got scales 2**25 apart",
        ),
    ],
)  # fmt: skip


def test_mxfp8_scales_count_only_by_their_size() -> None:
    usual = random_experts("mxfp8", intermediate=128)
    assert measure_scales(with_one_scale(usual, 1)) is None
    assert measure_scales(with_one_scale(usual, 153)) == ScaleRange(largest_exponent=26)


@WIDE
def test_auto_takes_a_layout_that_holds_them(
    format: str, byte: int, layout: str, scales: ScaleRange, reason: str
) -> None:
    usual = random_experts(format, intermediate=128)
    assert measure_scales(usual) is None
    assert FusedExperts.pack(problem_of(usual), usual, choice(layout)).packed.layout == layout
    weights = with_one_scale(usual, byte)
    experts = FusedExperts.pack(problem_of(weights), weights, choice(layout))
    assert (experts.packed.layout, experts.problem.scales) == ("natural", scales)
    assert f"fast: layout {layout}, scales: expects {reason}" in str(experts.explain())
    x, routing = random_call(6, 64, 5)
    assert relative_error(experts(x, *routing), run_experts(experts.problem, weights, x, routing)) < 1e-6
    experts.update(usual)  # ordinary scales fit every plan
    assert relative_error(experts(x, *routing), run_experts(experts.problem, usual, x, routing)) < 1e-6


@WIDE
def test_a_named_backend_is_refused_with_its_reason(
    format: str, byte: int, layout: str, scales: ScaleRange, reason: str
) -> None:
    weights = with_one_scale(random_experts(format, intermediate=128), byte)
    with pytest.raises(UnsupportedProblem, match='hint: backend="reference"') as error:
        FusedExperts.pack(problem_of(weights), weights, choice(layout, "fast"))
    assert reason in str(error.value)


@WIDE
def test_an_update_with_them_is_refused(format: str, byte: int, layout: str, scales: ScaleRange, reason: str) -> None:
    usual = random_experts(format, intermediate=128)
    experts = FusedExperts.pack(problem_of(usual), usual, choice(layout))
    x, routing = random_call(6, 64, 5)
    before, y = {n: b.data_ptr() for n, b in experts.named_buffers()}, experts(x, *routing)
    with pytest.raises(PlanError, match="load these experts again"):
        experts.update(with_one_scale(usual, byte))
    assert torch.equal(experts(x, *routing), y)  # nothing was changed
    experts.update(usual)
    assert {n: b.data_ptr() for n, b in experts.named_buffers()} == before
    experts.check(usual)


@WIDE
def test_a_backend_that_does_not_declare_them_is_refused(
    format: str, byte: int, layout: str, scales: ScaleRange, reason: str
) -> None:
    weights = with_one_scale(random_experts(format, intermediate=128), byte)
    plain = {"plain": Fast("plain", layouts=("natural",))}
    with pytest.raises(UnsupportedProblem, match=r"plain: scales .*: not supported"):
        FusedExperts.pack(
            problem_of(weights), weights, PlanRequest(Machine.of("cpu"), "mixed", "plain", plain, LAYOUTS)
        )


def test_groups_of_zeros_do_not_count() -> None:
    weights = with_one_scale(random_experts("mxfp4", intermediate=128), 147)
    assert measure_scales(weights) == ScaleRange(spread=25)
    last = list(weights)[-1]
    codes = last.down.codes.clone()
    codes[3, 16:32] = 0x80  # the group that the scale belongs to: zeros of either sign
    without = replace(last, down=replace(last.down, codes=codes))
    assert measure_scales(ExpertWeights.of([*list(weights)[:-1], without])) is None


def test_codes_are_read_only_where_scales_lie_far_apart() -> None:
    weights, read = random_experts("mxfp4", intermediate=128), []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            read.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    def watched(e: int) -> Expert:
        return weights.expert(e).map(lambda part: part.as_subclass(Watched) if part.dtype == torch.uint8 else part)

    assert measure_scales(ExpertWeights(weights.spec, watched)) is None
    assert {f.__name__ for f in read} <= {"__get__", "dim", "size", "numel"}


def test_ranges() -> None:
    usual = ScaleRange()
    assert usual.ordinary
    assert not ScaleRange(spread=15).ordinary
    assert not ScaleRange(spread=15).outside_bfloat16
    assert ScaleRange(largest_exponent=26).outside_bfloat16
    for one, two in ((usual, ScaleRange(spread=15)), (usual, ScaleRange(negative=True))):
        assert two.covers(one)
        assert not one.covers(two)
