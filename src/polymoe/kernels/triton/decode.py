"""Decoding of codes and scales to 16-bit operands: one function for each element, a constexpr of the grouped GEMM.

A *word* holds the codes of P adjacent columns: int16 with four nibbles (P = 4) or two bytes (P = 2), or one 16-bit
number (P = 1). ``decode(words, factor, zero)`` returns P planes: plane p holds columns p, p + P, p + 2P ... of the
tile. The other operand has its columns in the same order, so no nibble ever moves.

With ``PLAIN`` the arithmetic is ordinary float32 (Triton's interpreter has no inline assembly). Otherwise pairs of
bfloat16 are made in 32-bit registers: the code's bits become the sign, low exponent and high mantissa of a bfloat16.
That is the value times a power of two far below 1, which one exact multiplication undoes together with the scale.
"""

# Kernel arguments are not what a type checker takes them for.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

E2M1_SHIFT = 24
"""The fast path holds E2M1 weights times 2**-24, which the epilogue undoes. E8M0 scales from 2**-101 to 2**25 are then
exact in bfloat16. Larger scales need PLAIN; the fast path would make them NaN, never a wrong number."""

E4M3_SHIFT = 8
"""E4M3's bits, shifted to float16's fields, are the number times 2**-8. This is exact, and the epilogue undoes it."""

E4M3_SCALED_SHIFT = 18
"""With E8M0 scales the fast path holds E4M3 weights times 2**-18. Scales from 2**-106 to 2**25 are then exact in
bfloat16, and larger ones become NaN, as for E2M1_SHIFT."""


def _float_asm(word: str, factor: str, mask: str, shifts: Sequence[tuple[int, int]]) -> tl.constexpr:
    """Assembly that makes a bfloat16 of each code in ``word``, times ``factor``.

    Args:
        word, factor: operands; the latter may be a number, for both bfloat16 of a register.
        mask: what of a register exponents and mantissas are, once they are in their places.
        shifts: for each code, the bits by which its sign moves to the left, and its exponent and mantissa.
    """
    steps = ""
    for output, (sign, magnitude) in enumerate(shifts):
        direction = "shl" if magnitude > 0 else "shr"
        steps += f"""
        shl.b32 s, {word}, {sign};
        {direction}.b32 m, {word}, {abs(magnitude)};
        and.b32 m, m, {mask};
        lop3.b32 m, s, z, m, 0xEA;
        fma.rn.bf16x2 ${output}, m, f, z;
        """
    return tl.constexpr(
        f"""
        {{
        .reg .b32 f, s, m, z;
        mov.b32 f, {factor};
        mov.b32 z, 0x80008000;
        {steps}
        }}
        """
    )


E2M1_ASM = _float_asm("$4", "$5", "0x01C001C0", ((12, 6), (8, 2), (4, -2), (0, -6)))
E4M3_ASM = _float_asm("$2", "0x7B807B80", "0x07F007F0", ((8, 4), (0, -4)))
E4M3_SCALED_ASM = _float_asm("$2", "$3", "0x07F007F0", ((8, 4), (0, -4)))


def _int4_asm(word: str, factor: str, zero: str) -> tl.constexpr:
    """Assembly that makes a bfloat16 of each code in ``word``: the code plus 128 and ``zero``, times ``factor``."""
    steps = "".join(
        f"""
        shr.u32 a, {word}, {4 * p};
        and.b32 a, a, 0x000F000F;
        or.b32 a, a, 0x43004300;
        fma.rn.bf16x2 a, a, o, {zero};
        fma.rn.bf16x2 ${p}, a, {factor}, z;
        """
        for p in range(4)
    )
    return tl.constexpr(
        f"""
        {{
        .reg .b32 a, o, z;
        mov.b32 o, 0x3F803F80;
        mov.b32 z, 0x80008000;
        {steps}
        }}
        """
    )


def _exact_asm(factors: str, first: str, rest: str) -> tl.constexpr:
    """Assembly that makes two bfloat16 of each code in $8, less its zero point: their sum is the code times its scale.

    Args:
        factors: makes the scales ``f``, and with ``rest`` what they leave over, ``r``.
        first: the operand with the zero points, see :func:`decode_int4`.
        rest: adds the code times ``r``.
    """
    steps = "".join(
        f"""
        shr.u32 a, $8, {4 * p};
        and.b32 a, a, 0x000F000F;
        or.b32 a, a, 0x43004300;
        fma.rn.bf16x2 a, a, o, {first};
        fma.rn.bf16x2 ${p}, a, f, z;
        xor.b32 n, ${p}, z;
        fma.rn.bf16x2 ${p + 4}, a, f, n;
        {rest.format(p + 4)}
        """
        for p in range(4)
    )
    return tl.constexpr(
        f"""
        {{
        .reg .b32 a, f, n, o, r, z;
        mov.b32 o, 0x3F803F80;
        mov.b32 z, 0x80008000;
        {factors}
        {steps}
        }}
        """
    )


INT4_ASM = _int4_asm("$4", "$5", "$6")
INT4_EXACT_ASM = _exact_asm("mov.b32 f, $9;", "$10", "")
INT4_EXACT_HALF_ASM = _exact_asm(
    "prmt.b32 f, $9, $10, 0x5410; prmt.b32 r, $9, $10, 0x7632;", "$11", "fma.rn.bf16x2 ${0}, a, r, ${0};"
)


@triton.jit
def factor_e8m0(byte, PLAIN: tl.constexpr):
    """Convert E8M0 bytes to float32 scales (PLAIN), or to bfloat16 scales times 2**(126 - 24)."""
    b = byte.to(tl.int32)
    if PLAIN:
        bits = tl.where(b == 0, 0x00400000, b << 23)  # 2**-127 is subnormal in float32
        return tl.where(b == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    else:
        return tl.where(b > 152, 0x7FC0, (b + 102) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def factor_e4m3(byte, PLAIN: tl.constexpr):
    """Convert E4M3 bytes to float32 numbers (PLAIN), or to bfloat16 scales times 2**(126 - 24).

    With integer operations, because SM80 has no FP8.
    """
    b = byte.to(tl.int32)
    if PLAIN:
        bits = ((b & 0x80) << 24) | ((b & 0x7F) << 20)  # the number times 2**-120
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        return tl.where((b & 0x7F) == 0x7F, float("nan"), value)
    else:
        small = (((b & 0x80) << 8) | ((b & 0x7F) << 4)).to(tl.int16).to(tl.bfloat16, bitcast=True)
        one = tl.full((1, 1), 1.329227995784916e36, tl.bfloat16)  # 2**120
        return small * one * tl.full((1, 1), 5.070602400912918e30, tl.bfloat16)  # 2**102


@triton.jit
def factor_float(scale, PLAIN: tl.constexpr):
    """Convert float scales to float32 (PLAIN) or bfloat16."""
    if PLAIN:
        return scale.to(tl.float32)
    else:
        return scale.to(tl.bfloat16)


@triton.jit
def factor_half(scale, PLAIN: tl.constexpr):
    """Convert float16 scales to float32 (PLAIN), or to two bfloat16 whose sum they are: the nearest in the low half of
    an int32, what it leaves over in the high half."""
    if PLAIN:
        return scale.to(tl.float32)
    else:
        nearest = scale.to(tl.bfloat16)
        rest = (scale.to(tl.float32) - nearest.to(tl.float32)).to(tl.bfloat16)
        high = rest.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return high | (nearest.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)


@triton.jit
def decode_16bit(words, factor, zero, OPERAND: tl.constexpr, PLAIN: tl.constexpr):
    """Return one plane: the numbers themselves."""
    return (words.to(OPERAND),)


@triton.jit
def decode_e2m1(words, factor, zero, OPERAND: tl.constexpr, PLAIN: tl.constexpr):
    """Return four planes of E2M1 times their factor. Without PLAIN: times 2**-24 (see E2M1_SHIFT)."""
    if PLAIN:
        w = words.to(tl.int32)
        return (
            _e2m1(w, factor).to(OPERAND),
            _e2m1(w >> 4, factor).to(OPERAND),
            _e2m1(w >> 8, factor).to(OPERAND),
            _e2m1(w >> 12, factor).to(OPERAND),
        )
    else:
        return tl.inline_asm_elementwise(
            E2M1_ASM,
            "=&r,=&r,=&r,=&r,r,r",
            [words, factor],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _e2m1(nibble, factor):
    exponent = (nibble >> 1) & 3
    mantissa = (nibble & 1).to(tl.float32)
    magnitude = tl.where(exponent == 0, 0.5 * mantissa, (1 << exponent).to(tl.float32) * (0.5 + 0.25 * mantissa))
    return tl.where((nibble & 8) != 0, -magnitude, magnitude) * factor


@triton.jit
def decode_int4(words, factor, zero, OPERAND: tl.constexpr, PLAIN: tl.constexpr):
    """Return four planes of ``(nibble - zero) * factor``, each product rounded once to the operand dtype."""
    if PLAIN:
        w = words.to(tl.int32)
        return (
            (((w & 15).to(tl.float32) - zero) * factor).to(OPERAND),
            ((((w >> 4) & 15).to(tl.float32) - zero) * factor).to(OPERAND),
            ((((w >> 8) & 15).to(tl.float32) - zero) * factor).to(OPERAND),
            ((((w >> 12) & 15).to(tl.float32) - zero) * factor).to(OPERAND),
        )
    else:
        # 0x4300 | n is the bfloat16 128 + n; `zero` is -(128 + zero point).
        return tl.inline_asm_elementwise(
            INT4_ASM,
            "=&r,=&r,=&r,=&r,r,r,r",
            [words, factor, zero],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def decode_int4_exact(words, factor, zero, OPERAND: tl.constexpr, PLAIN: tl.constexpr):
    """Return eight planes, whose sums, the first plus the fifth and so on, are exactly ``(nibble - zero) * factor``.

    A code less its zero point has four bits, a bfloat16 scale eight: their product has twelve, two bfloat16 sixteen.
    """
    if PLAIN:
        return _int4_exact_plain(words, factor, zero, OPERAND)
    else:
        return tl.inline_asm_elementwise(
            INT4_EXACT_ASM,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
            [words, factor, zero],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )


@triton.jit
def decode_int4_exact_half(words, factor, zero, OPERAND: tl.constexpr, PLAIN: tl.constexpr):
    """The same for scales in float16, as :func:`factor_half` converts them. The products have 15 bits."""
    if PLAIN:
        return _int4_exact_plain(words, factor, zero, OPERAND)
    else:
        return tl.inline_asm_elementwise(
            INT4_EXACT_HALF_ASM,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
            [words, factor, zero],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )


@triton.jit
def _int4_exact_plain(words, factor, zero, OPERAND: tl.constexpr):
    w = words.to(tl.int32)
    w0 = ((w & 15).to(tl.float32) - zero) * factor
    w1 = (((w >> 4) & 15).to(tl.float32) - zero) * factor
    w2 = (((w >> 8) & 15).to(tl.float32) - zero) * factor
    w3 = (((w >> 12) & 15).to(tl.float32) - zero) * factor
    p0, p1, p2, p3 = w0.to(OPERAND), w1.to(OPERAND), w2.to(OPERAND), w3.to(OPERAND)
    return (
        p0,
        p1,
        p2,
        p3,
        (w0 - p0.to(tl.float32)).to(OPERAND),
        (w1 - p1.to(tl.float32)).to(OPERAND),
        (w2 - p2.to(tl.float32)).to(OPERAND),
        (w3 - p3.to(tl.float32)).to(OPERAND),
    )


@triton.jit
def decode_e4m3(words, factor, zero, OPERAND: tl.constexpr, PLAIN: tl.constexpr):
    """Return two planes of E4M3, exact and without scales, which the epilogue or each step applies."""
    if PLAIN:
        w = words.to(tl.int32)
        return (factor_e4m3(w & 255, True).to(OPERAND), factor_e4m3((w >> 8) & 255, True).to(OPERAND))
    else:
        return tl.inline_asm_elementwise(
            E4M3_ASM,
            "=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def decode_e4m3_scaled(words, factor, zero, OPERAND: tl.constexpr, PLAIN: tl.constexpr):
    """Return two planes of E4M3 times their power of two. Without PLAIN: times 2**-18 (see E4M3_SCALED_SHIFT)."""
    if PLAIN:
        w = words.to(tl.int32)
        return (
            (factor_e4m3(w & 255, True) * factor).to(OPERAND),
            (factor_e4m3((w >> 8) & 255, True) * factor).to(OPERAND),
        )
    else:
        return tl.inline_asm_elementwise(
            E4M3_SCALED_ASM,
            "=&r,=&r,r,r",
            [words, factor],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def decode_e4m3_half(words, factor, zero, OPERAND: tl.constexpr, PLAIN: tl.constexpr):
    """Return two planes of E4M3 as float16. Without PLAIN: times 2**-8 (see E4M3_SHIFT), subnormal numbers included."""
    if PLAIN:
        return decode_e4m3(words, factor, zero, OPERAND, PLAIN)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, s, m;
            mov.b32 s, 0x80008000;
            mov.b32 m, 0x3F803F80;
            shl.b32 a, $2, 8;
            shl.b32 b, $2, 7;
            and.b32 b, b, m;
            lop3.b32 $0, a, s, b, 0xEA;
            shr.u32 b, $2, 1;
            and.b32 b, b, m;
            lop3.b32 $1, $2, s, b, 0xEA;
            }
            """,
            "=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
