"""Experts of every byte, for the round trips of layouts."""

from __future__ import annotations

import torch

from polymoe.formats import FORMATS, QuantTensor
from polymoe.formats.elements import SCALE_DTYPES
from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights


def every_byte(format: str, hidden: int, intermediate: int, *, gated: bool = True, seed: int = 0) -> ExpertWeights:
    """Experts of random bytes, so that no bit of codes or scales is always the same."""
    g = torch.Generator().manual_seed(seed)
    e = FORMATS[format].encoding
    shapes = {"up": (intermediate, hidden), "down": (hidden, intermediate)} | (
        {"gate": (intermediate, hidden)} if gated else {}
    )
    experts = []
    for _ in range(2):
        parts: dict[str, QuantTensor | None] = {"gate": None}
        for name, shape in shapes.items():
            codes = torch.randint(256, e.codes_shape(*shape), generator=g, dtype=torch.uint8)
            if e.granularity is None:
                parts[name] = QuantTensor(torch.randn(shape, generator=g).bfloat16(), e)
                continue
            if e.element == "e4m3":
                codes = codes.view(torch.float8_e4m3fn)
            grid = e.granularity.scale_shape(*shape)
            if e.scale_dtype == "e8m0":
                scales = torch.randint(153, grid, generator=g, dtype=torch.uint8).view(torch.float8_e8m0fnu)
            elif e.scale_dtype == "e4m3":
                scales = torch.randint(1, 127, grid, generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)
            else:
                scales = torch.rand(grid, generator=g).to(SCALE_DTYPES[e.scale_dtype or ""])
            world = torch.rand((), generator=g) if e.global_scale else None
            parts[name] = QuantTensor(codes, e, scales, global_scale=world)
        experts.append(Expert(**parts))  # type: ignore[arg-type]
    return ExpertWeights.of(experts)


def assert_same(got: ExpertWeights, expected: ExpertWeights) -> None:
    for x, y in zip(got, expected, strict=True):
        for name, projection in y.projections.items():
            for part, value in projection.parts().items():
                found = x.projections[name].parts()[part]
                assert found.dtype == value.dtype
                if value.element_size() == 1:  # with what is not a number
                    found, value = found.view(torch.uint8), value.view(torch.uint8)
                assert torch.equal(found, value), (name, part)


def spec_of(format: str, hidden: int, intermediate: int, gated: bool = True) -> ExpertsSpec:
    e = FORMATS[format].encoding
    return ExpertsSpec(hidden=hidden, intermediate=intermediate, experts=8, gate=e if gated else None, up=e, down=e)
