from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polymoe.errors import PlanError
from polymoe.formats import FORMATS
from polymoe.layouts import LAYOUTS, Natural
from polymoe.problem.tensors import Expert
from support.problems import random_experts

CPU = torch.device("cpu")


def parts(expert: Expert) -> dict[str, torch.Tensor]:
    found = {f"{p}.{n}": t for p, q in expert.projections.items() for n, t in q.parts().items()}
    return {**found, **expert.vectors}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_round_trip_is_exact(format: str, gated: bool) -> None:
    """In every layout that takes these experts, which the natural one always does."""
    weights = random_experts(format, gated=gated, bias=gated, hidden=160, intermediate=96)
    layouts = [layout for layout in LAYOUTS.values() if not layout.check(weights.spec)]
    assert "natural" in [layout.name for layout in layouts]
    for layout in layouts:
        packed = layout.pack(weights, CPU)
        back = layout.unpack(packed)
        assert back.spec == weights.spec
        for got, expected in zip(back, weights, strict=True):
            assert parts(got).keys() == parts(expected).keys()
            for name, tensor in parts(expected).items():
                assert torch.equal(parts(got)[name].float(), tensor.float()), (layout.name, name)
        assert packed.nbytes == layout.nbytes(weights.spec)


def test_repacking_in_place_keeps_the_tensors() -> None:
    weights, other = random_experts(seed=1), random_experts(seed=2)
    packed = Natural().pack(weights, CPU)
    addresses = {n: t.data_ptr() for n, t in packed.tensors.items()}
    again = Natural().pack(other, CPU, out=packed)
    assert {n: t.data_ptr() for n, t in again.tensors.items()} == addresses
    assert torch.equal(again.tensors["up.codes"], Natural().pack(other, CPU).tensors["up.codes"])


def test_repacking_other_sizes_is_refused() -> None:
    packed = Natural().pack(random_experts(), CPU)
    with pytest.raises(PlanError, match="load these experts again"):
        Natural().pack(random_experts(hidden=96), CPU, out=packed)


def test_experts_must_agree_on_what_they_have() -> None:
    weights = random_experts()
    bias = torch.zeros(weights.spec.hidden)

    def read(e: int) -> Expert:
        return weights.expert(e) if e else replace(weights.expert(e), down_bias=bias)

    with pytest.raises(PlanError, match="down_bias"):
        Natural().pack(type(weights)(weights.spec, read), CPU)


@pytest.mark.parametrize("calibrated", [{0}, {3}, {1, 2}, {0, 4}, set()], ids=str)
def test_p10_experts_that_were_never_calibrated_have_no_input_scale(calibrated: set[int]) -> None:
    weights = random_experts()

    def read(e: int) -> Expert:
        scale = torch.tensor(0.5 + e) if e in calibrated else None
        return replace(weights.expert(e), gate_up_input_scale=scale)

    some = type(weights)(weights.spec, read)
    packed = Natural().pack(some, CPU)
    got = [x.gate_up_input_scale for x in Natural().unpack(packed)]
    assert [None if s is None else float(s) for s in got] == [0.5 + e if e in calibrated else None for e in range(5)]
    again = Natural().pack(some, CPU, out=packed)
    assert {e for e, x in enumerate(Natural().unpack(again)) if x.gate_up_input_scale is not None} == calibrated
