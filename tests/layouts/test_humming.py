"""The layouts of Humming's kernels: exact inverses, and where each code and scale lies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polymoe.errors import PlanError
from polymoe.formats import FORMATS, Encoding, PerChannel, PerGroup
from polymoe.formats.int4 import Int4
from polymoe.layouts import LAYOUTS, Layout
from polymoe.problem.scale_range import ScaleRange
from polymoe.problem.tensors import Expert, ExpertWeights
from support.problems import random_experts

CPU = torch.device("cpu")
A16 = LAYOUTS["humming_a16"]
NATIVE = LAYOUTS["humming_a16_native"]
HELD = ["mxfp4", "nvfp4", "int4_g32", "int4_g128", "fp8_block128", "fp8_tensor"]


def with_zero_points() -> ExpertWeights:
    encoding = Encoding(element="int4", granularity=PerGroup(1, 64), scale_dtype="bfloat16", zero_points=True)
    gate_up, down = random_experts("bf16", hidden=256, intermediate=128).dequantize()
    return ExpertWeights.quantize(gate_up, down, Int4(encoding))


def with_bfloat16_channels() -> ExpertWeights:
    def one(expert: Expert) -> Expert:
        projections = {}
        for name, q in expert.projections.items():
            assert q.scales is not None
            encoding = replace(q.encoding, scale_dtype="bfloat16")
            projections[name] = replace(q, scales=q.scales.bfloat16(), encoding=encoding)
        return replace(expert, **projections)

    return ExpertWeights.of([one(e) for e in random_experts("fp8_channel", hidden=256, intermediate=128)])


def as_bytes(part: Tensor) -> Tensor:
    return part.reshape(-1).clone().view(torch.uint8)


@pytest.mark.parametrize("layout", [A16, NATIVE], ids=lambda layout: layout.name)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("format", [*HELD, "zero points", "channels"])
def test_round_trip(format: str, gated: bool, layout: Layout) -> None:
    made = {"zero points": with_zero_points, "channels": with_bfloat16_channels}.get(format)
    if made is not None and not gated:
        pytest.skip("made with a gate")
    weights = made() if made else random_experts(format, hidden=256, intermediate=384, gated=gated, bias=True)
    assert layout.check(weights.spec) == ()
    packed = layout.pack(weights, CPU)
    assert packed.nbytes == layout.nbytes(weights.spec)
    refilled = layout.pack(weights, CPU, out=packed)
    for found in (layout.unpack(packed), layout.unpack(refilled)):
        for got, expected in zip(found, weights, strict=True):
            parts = expected.parts()
            assert got.parts().keys() == parts.keys()
            for name, part in got.parts().items():
                assert (part.dtype, part.shape) == (parts[name].dtype, parts[name].shape)
                assert torch.equal(as_bytes(part), as_bytes(parts[name])), name


def test_another_spec_is_refused() -> None:
    packed = A16.pack(random_experts("mxfp4", hidden=128, intermediate=128), CPU)
    with pytest.raises(PlanError, match="update"):
        A16.pack(random_experts("mxfp4", hidden=128, intermediate=256), CPU, out=packed)


@pytest.mark.parametrize("layout", [A16, NATIVE], ids=lambda layout: layout.name)
@pytest.mark.parametrize("format", ["mxfp4", "int4_g32", "fp8_block128"])
def test_where_a_code_lies(format: str, layout: Layout) -> None:
    """In the words of a lane of an m16n8k16 MMA, by the place of a weight in its tile of 64 rows and 16 columns."""
    weights = random_experts(format, experts=1, hidden=256, intermediate=128, gated=False)
    bits, up = weights.spec.up.bits, weights.expert(0).up.codes.view(torch.uint8)
    words = layout.pack(weights, CPU).tensors["up.codes"][0].view(torch.int32)
    native = layout is NATIVE and format != "int4_g32"
    for n, k in ((0, 0), (0, 1), (1, 0), (8, 0), (16, 0), (0, 8), (63, 15), (64, 16), (77, 203), (127, 255)):
        row, column = n % 64, k % 16
        lane = row % 8 * 4 + column % 8 // 2
        block, half = row // 16, row % 16 // 8
        word, p, d = block if bits == 4 else block * 2 + half, column % 2, column // 8
        if native:  # the columns of a pair are neighbours
            place = half * (4 if bits == 4 else 0) + d * 2 + p
        else:  # the columns of a pair are 16 bits apart
            place = p * 4 + half * 2 + d if bits == 4 else p * 2 + d
        at = ((k // 16 * 2 + n // 64) * 32 + lane) * bits + word
        code = int(words[at]) >> place * bits & (1 << bits) - 1
        expected = up[n, k] if bits == 8 else up[n, k // 2] >> 4 * (k % 2) & 15
        assert code == int(expected), (n, k)


def test_where_scales_lie() -> None:
    weights = random_experts("int4_g32", experts=1, hidden=256, intermediate=128)
    scales = A16.pack(weights, CPU).tensors["up.scales"][0].view(torch.bfloat16)
    rows = torch.cat([weights.expert(0).gate.scales, weights.expert(0).up.scales])  # type: ignore[union-attr]
    for n, group in ((0, 0), (1, 0), (8, 0), (64, 3), (203, 7)):
        assert scales[group * 256 + n // 64 * 64 + n % 8 * 8 + n % 64 // 8] == rows[n, group]
    channels = with_bfloat16_channels()
    scales = A16.pack(channels, CPU).tensors["down.scales"][0].view(torch.bfloat16)
    down = channels.expert(0).down.scales
    assert down is not None
    for n in (0, 1, 2, 8, 31, 32, 203):
        assert scales[n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 8 * 2 + n % 2] == down[n, 0]


def test_every_reason() -> None:
    spec = random_experts("mxfp4", experts=1, hidden=2880, intermediate=2880).spec
    assert {str(r) for r in A16.check(spec)} == {f"{s}: expects a multiple of 128, got 2880" for s in "HF"}
    spec = random_experts("mxfp4", experts=1, hidden=128, intermediate=128).spec
    assert A16.check(spec) == A16.check(spec, ScaleRange()) == ()
    assert [r.what for r in A16.check(spec, ScaleRange(largest_exponent=26))] == ["scales"]
    e4m3 = FORMATS["fp8_block128"].encoding
    odd = {
        "scales": replace(e4m3, granularity=PerGroup(64, 128)),
        "rounded scales": replace(e4m3, granularity=PerChannel()),
        "elements": FORMATS["bf16"].encoding,
        "zero points": replace(FORMATS["int4_g32"].encoding, granularity=PerChannel(), zero_points=True),
    }
    for what, encoding in odd.items():
        found = A16.check(replace(spec, gate=encoding, up=encoding, down=encoding))
        assert [r.what for r in found] == [f"{p} {what.removeprefix('rounded ')}" for p in ("gate", "up", "down")]
    mxfp8 = replace(e4m3, granularity=PerGroup(1, 32), scale_dtype="e8m0")
    assert A16.check(replace(spec, gate=mxfp8, up=mxfp8, down=mxfp8)) == ()
