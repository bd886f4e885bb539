"""Single codes and scales. Names with digits point to sections of the formats specification: 1.1 is the E2M1 table."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import support.plain_formats as plain
from polymoe.errors import FormatError
from polymoe.formats.elements import (
    E2M1_VALUES,
    decode,
    decode_scale,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    encode_scale,
    pack_nibbles,
    unpack_nibbles,
)

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
SCALES = ("float32", "bfloat16", "float16", "e8m0")


def around(points: list[float]) -> torch.Tensor:
    """Each point and its float32 neighbours on either side, both signs."""
    x = torch.tensor(points, dtype=torch.float32)
    x = torch.cat([x, torch.nextafter(x, x + 1), torch.nextafter(x, x - 1)])
    return torch.cat([x, -x])


def nearest_even(x: float, magnitudes: list[float]) -> int:
    """Index of the nearest magnitude; of two equally near ones, the even index. Differences are exact in float64."""
    return min(range(len(magnitudes)), key=lambda i: (abs(magnitudes[i] - abs(x)), i % 2))


# --- E2M1 ---


def test_1_1_e2m1_table() -> None:
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    codes = torch.arange(16, dtype=torch.uint8)
    got = decode(pack_nibbles(codes), "e2m1").tolist()
    assert got == table == list(E2M1_VALUES)
    assert math.copysign(1, got[8]) == -1  # code 8 is negative zero
    np.testing.assert_array_equal(got, plain.e2m1(codes.numpy()))


@pytest.mark.parametrize(("byte", "pair"), [(0x21, (0.5, 1.0)), (0xA3, (1.5, -1.0))], ids=["0x21", "0xA3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_1_2_low_nibble_is_the_even_column(byte: int, pair: tuple[float, float], dtype: torch.dtype) -> None:
    numbers = decode(torch.tensor([byte], dtype=torch.uint8), "e2m1", dtype)
    assert numbers.dtype == dtype
    assert tuple(numbers.tolist()) == pair
    assert pack_nibbles(encode_e2m1(torch.tensor(pair))).tolist() == [byte]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_e2m1_decodes_every_byte(dtype: torch.dtype) -> None:
    low, high = ALL_BYTES.numpy() & 15, ALL_BYTES.numpy() >> 4
    wanted = np.stack([plain.e2m1(low), plain.e2m1(high)], -1)
    got = decode(ALL_BYTES[:, None], "e2m1", dtype).numpy()
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted))


def test_e2m1_nearest_ties_to_even() -> None:
    magnitudes = list(E2M1_VALUES[:8])
    midpoints = [(a + b) / 2 for a, b in itertools.pairwise(magnitudes)]
    x = torch.cat([around(magnitudes + midpoints), torch.linspace(-8, 8, 4097)])
    wanted = [nearest_even(v, magnitudes) + (8 if math.copysign(1, v) < 0 else 0) for v in x.tolist()]
    assert encode_e2m1(x).tolist() == wanted


@pytest.mark.parametrize("midpoint", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_e2m1_ties(midpoint: float) -> None:
    code = int(encode_e2m1(torch.tensor([midpoint])))
    assert code % 2 == 0
    assert abs(E2M1_VALUES[code] - midpoint) == abs(
        E2M1_VALUES[code + (1 if midpoint > E2M1_VALUES[code] else -1)] - midpoint
    )


def test_e2m1_extremes() -> None:
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, float("inf"), -float("inf")])
    assert encode_e2m1(x).tolist() == [0, 8, 0, 8, 7, 15, 7, 15]


def test_e2m1_float64_rounds_once() -> None:
    assert encode_e2m1(torch.tensor([0.25, 0.25 + 1e-15], dtype=torch.float64)).tolist() == [0, 1]


# --- nibbles ---


def test_nibbles_round_trip() -> None:
    assert torch.equal(pack_nibbles(unpack_nibbles(ALL_BYTES.view(16, 16))), ALL_BYTES.view(16, 16))


def test_odd_columns_are_refused() -> None:
    with pytest.raises(FormatError, match="even number of columns"):
        pack_nibbles(torch.zeros(2, 3, dtype=torch.uint8))


def test_1_5_int4_word() -> None:
    columns = torch.tensor([4, 7, -3, -8, -5, 3, -5, -1])
    codes = pack_nibbles((columns + 8).to(torch.uint8))
    assert codes.view(torch.int32).tolist() == [0x73B305FC]
    word = torch.tensor([0x73B305FC], dtype=torch.int32)
    assert [(0x73B305FC >> 4 * i & 15) - 8 for i in range(8)] == columns.tolist()  # least significant nibble first
    assert (decode(word.view(torch.uint8), "int4") - 8).tolist() == columns.tolist()


# --- E4M3 ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_e4m3_decodes_every_byte(dtype: torch.dtype) -> None:
    got = decode(ALL_BYTES.view(torch.float8_e4m3fn), "e4m3", dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.numpy(), plain.e4m3(ALL_BYTES.numpy()))
    assert got[0x7F].isnan()
    assert got[0xFF].isnan()


def test_1_3_e4m3_range() -> None:
    got = decode_scale(torch.tensor([0x7E, 0x01, 0x08], dtype=torch.uint8).view(torch.float8_e4m3fn))
    assert got.tolist() == [448.0, 2.0**-9, 2.0**-6]  # largest, smallest, smallest normal


def test_e4m3_nearest_ties_to_even() -> None:
    magnitudes = plain.e4m3(np.arange(0x7F)).tolist()  # index = byte
    midpoints = [(a + b) / 2 for a, b in itertools.pairwise(magnitudes)]
    x = around(magnitudes + midpoints)
    wanted = [nearest_even(v, magnitudes) + (0x80 if math.copysign(1, v) < 0 else 0) for v in x.tolist()]
    assert encode_e4m3(x).view(torch.uint8).tolist() == wanted


def test_e4m3_saturates() -> None:
    x = torch.tensor([448.1, 465.0, 1e30, float("inf"), -1e30])
    assert encode_e4m3(x).float().tolist() == [448.0] * 4 + [-448.0]


# --- 16-bit floats ---


@pytest.mark.parametrize(("element", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_16_bit_floats_decode(element: str, torch_dtype: torch.dtype) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch_dtype)
    np.testing.assert_array_equal(decode(codes, element).numpy(), plain.floats(codes))


# --- scales ---


@pytest.mark.parametrize(
    ("byte", "value"), [(0, 2.0**-127), (120, 2.0**-7), (127, 1.0), (254, 2.0**127)], ids=["0", "120", "127", "254"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_1_3_e8m0_byte(byte: int, value: float, dtype: torch.dtype) -> None:
    got = decode_scale(torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e8m0fnu), dtype)
    assert got.dtype == dtype
    assert got.item() == value != 0


def test_1_3_e8m0_byte_255_is_nan() -> None:
    assert decode_scale(torch.tensor([255], dtype=torch.uint8).view(torch.float8_e8m0fnu)).isnan().all()


def test_e8m0_decodes_every_byte() -> None:
    got = decode_scale(ALL_BYTES.view(torch.float8_e8m0fnu))
    np.testing.assert_array_equal(got.numpy(), plain.e8m0(ALL_BYTES.numpy()))


def test_1_3_e8m0_bytes_are_viewed_not_copied() -> None:
    scale = encode_e8m0(torch.tensor([-7]))
    assert scale.view(torch.uint8).tolist() == [120]
    assert scale.to(torch.uint8).tolist() == [0]  # the pitfall: a numeric copy loses the scale


def test_1_3_casting_to_e8m0_rounds() -> None:
    scales = torch.tensor([3.0, 6.0, 0.75])
    assert scales.to(torch.float8_e8m0fnu).float().tolist() == [4.0, 8.0, 1.0]  # why encode_e8m0 takes exponents
    exponents = torch.arange(-127, 128)
    assert decode_scale(encode_e8m0(exponents), torch.float64).tolist() == [2.0**e for e in exponents.tolist()]


def test_e8m0_exponents_are_clamped() -> None:
    assert encode_e8m0(torch.tensor([-128, -300, 128, 300])).view(torch.uint8).tolist() == [0, 0, 254, 254]


@pytest.mark.parametrize("scale_dtype", SCALES)
def test_encode_scale_rounds_up_to_the_next_number(scale_dtype: str, generator: torch.Generator) -> None:
    wanted = torch.exp2(torch.rand(2000, generator=generator) * 26 - 12)  # 2**-12 to 2**14: normal in every dtype
    wanted = torch.cat([wanted, torch.exp2(torch.arange(-12.0, 15.0))])
    scales = encode_scale(wanted, scale_dtype)
    got = plain.floats(scales)
    bits = scales.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[scales.element_size()])
    below = plain.floats((bits - 1).view(scales.dtype))
    assert (got >= wanted.double().numpy()).all()
    assert (below < wanted.double().numpy()).all()


@pytest.mark.parametrize("scale_dtype", SCALES)
def test_encode_scale_of_nothing_is_one(scale_dtype: str) -> None:
    assert decode_scale(encode_scale(torch.zeros(2, 3), scale_dtype)).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("scale_dtype", SCALES)
@pytest.mark.parametrize("wanted", [2.0**-149, 2.0**-127, 1.5 * 2.0**-100, 1.25 * 2.0**-30])
def test_encode_scale_never_vanishes(scale_dtype: str, wanted: float) -> None:
    scale = decode_scale(encode_scale(torch.tensor([wanted]), scale_dtype), torch.float64).item()
    smallest = 2.0**-24 if scale_dtype == "float16" else 2.0**-126
    assert max(wanted, smallest) <= scale <= max(2 * wanted, smallest)


@pytest.mark.parametrize(("scale_dtype", "wanted"), [("float16", 65505.0), ("float16", 1e6), ("bfloat16", 3.4e38)])
def test_encode_scale_refuses_what_would_be_infinite(scale_dtype: str, wanted: float) -> None:
    with pytest.raises(FormatError, match=f"{scale_dtype} scale: expected at most"):
        encode_scale(torch.tensor([1.0, wanted]), scale_dtype)


def test_one_row_of_another_matrix_packs() -> None:
    """Such as zero points of one group: torch calls it contiguous, whatever its stride between rows."""
    column = torch.arange(8, dtype=torch.uint8)[:, None]
    assert column.T.is_contiguous()
    assert torch.equal(pack_nibbles(column.T), pack_nibbles(torch.arange(8, dtype=torch.uint8)[None]))
