// Stands in for the kernels' ptx/bf16x2.cuh.
#pragma once
#include "../cuda.h"

namespace polymoe {

// In double, where a product and a sum of numbers with 8 bits are exact unless they are 2^30 apart.
inline uint32_t fma_bf16x2(uint32_t a, uint32_t s, uint32_t c, int which) {
    uint32_t r = 0;
    for (int i = 0; i < 2; ++i) {
        const double factor = emulator::half(s, which), more = emulator::half(c, which);
        const float v = static_cast<float>(emulator::half(a, i) * factor + more);
        r |= static_cast<uint32_t>(emulator::to_bits(v)) << 16 * i;
    }
    return r;
}
inline uint32_t fma_bf16x2_low(uint32_t a, uint32_t s, uint32_t c) { return fma_bf16x2(a, s, c, 0); }
inline uint32_t fma_bf16x2_high(uint32_t a, uint32_t s, uint32_t c) { return fma_bf16x2(a, s, c, 1); }
inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    const uint32_t low = emulator::to_bits(emulator::half(a, 0) * emulator::half(b, 0));
    return low | static_cast<uint32_t>(emulator::to_bits(emulator::half(a, 1) * emulator::half(b, 1))) << 16;
}

}  // namespace polymoe
