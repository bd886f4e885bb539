"""The range of scales, also of rows whose last group is partial."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polymoe.errors import PolymoeError
from polymoe.formats import FORMATS, QuantTensor
from polymoe.layer.experts import FusedExperts
from polymoe.layouts import LAYOUTS
from polymoe.problem.activations import SwiGLU
from polymoe.problem.numerics import relative_error
from polymoe.problem.scale_range import ScaleRange, measure_scales
from polymoe.problem.tensors import Expert, ExpertWeights
from support.problems import plain_experts, problem_of, random_call, random_experts

SIZES = (34, 40, 48, 72, 100)


def with_scales(weights: ExpertWeights, scale: int, zero: int | None = None) -> ExpertWeights:
    """One scale, in the last group of a row of up, far from the others; ``zero``: the first column of zeros there."""

    def read(e: int) -> Expert:
        expert = weights.expert(e)
        up: QuantTensor = expert.up.map(torch.clone)
        assert up.scales is not None
        scales = up.scales.view(torch.uint8)
        scales[0], scales[0, -1] = 125, scale
        if zero is not None:
            up.codes[0, zero // 2 :] = 0
        return replace(expert, up=up)

    return ExpertWeights(weights.spec, read)


def _same(part: Tensor, other: Tensor) -> bool:
    return torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (part, other)))


@pytest.mark.parametrize("hidden", SIZES)
def test_a_partial_group_has_its_own_columns(hidden: int) -> None:
    last = hidden // 32 * 32
    weights = random_experts("mxfp4", hidden=hidden, intermediate=64)
    assert measure_scales(with_scales(weights, 100)) == ScaleRange(spread=25)
    assert measure_scales(with_scales(weights, 100, zero=last)) is None
    assert measure_scales(with_scales(weights, 100, zero=last + 2)) is not None or last + 2 >= hidden


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "nvfp4", "int4_g32", "int4_g128", "fp8_block128"])
@pytest.mark.parametrize("hidden", SIZES)
def test_partial_groups_are_right_wherever_they_are_not_refused(format: str, hidden: int) -> None:
    weights = random_experts(format, hidden=hidden, intermediate=66)
    x, routing = random_call(5, hidden, 5)
    expected = plain_experts(weights, problem_of(weights), x, routing)
    for backend in ("torch", "reference"):
        experts = FusedExperts.from_weights(weights, SwiGLU(), top_k=2, device="cpu", backend=backend)
        assert relative_error(experts(x, *routing), expected) < 1e-6
    for layout in LAYOUTS.values():
        if layout.check(weights.spec):
            continue
        found = layout.unpack(layout.pack(weights, torch.device("cpu")))
        for e in range(5):
            for name, part in weights.expert(e).parts().items():
                assert _same(found.expert(e).parts()[name], part), name


@pytest.mark.parametrize("columns", SIZES)
def test_dialects_write_partial_groups_as_they_read_them_or_refuse(columns: int) -> None:
    from polymoe.checkpoint.dialects import DIALECTS
    from polymoe.checkpoint.dialects.base import headers_of

    for dialect in DIALECTS.values():
        for format in FORMATS.values():
            if format.encoding.bits == 4 and columns % 2:
                continue
            matrix = format.quantize(torch.randn(64, columns))
            try:
                stored = dialect.write(matrix)
            except PolymoeError:
                continue
            found = dialect.read(stored, (64, columns), matrix.encoding)
            # compressed-tensors stores the reciprocal of NVFP4's global scale, whose own may be one float32 further on.
            rtol = 3e-7 if dialect.name == "ct_nvfp4" else 0
            close = torch.allclose(found.dequantize(), matrix.dequantize(), rtol=rtol, atol=0)
            assert close, (dialect.name, format.name, headers_of(stored))
