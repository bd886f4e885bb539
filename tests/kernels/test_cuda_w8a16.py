"""The kernels for MXFP8 weights and x in 16 bits: their sources, run on a CPU with every asynchronous instruction
emulated, and the bits that they decode."""

from __future__ import annotations

import pytest
import torch

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.backends.reference import run_experts
from polymoe.kernels.cuda.targets import TARGETS
from polymoe.layouts.cuda.bits import move_bits
from polymoe.layouts.cuda.w8a16_fragments import E4M3_BITS
from polymoe.problem.numerics import TOLERANCE, relative_error
from support.cuda_calls import run_emulated
from support.cuda_emulator import compile_units, emulated
from support.problems import GPT_OSS, problem_of, random_call, random_experts

pytestmark = emulated
MMA = CudaConfig("w8a16_mma", 8, 64)
TILED = CudaConfig("w8a16_mma_tiled", 96)


def test_other_gpus_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With x in the stages: bitwise what SM90's kernels give."""
    weights = random_experts("mxfp8", hidden=592, intermediate=112, bias=True)
    call = random_call(9, 592, 5, 3, torch.bfloat16)
    outs = []
    for target in (TARGETS["sm90"], TARGETS["sm120"]):
        units = compile_units("w8a16_mma_mxfp8", target=target)
        outs.append(run_emulated(monkeypatch, units, weights, *call, MMA, target=target)[0])
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "gated"),
    [
        (112, 80, True),  # a k_tail of 48 columns, and of 16; blocks of three and of two tiles of 16 rows
        (16, 352, False),  # nothing but a k_tail; more stages than the pipeline has, and a k_tail of 32 columns
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(336, 208, True), (1040, 304, False)]),
    ],
)
def test_many_rows_by_mma_have_the_bits_of_wgmma(
    monkeypatch: pytest.MonkeyPatch, hidden: int, intermediate: int, gated: bool
) -> None:
    """Work tiles of most numbers of rows, one expert with several of them; ids of other ranks."""
    weights = random_experts("mxfp8", hidden=hidden, intermediate=intermediate, gated=gated, bias=True, experts=4)
    x, routing = random_call(105, hidden, 4, 2, torch.bfloat16)
    routing.topk_ids_TA[:, 0] = 1
    routing.topk_ids_TA[:3, 0] = torch.tensor([-1, 4, 4])
    routing.topk_weights_TA[0, 0] = float("nan")
    options = {"activation": GPT_OSS, "weight_on": "input"} if gated else {}
    outs = []
    for target, config in ((TARGETS["sm90"], CudaConfig("w8a16_wgmma", 128)), (TARGETS["sm120"], TILED)):
        units = compile_units(f"{config.family}_mxfp8", target=target)
        call = (units, weights, x, routing, config)
        outs.append(run_emulated(monkeypatch, *call, out_dtype=torch.float32, target=target, **options)[0])
    assert torch.equal(*outs)
    assert relative_error(outs[1], run_experts(problem_of(weights, **options), weights, x, routing)) < TOLERANCE


def test_every_code_is_decoded_exactly() -> None:
    """As dequant/mxfp8.cuh does: each of the four codes of a word, as bits of bfloat16 that are 2**120 times less."""
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).double() * 2.0**-120
    valid = expected.isfinite()
    for position in range(4):
        bytes = torch.full((256, 4), 0x7F, dtype=torch.uint8)  # all bits of the other codes
        bytes[:, position] = codes
        word = move_bits(bytes, E4M3_BITS).view(torch.int32)[:, 0].long() & 0xFFFFFFFF
        registers = (word & 0x87F087F0, (word << 4 & 0x80F080F0) | (word >> 4 & 0x07000700))
        half = registers[position // 2] >> 16 * (position % 2) & 0xFFFF
        got = half.to(torch.uint16).view(torch.int16).view(torch.bfloat16).double()
        assert torch.equal(got[valid], expected[valid])
