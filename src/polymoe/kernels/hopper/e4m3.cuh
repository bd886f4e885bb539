// Conversion to e4m3.
#pragma once
#include <cstdint>

namespace polymoe {

// Two numbers rounded to e4m3, those above 448 to 448; a in the low byte.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b) {
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(b), "f"(a));
    return r;
}

}  // namespace polymoe
