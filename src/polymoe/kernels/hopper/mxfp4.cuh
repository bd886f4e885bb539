// MXFP4 words of the Hopper layout to A operands in bfloat16. See layouts/hopper_order.py for where the bits lie.
#pragma once
#include <cstdint>

namespace polymoe {

// What the accumulator is multiplied by at the end: weights are held times 2^-24.
constexpr float kUnscale = 16777216.0f;

// The scales of rows g (low half) and g + 8 (high half), for the two groups of a block.
struct Scales {
    uint32_t group[2];
};

__device__ __forceinline__ Scales decode_scales(uint32_t word) {
    return {{word & 0x7F807F80u, __funnelshift_l(word, word, 8) & 0x7F807F80u}};
}

// Both halves of a times the low, or the high, half of s.
__device__ __forceinline__ uint32_t times_low(uint32_t a, uint32_t s) {
    uint32_t r;
    asm("{\n.reg .b16 l, h;\n.reg .b32 f;\nmov.b32 {l, h}, %2;\nmov.b32 f, {l, l};\nmul.rn.bf16x2 %0, %1, f;\n}"
        : "=r"(r)
        : "r"(a), "r"(s));
    return r;
}

__device__ __forceinline__ uint32_t times_high(uint32_t a, uint32_t s) {
    uint32_t r;
    asm("{\n.reg .b16 l, h;\n.reg .b32 f;\nmov.b32 {l, h}, %2;\nmov.b32 f, {h, h};\nmul.rn.bf16x2 %0, %1, f;\n}"
        : "=r"(r)
        : "r"(a), "r"(s));
    return r;
}

// One word to the four registers of m16n8k16's A operand.
__device__ __forceinline__ void decode(uint32_t (&a)[4], uint32_t word, uint32_t scales) {
    const uint32_t mask = 0x81C081C0u;
    a[0] = times_low(word & mask, scales);
    a[1] = times_high((word << 4) & mask, scales);
    a[2] = times_low(__funnelshift_l(word, word, 10) & mask, scales);
    a[3] = times_high(((word << 6) & 0x80C080C0u) | ((word >> 2) & 0x01000100u), scales);
}

}  // namespace polymoe
