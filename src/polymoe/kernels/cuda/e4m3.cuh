// Conversion to e4m3, and to float16, which holds every e4m3 number.
#pragma once
#include <cstdint>

namespace polymoe {

// Two numbers rounded to e4m3, those above 448 to 448; a in the low byte.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b) {
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(b), "f"(a));
    return r;
}

// The two e4m3 codes in the low, or the high, half of a word, as a pair of float16.
__device__ __forceinline__ uint32_t low_codes(uint32_t word) {
    uint32_t r;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, l;\n}" : "=r"(r) : "r"(word));
    return r;
}

__device__ __forceinline__ uint32_t high_codes(uint32_t word) {
    uint32_t r;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, h;\n}" : "=r"(r) : "r"(word));
    return r;
}

}  // namespace polymoe
