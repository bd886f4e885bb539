// Pairs of bfloat16: products, and products plus a number, rounded once.
#pragma once
#include <cstdint>

namespace polymoe {

#ifdef POLYMOE_SM80  // which has fma alone: plus -0

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
    return r;
}

#else

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

#endif

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
