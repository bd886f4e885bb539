"""Slices for tensor and expert parallelism: which, and that they hold the same numbers as slices of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polymoe.checkpoint.shard import Shard, align, shard_expert, shard_spec, split_experts, widths
from polymoe.errors import ArgumentError, FormatError
from polymoe.formats import FORMATS, Encoding, PerGroup, format_of
from polymoe.problem.tensors import ExpertsSpec, ExpertWeights


def encodings(format: str) -> dict[str, Encoding]:
    return dict.fromkeys(("gate", "up", "down"), FORMATS[format].encoding)


@pytest.mark.parametrize(
    ("intermediate", "format", "tp", "expected"),
    [
        (2880, "mxfp4", 2, (1440,) * 2),
        (2880, "mxfp4", 4, (736,) * 3 + (672,)),
        (2880, "mxfp4", 8, (384,) * 7 + (192,)),
        (2880, "bf16", 4, (720,) * 4),
        (192, "mxfp4", 1, (192,)),
        (190, "bf16", 3, (64, 64, 62)),
    ],
)
def test_gpt_oss_slices_are_whole_groups_and_may_differ(intermediate, format, tp, expected):
    assert sum(expected) == intermediate
    assert widths(intermediate, encodings(format), tp, uneven=True) == expected


def test_no_rank_may_hold_nothing():
    with pytest.raises(ArgumentError, match="6 groups of 32 for 4 ranks"):
        widths(192, encodings("mxfp4"), 4, uneven=True)


# F after the split by rank count, from the table of alignments: whole groups or not.
@pytest.mark.parametrize(
    ("intermediate", "format", "works", "fails"),
    [
        (2688, "nvfp4", [2, 4, 8], {16: "168 is not a multiple of 16"}),
        (2688, "mxfp4", [2, 4], {8: "336 is not a multiple of 32"}),
        (2048, "mxfp4", [2, 4, 8, 16], {128: "16 is not a multiple of 32"}),
        (2048, "int4_g128", [2, 16], {32: "64 is not a multiple of 128"}),
        (2048, "fp8_block128", [2, 4, 8, 16, 32, 64], {128: "16 is not a multiple of 128"}),
        (1536, "fp8_block128", [2, 4, 8, 16], {5: "1536 is not a multiple of 5"}),
        (1536, "nvfp4", [2, 8, 16, 32], {64: "24 is not a multiple of 16"}),
        (768, "fp8_block128", [4, 8], {16: "48 is not a multiple of 128"}),
        (96, "fp8_channel", [2, 3, 32], {64: "96 is not a multiple of 64"}),
        (96, "bf16", [2, 3, 96], {7: "96 is not a multiple of 7"}),
    ],
)
def test_slices_that_cut_a_group_are_refused(intermediate, format, works, fails):
    for tp in works:
        assert widths(intermediate, encodings(format), tp) == (intermediate // tp,) * tp
    for tp, reason in fails.items():
        with pytest.raises(ArgumentError, match=reason) as refusal:
            widths(intermediate, encodings(format), tp)
        assert f"tp={tp}" in str(refusal.value)
        listed = [int(n) for n in str(refusal.value.hint).rpartition(": ")[2].split(", ")]
        assert tp not in listed
        assert set(listed) >= {n for n in works if n <= 64}


def test_the_projection_with_the_coarser_groups_decides():
    mixed = {"up": FORMATS["nvfp4"].encoding, "down": FORMATS["int4_g128"].encoding}
    assert widths(512, mixed, 4) == (128,) * 4
    with pytest.raises(ArgumentError, match=r"64 is not a multiple of 128 \(int4_g128, down projection\)"):
        widths(512, mixed, 8)


@pytest.mark.parametrize(("experts", "ep"), [(8, 1), (8, 3), (8, 8), (160, 32), (7, 4)])
def test_experts_are_split_in_order_and_the_first_ranks_hold_more(experts: int, ep: int):
    parts = [split_experts(experts, Shard(ep_rank=r, ep=ep)) for r in range(ep)]
    assert [e for first, count in parts for e in range(first, first + count)] == list(range(experts))
    counts = [count for _, count in parts]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1
    with pytest.raises(ArgumentError, match=f"ep={experts + 1}"):
        split_experts(experts, Shard(ep=experts + 1))


@pytest.mark.parametrize(
    "bad",
    [
        {"tp": 0},
        {"tp": (2, 2)},
        {"tp": (-1, 2)},
        {"ep": (0, 0)},
        {"ep": "all"},
        {"tp": (1, 2, 3)},
        {"tp": True},
        {"tp": 2.0},
    ],
)
def test_ranks_out_of_range_and_other_things_are_refused(bad: dict[str, Any]):
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        Shard.of(**bad)


def test_a_size_alone_is_rank_0():
    assert Shard.of(tp=4, ep=(1, 2)) == Shard(tp_rank=0, tp=4, ep_rank=1, ep=2)


ZERO_POINTS = Encoding(element="int4", granularity=PerGroup(1, 32), scale_dtype="float16", zero_points=True)
RAGGED_E8M0 = Encoding(element="e4m3", granularity=PerGroup(128, 128), scale_dtype="e8m0")
CASES = [
    ("bf16", 192, 4),
    ("mxfp4", 192, 3),
    ("mxfp4", 192, 2),
    ("nvfp4", 192, 4),
    ("int4_g32", 192, 6),
    ("int4_g128", 256, 2),
    (ZERO_POINTS, 192, 3),
    ("fp8_tensor", 192, 8),
    ("fp8_channel", 192, 8),
    ("fp8_block128", 256, 2),  # whole blocks
    ("fp8_block128", 1536, 8),  # 192 a rank: blocks of 64
    ("fp8_block128", 192, 2),  # 96 a rank: blocks of 32, of which the last whole one of 128 was cut short
    ("fp8_block128", 320, 2),  # 160 a rank
    (RAGGED_E8M0, 192, 6),
]


@pytest.mark.parametrize(("format", "intermediate", "tp"), CASES, ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_slices_hold_the_numbers_of_the_whole(format, intermediate, tp, gated):
    torch.manual_seed(0)
    kind = FORMATS[format] if isinstance(format, str) else format_of(format)
    hidden, f = 128, intermediate
    rows = 2 * f if gated else f
    weights = ExpertWeights.quantize(
        torch.randn(1, rows, hidden),
        torch.randn(1, hidden, f),
        kind,
        gated=gated,
        gate_up_bias_EF=torch.randn(1, rows),
        down_bias_EH=torch.randn(1, hidden),
    )
    whole = weights.expert(0)
    slices = []
    for rank in range(tp):
        shard = Shard(tp_rank=rank, tp=tp)
        part = shard_expert(whole, shard)
        spec = shard_spec(weights.spec, shard)
        assert {n: p.encoding for n, p in part.projections.items()} == spec.encodings
        assert all(tuple(p.shape) == spec.matrix_shape(n) for n, p in part.projections.items())
        assert torch.equal(part.vectors["down_bias"], whole.vectors["down_bias"] if rank == 0 else torch.zeros(hidden))
        slices.append(part)
    for name, matrix in whole.projections.items():
        joined = torch.cat([s.projections[name].dequantize() for s in slices], -1 if name == "down" else 0)
        assert torch.equal(joined, matrix.dequantize()), name
    for name in ("gate_bias", "up_bias") if gated else ("up_bias",):
        assert torch.equal(torch.cat([s.vectors[name] for s in slices]), whole.vectors[name])


def test_uneven_slices_hold_the_numbers_of_the_whole():
    weights = ExpertWeights.quantize(torch.randn(1, 320, 64), torch.randn(1, 64, 160), "mxfp4")
    whole = weights.expert(0)
    parts = [shard_expert(whole, Shard(tp_rank=r, tp=3), uneven=True) for r in range(3)]
    assert [p.up.shape[0] for p in parts] == [64, 64, 32]
    assert torch.equal(torch.cat([p.down.dequantize() for p in parts], 1), whole.down.dequantize())
    assert shard_spec(weights.spec, Shard(tp_rank=2, tp=3), uneven=True).intermediate == 32


def test_slices_are_views():
    whole = ExpertWeights.quantize(torch.randn(1, 256, 64), torch.randn(1, 64, 128), "mxfp4").expert(0)
    part = shard_expert(whole, Shard(tp_rank=1, tp=2))
    for name, matrix in whole.projections.items():
        start = matrix.codes.data_ptr()
        assert start < part.projections[name].codes.data_ptr() < start + matrix.codes.numel()


def test_blocks_get_no_finer_than_kernels_contract():
    spec = shard_spec(_block_spec(192), Shard(tp=2))
    assert [str(e.granularity) for e in spec.encodings.values()] == ["group 32x128", "group 32x128", "group 128x32"]
    with pytest.raises(ArgumentError, match="48 is not a multiple of 128"):
        shard_spec(_block_spec(192), Shard(tp=4))


def test_blocks_that_would_be_too_fine_are_said():
    blocks = FORMATS["fp8_block128"].encoding
    with pytest.raises(
        ArgumentError, match="80 is not a multiple of 128, and of 16 only, where blocks of 32 are the finest"
    ):
        widths(320, {"gate": blocks, "up": blocks, "down": blocks}, 4)


def test_a_shard_spec_needs_no_weights():
    spec = shard_spec(_block_spec(2048), Shard(tp=8, ep_rank=1, ep=3))
    assert (spec.intermediate, spec.experts, spec.first_expert, spec.local_experts) == (256, 8, 3, 3)
    assert spec.up == FORMATS["fp8_block128"].encoding


def test_align_only_makes_blocks_finer():
    matrix = FORMATS["fp8_block128"].quantize(torch.randn(256, 256))
    assert align(matrix, -1, 256) is matrix
    assert torch.equal(align(matrix, -1, 64).dequantize(), matrix.dequantize())
    with pytest.raises(FormatError, match="divisors"):
        align(matrix, -1, 96)


def _block_spec(intermediate: int) -> ExpertsSpec:
    block = FORMATS["fp8_block128"].encoding
    return ExpertsSpec(hidden=256, intermediate=intermediate, experts=8, gate=block, up=block, down=block)
