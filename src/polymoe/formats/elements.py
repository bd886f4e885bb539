"""Codes to numbers and back: E2M1, E4M3 and INT4 elements, nibbles in bytes, E8M0 scales. Torch only.

E2M1 and E8M0 are defined by the OCP Microscaling (MX) specification 1.0; E4M3 by the OCP 8-bit floating point
specification, here always the ``e4m3fn`` variant (no infinities, largest number 448).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polymoe.common.lazy_torch import Dtypes
from polymoe.errors import FormatError

if TYPE_CHECKING:
    from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each 4-bit code: bit 3 is the sign, bits 2 to 0 index the magnitudes."""

CODE_DTYPES = Dtypes(e2m1="uint8", int4="uint8", e4m3="float8_e4m3fn", bf16="bfloat16", fp16="float16")
"""Dtype of an element's codes; those of 4 bits are two to a byte."""

SCALE_DTYPES = Dtypes(
    float32="float32", bfloat16="bfloat16", float16="float16", e8m0="float8_e8m0fnu", e4m3="float8_e4m3fn"
)
"""Dtype of scales by its name in an Encoding."""


def pack_nibbles(values: Tensor) -> Tensor:
    """Pack two 4-bit codes into a byte, the even column in the low nibble: uint8 ``[..., K]`` to uint8 ``[..., K/2]``.

    Raises:
        FormatError: if K is odd.
    """
    if values.shape[-1] % 2:
        raise FormatError("4-bit codes", expected="an even number of columns", got=str(list(values.shape)))
    # Flat, as a contiguous tensor may have any stride where it has one row. The even column is in the low byte.
    pairs = values.reshape(-1).view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8).view(*values.shape[:-1], values.shape[-1] // 2)


def unpack_nibbles(codes: Tensor) -> Tensor:
    """Inverse of :func:`pack_nibbles`: uint8 ``[..., K/2]`` to uint8 ``[..., K]``, each 0 to 15."""
    return torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)


def decode(codes: Tensor, element: str, dtype: torch.dtype | None = None) -> Tensor:
    """Return the numbers of ``codes``, before scales and zero points: ``[..., N, K]`` in ``dtype``.

    Packed 4-bit codes are ``[..., N, K/2]``. INT4 codes give 0 to 15, since the zero point belongs to the group.
    ``dtype`` is float32 by default.
    """
    dtype = dtype or torch.float32
    if element == "e2m1":
        values = torch.tensor(E2M1_VALUES, dtype=dtype, device=codes.device)
        pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)
        # As complex numbers each pair is one item to look up, which is several times faster than a row of two.
        return torch.view_as_real(_lookup(torch.view_as_complex(pairs), codes)).flatten(-2)
    if element == "e4m3":
        every = torch.arange(256, dtype=torch.uint8, device=codes.device).view(codes.dtype)
        return _lookup(every.to(dtype), codes.view(torch.uint8))  # several times faster than a cast on a CPU
    if element == "int4":
        return unpack_nibbles(codes).to(dtype)
    return codes.to(dtype)


def _lookup(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def decode_scale(scales: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Scales as numbers in ``dtype`` (float32 by default), exactly. E8M0 byte b is ``2**(b - 127)``; 255 is NaN."""
    dtype = dtype or torch.float32
    return scales.to(dtype) if scales.dtype != torch.float8_e8m0fnu else scales.to(torch.float32).to(dtype)


def divide(values: Tensor, divisor: float) -> Tensor:
    """``values / divisor``, rounded once on every device.

    On a GPU torch multiplies by the reciprocal of a Python number; an error of one bit would double an E8M0 scale.
    """
    return values / torch.full_like(values, divisor)


def encode_e2m1(values: Tensor) -> Tensor:
    """Return the nearest E2M1 code of each number, ties to even, magnitudes above 6 to 6: uint8, one code per byte.

    ``values`` must not contain NaN.
    """
    # From 0 to 2 codes are 0.5 apart, from 2 to 4 they are 1 apart, from 4 to 6 they are 2 apart: three roundings, the
    # last two of which add 2 each below their part.
    magnitudes = values.abs()
    codes = magnitudes.clamp(max=2).mul_(2).round_()
    codes += magnitudes.clamp(2, 4).round_()
    codes += magnitudes.clamp_(4, 6).mul_(0.5).round_()
    codes -= torch.full_like(values, 4).copysign_(values)  # adds 8 - 4 for a sign, -0.0's too
    return codes.to(torch.int32).to(torch.uint8)  # several times faster than at once


def round_e2m1_(magnitudes: Tensor) -> Tensor:
    """Overwrite float32 numbers, 0 or more, with those of :func:`encode_e2m1`'s codes."""
    magnitudes.clamp_max_(6.0)
    # Numbers are 0.5 apart below 2, then 1, then 2. A float32 sum of 1.5 * 2**23 times as much is rounded to that.
    power = magnitudes.clamp_min(1.0).view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32)
    return magnitudes.add_(power, alpha=1.5 * 2.0**22).sub_(power, alpha=1.5 * 2.0**22)


def encode_e4m3(values: Tensor) -> Tensor:
    """Nearest E4M3 number of each value, magnitudes above 448 to 448: float8_e4m3fn."""
    return values.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def encode_e8m0(exponents: Tensor) -> Tensor:
    """E8M0 scales ``2**exponents`` of integer exponents, clamped to the range -127 to 127: float8_e8m0fnu.

    Built from the exponent, never by casting a float: a cast would round 3 to 4 and hide the mistake.
    """
    return (exponents.clamp(-127, 127) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def encode_scale(least: Tensor, scale_dtype: str) -> Tensor:
    """Return the smallest scales of a dtype that are not below ``least``, so that no weight is clipped; 1 for 0.

    Args:
        least: float32, 0 or more. Values below ``2**-126`` count as that: a rounded subnormal is a bad divisor.
        scale_dtype: float32, bfloat16, float16 or e8m0.

    Raises:
        FormatError: if a scale is above the dtype's largest number.
    """
    least = torch.where(least == 0, torch.ones_like(least), least.clamp_min(torch.finfo(torch.float32).tiny))
    if scale_dtype == "e8m0":
        mantissa, exponent = torch.frexp(least)  # least = mantissa * 2**exponent, 0.5 <= mantissa < 1
        return encode_e8m0(torch.where(mantissa == 0.5, exponent - 1, exponent))
    dtype = SCALE_DTYPES[scale_dtype]
    scales = least.to(dtype)
    if dtype.itemsize == 2:
        bits = scales.view(torch.int16)  # of positive floats, counted up by one: the next larger float
        scales = torch.where(scales.float() < least, bits + 1, bits).view(dtype)
    if not bool(torch.isfinite(scales).all()):
        raise FormatError(
            f"{scale_dtype} scale",
            expected=f"at most {torch.finfo(dtype).max:g}",
            got=f"{least.max():g}",
            hint="scale the weights down, or store float32 scales",
        )
    return scales
