"""The layout of MXFP4 weights for E4M3 rows: scales as powers of two below the largest of their row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polymoe.errors import FormatError
from polymoe.formats import FORMATS, QuantTensor, format_of
from polymoe.layouts import LAYOUTS
from polymoe.layouts.cuda.w4a8_fragments import BITS, MOST_STEP, SIGNED_BITS
from polymoe.problem.tensors import Expert, ExpertsSpec, ExpertWeights
from support.problems import random_experts

CPU = torch.device("cpu")
LAYOUT = LAYOUTS["w4a8_fragments"]
SIZES = [(4096, 64), (2880, 192), (64, 1536), (448, 320)]


def random_bytes(hidden: int, intermediate: int, seed: int = 0) -> ExpertWeights:
    """Codes of every kind; scales of a row as far apart as they may be, from the least to the largest there is."""
    g = torch.Generator().manual_seed(seed)
    e = FORMATS["mxfp4"].encoding

    def matrix(rows: int, columns: int) -> QuantTensor:
        codes = torch.randint(256, e.codes_shape(rows, columns), generator=g, dtype=torch.uint8)
        largest = torch.randint(MOST_STEP, 255, (rows, 1), generator=g, dtype=torch.uint8)
        scales = largest - torch.randint(MOST_STEP + 1, (rows, columns // 32), generator=g, dtype=torch.uint8)
        return QuantTensor(codes, e, scales.view(torch.float8_e8m0fnu))

    def expert() -> Expert:
        gate, up = (matrix(intermediate, hidden) for _ in range(2))
        return Expert(gate=gate, up=up, down=matrix(hidden, intermediate))

    return ExpertWeights.of([expert() for _ in range(2)])


def changed(weights: ExpertWeights, row: int, group: int, byte: int, zeros: bool) -> ExpertWeights:
    """Another scale in the last expert's ``down``, of a group that is all ``zeros`` or not."""

    def read(e: int) -> Expert:
        expert = weights.expert(e)
        if e + 1 < weights.spec.local_experts:
            return expert
        codes, scales = expert.down.codes.clone(), expert.down.scales
        assert scales is not None
        codes[row, group * 16 : group * 16 + 16] = 0x80 if zeros else 0x10  # of zeros, half are negative
        scales = scales.view(torch.uint8).clone()
        scales[row, group] = byte
        return replace(expert, down=replace(expert.down, codes=codes, scales=scales.view(torch.float8_e8m0fnu)))

    return ExpertWeights(weights.spec, read)


def assert_same(got: ExpertWeights, expected: ExpertWeights) -> None:
    for x, y in zip(got, expected, strict=True):
        for name, projection in y.projections.items():
            for part, value in projection.parts().items():
                mine = x.projections[name].parts()[part]
                assert torch.equal(mine.view(torch.uint8), value.view(torch.uint8)), (name, part)


def test_bits_have_places_of_their_own() -> None:
    assert sorted(BITS) == sorted(SIGNED_BITS) == list(range(32))


@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_round_trip(hidden: int, intermediate: int) -> None:
    weights, other = random_bytes(hidden, intermediate), random_bytes(hidden, intermediate, seed=1)
    packed = LAYOUT.pack(weights, CPU)
    assert packed.nbytes == LAYOUT.nbytes(weights.spec)
    assert_same(LAYOUT.unpack(packed), weights)
    assert_same(LAYOUT.unpack(LAYOUT.pack(other, CPU, out=packed)), other)


@pytest.mark.parametrize("scales", ["bfloat16", "float16"])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_round_trip_of_int4(hidden: int, intermediate: int, zero_points: bool, scales: str) -> None:
    """Bytes as they were, without any that no kernel reads."""
    encoding = replace(FORMATS["int4_g128"].encoding, scale_dtype=scales, zero_points=zero_points)
    weights = random_experts(format_of(encoding), hidden=hidden, intermediate=intermediate, experts=2)
    assert LAYOUT.check(weights.spec) == ()
    packed = LAYOUT.pack(weights, CPU)
    assert packed.nbytes == LAYOUT.nbytes(weights.spec)
    assert not any("rest" in name for name in packed.tensors)
    assert_same(LAYOUT.unpack(packed), weights)


@pytest.mark.parametrize("byte", [0, 250])
def test_a_group_of_zeros_may_have_any_scale(byte: int) -> None:
    weights = changed(random_experts(hidden=128, intermediate=128), 5, 2, byte, zeros=True)
    unpacked = LAYOUT.unpack(LAYOUT.pack(weights, CPU))
    for got, expected in zip(unpacked, weights, strict=True):
        assert torch.equal(got.down.codes, expected.down.codes)
        assert torch.equal(got.down.dequantize(), expected.down.dequantize())


@pytest.mark.parametrize("away", [MOST_STEP + 1, 100])
def test_scales_too_far_apart(away: int) -> None:
    plain = random_experts(hidden=128, intermediate=128)
    scales = plain.expert(4).down.scales
    assert scales is not None
    largest = int(scales.view(torch.uint8)[5].max())
    LAYOUT.pack(changed(plain, 5, 2, largest - MOST_STEP, zeros=False), CPU)
    expected = (
        rf"expert 4 down scales: expected scales of a row within 2\*\*14 of each other, got some 2\*\*{away} apart"
    )
    with pytest.raises(FormatError, match=expected):
        LAYOUT.pack(changed(plain, 5, 2, largest - away, zeros=False), CPU)


def test_what_it_holds() -> None:
    e = FORMATS["mxfp4"].encoding
    spec = ExpertsSpec(hidden=4096, intermediate=2048, experts=8, gate=e, up=e, down=e)
    assert LAYOUT.check(spec) == ()
    assert LAYOUT.nbytes(spec) <= 1.01 * spec.local_experts * spec.expert_bytes
    assert [r.what for r in LAYOUT.check(replace(spec, hidden=4128, intermediate=2080))] == ["H", "F"]
    for name in ("nvfp4", "int4_g32"):
        e = FORMATS[name].encoding
        wrong = LAYOUT.check(replace(spec, gate=e, up=e, down=e))
        expected = "mxfp4, or int4 with 16-bit scales of 128 columns"
        assert [str(r) for r in wrong] == [
            f"{p} weights: expects {expected}, got {name}" for p in ("gate", "up", "down")
        ]
