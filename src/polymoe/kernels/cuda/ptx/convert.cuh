// Conversions, and arithmetic on packed elements. Of two elements in 32 bits, the first is in the low half.
#pragma once
#include <cstdint>

namespace polymoe {

// ---- bfloat16 and float16, as bits

__device__ __forceinline__ uint16_t f32_to_bf16(float v) {
    uint16_t r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
}

__device__ __forceinline__ float bf16_to_f32(uint16_t v) { return __uint_as_float(static_cast<uint32_t>(v) << 16); }

__device__ __forceinline__ uint16_t f32_to_f16(float v) {
    uint16_t r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
}

__device__ __forceinline__ float f16_to_f32(uint16_t v) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
    return r;
}

__device__ __forceinline__ uint32_t pack_bf16x2(float a, float b) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}

// Both halves of a times the low, or the high, half of s.
__device__ __forceinline__ uint32_t mul_bf16x2_low(uint32_t a, uint32_t s) {
    uint32_t r;
    asm("{\n.reg .b16 l, h;\n.reg .b32 f;\nmov.b32 {l, h}, %2;\nmov.b32 f, {l, l};\nmul.rn.bf16x2 %0, %1, f;\n}"
        : "=r"(r)
        : "r"(a), "r"(s));
    return r;
}

__device__ __forceinline__ uint32_t mul_bf16x2_high(uint32_t a, uint32_t s) {
    uint32_t r;
    asm("{\n.reg .b16 l, h;\n.reg .b32 f;\nmov.b32 {l, h}, %2;\nmov.b32 f, {h, h};\nmul.rn.bf16x2 %0, %1, f;\n}"
        : "=r"(r)
        : "r"(a), "r"(s));
    return r;
}

__device__ __forceinline__ uint32_t add_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// ---- E4M3

// Rounded to nearest even; beyond 448, 448.
__device__ __forceinline__ uint32_t pack_e4m3x2(float a, float b) {
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(b), "f"(a));
    return r;
}

// The two codes in the low, or the high, half of a word as float16, which holds every E4M3 value.
__device__ __forceinline__ uint32_t e4m3x2_to_f16x2_low(uint32_t word) {
    uint32_t r;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, l;\n}" : "=r"(r) : "r"(word));
    return r;
}

__device__ __forceinline__ uint32_t e4m3x2_to_f16x2_high(uint32_t word) {
    uint32_t r;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, h;\n}" : "=r"(r) : "r"(word));
    return r;
}

// ---- bytes

// Byte I of a word, zero-extended.
template <int I>
__device__ __forceinline__ uint32_t extract_byte(uint32_t word) {
    uint32_t r;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(word), "n"(0x4440 + I));
    return r;
}

// Four of eight bytes, selected by the four lowest hexadecimal digits of `selector`, 0 to 7 each; 8 more gives
// eight times that byte's sign bit.
__device__ __forceinline__ uint32_t prmt(uint2 bytes, uint32_t selector) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(bytes.x), "r"(bytes.y), "r"(selector));
    return r;
}

// ---- float32, fast: the last bits may differ

__device__ __forceinline__ float exp2_approx(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// 0 where b is above 2^126.
__device__ __forceinline__ float fast_divide(float a, float b) { return __fdividef(a, b); }

// Minimum and maximum that propagate NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

__device__ __forceinline__ float max_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Both halves of a times the low, or the high, half of s, plus the same half of c.
__device__ __forceinline__ uint32_t fma_bf16x2_low(uint32_t a, uint32_t s, uint32_t c) {
    uint32_t r;
    asm("{\n.reg .b16 l, h, m, i;\n.reg .b32 f, g;\nmov.b32 {l, h}, %2;\nmov.b32 f, {l, l};\n"
        "mov.b32 {m, i}, %3;\nmov.b32 g, {m, m};\nfma.rn.bf16x2 %0, %1, f, g;\n}"
        : "=r"(r)
        : "r"(a), "r"(s), "r"(c));
    return r;
}

__device__ __forceinline__ uint32_t fma_bf16x2_high(uint32_t a, uint32_t s, uint32_t c) {
    uint32_t r;
    asm("{\n.reg .b16 l, h, m, i;\n.reg .b32 f, g;\nmov.b32 {l, h}, %2;\nmov.b32 f, {h, h};\n"
        "mov.b32 {m, i}, %3;\nmov.b32 g, {i, i};\nfma.rn.bf16x2 %0, %1, f, g;\n}"
        : "=r"(r)
        : "r"(a), "r"(s), "r"(c));
    return r;
}

}  // namespace polymoe
