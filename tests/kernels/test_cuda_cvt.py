"""FP4 by instructions that convert it, as in the kernels for SM100 and SM120: every code with every scale, and the sums
of their products, emulated."""

from __future__ import annotations

import ctypes
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from polymoe.backends.cuda.backend import CudaConfig
from polymoe.backends.reference import run_experts
from polymoe.formats import FORMATS, QuantTensor
from polymoe.kernels.cuda.build import sources
from polymoe.kernels.cuda.launch.args import GemmArgs
from polymoe.kernels.cuda.targets import SM90, TARGETS
from polymoe.problem.numerics import TOLERANCE, relative_error
from support.cuda_calls import run_emulated
from support.cuda_emulator import Emulator, compile_files, compile_units, emulated
from support.problems import problem_of, random_call, random_experts

pytestmark = emulated

SMALL = """
#include "dequant/fp4_cvt.cuh"
#include "gemm/args.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mma.cuh"

using namespace polymoe;

// `count` words of codes, each with the words of scales beside it, in all four steps: four registers for each.
template <class F>
void decode(const uint32_t* codes, const uint32_t* scale_words, uint32_t* out, int count) {
    for (int i = 0; i < count; ++i) {
        const typename F::Scales scales = F::scales(scale_words + i * kTileScaleBytes<F> / 4);
        for (int step = 0; step < 4; ++step) {
            uint32_t a[4];
            dequantize<F>(a, &codes[i], F::scale(scales, step));
            for (int j = 0; j < 4; ++j) out[(i * 4 + step) * 4 + j] = a[j];
        }
    }
}
#define DECODE(NAME, FORMAT)                                                                                  \\
    extern "C" void NAME(const uint32_t* codes, const uint32_t* scale_words, uint32_t* out, int count) { \\
        decode<FORMAT>(codes, scale_words, out, count);                                                  \\
    }
DECODE(decode_mxfp4, Mxfp4Cvt)
DECODE(decode_nvfp4, Nvfp4Cvt)

// One m16n8k16: a's four registers of each lane, b's two, c's four.
extern "C" __global__ void one_product(const __grid_constant__ GemmArgs args) {
    grid_dependency_wait();
    const int lane = threadIdx.x;
    const uint32_t *a = reinterpret_cast<const uint32_t*>(args.codes) + 4 * lane,
                   *b = reinterpret_cast<const uint32_t*>(args.scales) + 2 * lane;
    float* c = static_cast<float*>(args.out) + 4 * lane;
    const uint32_t of_a[4] = {a[0], a[1], a[2], a[3]};
    float sums[4] = {c[0], c[1], c[2], c[3]};
    mma_m16n8k16(sums, of_a, b[0], b[1]);
    for (int i = 0; i < 4; ++i) c[i] = sums[i];
}
"""


@pytest.fixture(scope="module")
def small() -> ctypes.CDLL:
    return compile_files({**sources(), "small.cu": SMALL}, "small.cu", ("GemmArgs",), "small")


def decoded(small: ctypes.CDLL, format: str, codes: Tensor, scales: Tensor) -> Tensor:
    """What the kernels make of words of codes, uint8 [n, 4], and the bytes of scales beside them, uint8 [n, bytes]:
    bfloat16 [n, 4, 4, 2], by step, register and half."""
    out = torch.empty(len(codes), 4, 4, 2, dtype=torch.bfloat16)
    addresses = (ctypes.c_void_p(t.data_ptr()) for t in (codes, scales, out))
    getattr(small, f"decode_{format}")(*addresses, len(codes))
    return out


@pytest.mark.parametrize(("format", "scales"), [("mxfp4", 4), ("nvfp4", 8)])
def test_every_code_with_every_scale(small: ctypes.CDLL, format: str, scales: int) -> None:
    """In every step, by PTX's definition, E8M0 from 2**-127 to NaN, E4M3 of both signs; and as the format's class
    dequantizes."""
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    first = torch.arange(256).repeat_interleave(2)
    beside = (first[:, None] + torch.arange(scales) * 61) % 256  # another byte in each place
    found = decoded(small, format, codes.repeat(256, 1), beside.to(torch.uint8))
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    values = torch.cat([values, -values]).view(2, 4, 2).repeat(256, 1, 1)  # [word, register, half]
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)
    powers[255] = math.nan
    if format == "nvfp4":
        powers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    groups = powers[beside].view(512, -1, 2)[:, :, [0, 1, 0, 1], None]  # of rows g, g + 8, g, g + 8
    exact = values[:, None] * groups.repeat_interleave(8 // scales, 1)
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found[~exact.isnan()], exact.bfloat16()[~exact.isnan()])
    held = exact.abs() <= torch.finfo(torch.bfloat16).max
    assert torch.equal(found.double()[held], exact[held])  # nothing is rounded

    encoding = FORMATS[format].encoding
    rows = codes.view(1, 8).repeat(255 if format == "mxfp4" else 127, encoding.group_columns // 16)
    every = torch.arange(len(rows), dtype=torch.uint8)
    dtype = torch.float8_e8m0fnu if format == "mxfp4" else torch.float8_e4m3fn
    one = torch.ones(()) if encoding.global_scale else None
    ours = QuantTensor(rows, encoding, every.view(-1, 1).view(dtype), global_scale=one).dequantize(torch.float64)[
        :, :16
    ]
    same = every.repeat_interleave(2 * scales).view(-1, scales)
    again = decoded(small, format, codes.repeat(len(rows), 1), same)[:, 0].reshape(-1, 16)
    assert torch.equal(again, ours.bfloat16())


COMPUTED = """
#include "ptx/computed_fp4.cuh"

extern "C" void scaled(uint32_t word, uint32_t scale, uint32_t* out) {
    uint32_t a[4];
    polymoe::e2m1x8_to_bf16(a, word, scale * 0x01010101u, scale * 0x01010101u);
    for (int i = 0; i < 4; ++i) out[i] = a[i];
}
extern "C" void plain(uint32_t word, uint32_t scale, uint32_t* out) {
    uint32_t a[4];
    polymoe::e2m1x8_to_bf16(a, word);
    for (int i = 0; i < 4; ++i) out[i] = a[i];
}
extern "C" void e4m3(uint32_t word, uint32_t scale, uint32_t* out) {
    out[0] = polymoe::e4m3x2_to_bf16x2_low(word), out[1] = polymoe::e4m3x2_to_bf16x2_high(word);
}
"""


def test_what_stands_in_for_the_instructions_on_an_h200() -> None:
    """The same bits by arithmetic, for scales of at most 2."""
    files = sources()
    files |= {"ptx/computed_fp4.cuh": files["ptx/convert_fp4.cuh"], "computed.cu": COMPUTED}
    library = compile_files(files, "computed.cu", (), "computed")
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values]).double()
    out = torch.empty(4, 2, dtype=torch.bfloat16)
    for word in (0x76543210, 0xFEDCBA98, 0x80F7182E):
        codes = torch.tensor([word >> 4 * i & 15 for i in range(8)])
        for function, scales in ((library.scaled, range(129)), (library.plain, [127])):
            for scale in scales:
                function(word, scale, ctypes.c_void_p(out.data_ptr()))
                assert torch.equal(out.flatten().double(), values[codes] * 2.0 ** (scale - 127)), (word, scale)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).bfloat16()
    for first in range(0, 256, 4):
        word = int.from_bytes(bytes(range(first, first + 4)), "little")
        library.e4m3(word, 0, ctypes.c_void_p(out.data_ptr()))
        got = out.flatten()[:4]
        assert torch.equal(got.nan_to_num(nan=1e9), numbers[first : first + 4].nan_to_num(nan=1e9))


def cut(value: Fraction, unit: Fraction) -> Fraction:
    return math.trunc(value / unit) * unit


def sum_by_the_rule(a: list[float], b: list[float], c: float) -> float:
    """What MMA-Sim says of m16n8k16 on Hopper and Blackwell, in exact numbers: no code of the emulator's."""

    def exponent(value: float) -> int:
        return max(math.frexp(value)[1] - 1, -126) if value else -126

    largest = max([exponent(c)] + [exponent(x) + exponent(y) for x, y in zip(a, b, strict=True)])
    unit = Fraction(2) ** (largest - 25)
    total = cut(Fraction(c), unit) + sum(cut(Fraction(x) * Fraction(y), unit) for x, y in zip(a, b, strict=True))
    if not total:
        return 0.0
    bits = math.floor(math.log2(abs(total)))
    bits += (abs(total) >= Fraction(2) ** (bits + 1)) - (abs(total) < Fraction(2) ** bits)
    return float(cut(total, Fraction(2) ** max(bits - 23, -149)))


def multiplied(small: ctypes.CDLL, a: Tensor, b: Tensor, c: Tensor, aligned: bool = True) -> Tensor:
    """a [16, 16] times b [16, 8] in bfloat16 plus c [16, 8] in float32, by the emulated instruction."""
    lanes = torch.arange(32)
    g, t = lanes // 4, lanes % 4
    pairs = torch.arange(2)
    rows = g[:, None] + 8 * (torch.arange(4) % 2)  # [lane, register]
    columns = 2 * t[:, None] + 8 * (torch.arange(4) // 2)
    of_a = a[rows[..., None], columns[..., None] + pairs].contiguous()
    of_b = b[2 * t[:, None, None] + 8 * pairs[:, None] + pairs, g[:, None, None]].contiguous()
    at = rows[:, [0, 0, 1, 1]], 2 * t[:, None] + torch.tensor([0, 1, 0, 1])
    sums = c[at].contiguous()
    args = GemmArgs()
    args.codes, args.scales, args.out = (x.data_ptr() for x in (of_a, of_b, sums))
    Emulator({"small": small}, [], aligned=aligned)("small", "one_product", SM90).prepare(args, 32)(0)
    out = torch.empty(16, 8)
    out[at] = sums
    return out


def test_sums_are_cut_off_behind_the_largest_exponent(small: ctypes.CDLL) -> None:
    """25 bits behind it: products of 2**-26 are lost, those of 2**-25 count; 1.5 * 1.5 has the exponent of 1 * 1."""
    a, b, c = torch.zeros(16, 16), torch.zeros(16, 8), torch.zeros(16, 8)
    b[:8], b[8] = 1.0, 1.5
    a[0, :4], a[1, :8], a[2, :8] = 2.0**-26, 2.0**-25, 2.0**-25
    a[2, 8], a[3, 0], c[:2], c[3] = 1.5, 2.0**-26, 1.0, -1.0
    found = multiplied(small, a.bfloat16(), b.bfloat16(), c)
    expected = torch.tensor([1.0, 1.0 + 2.0**-22, 2.25 + 2.0**-22, -1.0])
    assert torch.equal(found[:4], expected[:, None].expand(4, 8))


def test_sums_of_random_numbers_follow_the_rule(small: ctypes.CDLL) -> None:
    """Of exponents far apart, with zeros and subnormal numbers."""
    g = torch.Generator().manual_seed(0)
    differ = 0
    for spread, middle in ((2, 0), (12, 0), (40, -30), (6, -62)):
        a, b, c = (
            torch.randn(shape, generator=g) * torch.exp2(torch.randint(-spread, spread + 1, shape, generator=g) + power)
            for shape, power in (((16, 16), middle), ((16, 8), middle), ((16, 8), 2 * middle))
        )
        a, b = a.bfloat16(), b.bfloat16()
        a[::5, ::3] = 0
        found = multiplied(small, a, b, c)
        for row in range(16):
            for column in range(8):
                expected = sum_by_the_rule(a[row].tolist(), b[:, column].tolist(), float(c[row, column]))
                assert float(found[row, column]) == expected, (spread, row, column)
        differ += int((found != multiplied(small, a, b, c, aligned=False)).sum())
    assert differ > 50


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("name", ["sm120", pytest.param("sm100", marks=pytest.mark.slow)])
def test_tensor_cores_sums_are_those_of_sm90(monkeypatch: pytest.MonkeyPatch, format: str, name: str) -> None:
    """SM90's operands and sums are a power of two smaller, and every bit is the same."""
    weights = random_experts(format, hidden=336, intermediate=208, gated=format != "nvfp4", experts=2)
    x, routing = random_call(5, 336, 2, 1, torch.bfloat16)
    outs = []
    for target in (SM90, TARGETS[name]):
        units = compile_units(f"w4a16_mma_{format}", target=target)
        config = CudaConfig("w4a16_mma", 8, 64)
        outs.append(
            run_emulated(monkeypatch, units, weights, x, routing, config, blocks=1, target=target, aligned=True)[0]
        )
    assert torch.equal(*outs)
    assert relative_error(outs[0], run_experts(problem_of(weights), weights, x, routing)) < TOLERANCE
